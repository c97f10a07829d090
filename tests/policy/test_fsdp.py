"""Laws of sharded training: as many ranks as one likes compute what one process computes, and save
what it reads.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dapo.algo.entropy import DELTA
from dapo.core.errors import CheckpointError, ConfigError
from dapo.distributed.local import LocalLauncher
from dapo.policy.checkpoint import SavedWeights
from dapo.policy.hf_io import write_model_directory
from dapo.policy.lora import saved_weights
from dapo.policy.packing import DUMMY_MICROBATCH
from dapo.policy.policy import Policy
from dapo.types import Sample
from helpers.fsdp_ranks import RankGroup, model_named, rank_spec, unsharded_policy
from helpers.tiny_policies import (
    assert_close,
    branching,
    gradient_of,
    groups_of,
    loaded,
    ragged,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("forked_workers")

EXACT = 1e-10

OF_THE_CUT = {"optim/shared_token_fraction"}
"""Metrics that depend on which samples are in a microbatch together."""


@pytest.fixture(scope="module")
def rank_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankGroup]]:
    """A world of one rank and one of two, for all tests of this file."""
    launcher = LocalLauncher(tmp_path_factory.mktemp("logs"), timeout_s=120)
    ranks_and_sizes = [(0, 1), (0, 2), (1, 2)]
    workers = launcher.start(
        [f"rank{r}of{n}" for r, n in ranks_and_sizes], [rank_spec(r, n) for r, n in ranks_and_sizes]
    )
    yield {1: RankGroup(workers[:1]), 2: RankGroup(workers[1:])}
    launcher.close()


@pytest.fixture
def two(rank_groups: dict[int, RankGroup]) -> RankGroup:
    return rank_groups[2]


def test_ranks_send_each_other_messages_of_any_length(rank_groups: dict[int, RankGroup]) -> None:
    long = bytes(range(256)) * 5000
    sent = [[b"", long], [b"from 1 to 0", b""]]
    assert rank_groups[2].each("exchange", sent) == [[b"", b"from 1 to 0"], [long, b""]]
    assert rank_groups[2].each("exchange", [[b"", b""]] * 2) == [[b"", b""]] * 2
    assert rank_groups[1].each("exchange", [[b"own"]]) == [[b"own"]]


def with_old(samples: list[Sample], gap: float) -> list[Sample]:
    """Recorded by another policy than the one that trains, so that ratios leave 1 on both sides."""

    def rows(row: Sample, by: float) -> tuple[float, ...]:
        return tuple(
            -5.0 + by * math.sin(i + len(row.response_ids)) for i in range(len(row.response_ids))
        )

    return [
        replace(
            row, old_logprobs=rows(row, gap), engine_logprobs=rows(row, gap / 2), mask=_mask(row)
        )
        for row in samples
    ]


def _mask(row: Sample) -> tuple[bool, ...]:
    """Every fifth token does not train."""
    return tuple((i + len(row.response_ids)) % 5 != 0 for i in range(len(row.response_ids)))


LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"dual_clip": 3.0, "max_approx_kl": None},
    "everything": {
        "aggregate": "group",
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "engine_correction": "tis",
        "max_approx_kl": None,
    },
    "divergence": {
        "kl_coef": 0.3,
        "kl_estimator": "full",
        "engine_correction": "tis",
        "max_approx_kl": None,
    },
    "custom": {
        "function": "examples.losses:dapo",
        "engine_correction": "tis",
        "max_approx_kl": None,
    },
}


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("exact", "dapo"),
        ("exact_tied", "everything"),
        ("exact", "custom"),
        ("exact_tied", "divergence"),
    ],
)
def test_one_and_two_ranks_have_the_gradient_and_the_metrics_of_one_process(
    rank_groups: dict[int, RankGroup], model: str, loss: str, tmp_path: Path
) -> None:
    shared = [replace(each, group_id=9 + each.group_id) for each in branching()]
    samples = with_old(ragged() + shared, gap=2.0)
    options = {"loss": LOSSES[loss]}
    policy = unsharded_policy(model, **options)
    metrics = policy.update(samples, step=1)
    expected = _moments(policy, tmp_path)
    for size, rank_group in rank_groups.items():
        rank_group.all("make", model, options)
        own, *others = rank_group.update(samples, loss=LOSSES[loss])
        assert all(other == own for other in others)
        assert own.keys() == metrics.keys() | {"skipped_in_a_row"}
        for name, value in metrics.items():
            if name not in OF_THE_CUT:
                assert own[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert_close(rank_group.gradient(tmp_path / f"{size}"), expected, relative=EXACT)


def _moments(policy: Policy, directory: Path) -> dict[str, Tensor]:
    (directory / "whole").mkdir()
    policy.save(directory / "whole")
    return {
        name: m / (1 - 0.9)
        for name, m in load_file(directory / "whole" / "exp_avg.safetensors").items()
    }


def test_a_rank_reads_the_device_once_in_an_update_of_any_number_of_microbatches(
    two: RankGroup,
) -> None:
    samples = with_old(groups_of([(5, (30, 40))] * 3), gap=2.0)
    two.all("make", "exact", {"loss": LOSSES["everything"]})
    partitions = two.partitions(samples, LOSSES["everything"])
    for rank_microbatches in (partitions, [passes * 3 for passes in partitions]):
        for reads in two.each("reads_of_update", rank_microbatches, 1):
            assert reads == ["policy/transfer.py"]


def test_a_rank_with_only_masked_rows_does_not_hang_the_others(
    two: RankGroup, tmp_path: Path
) -> None:
    samples = groups_of([(5, (3, 9, 7)), (2, (4, 30))])
    expected = gradient_of(unsharded_policy("exact"), samples, tmp_path / "whole")
    two.all("make", "exact", {})
    everything = [
        rank_microbatch
        for rank_microbatches in two.partitions(samples)
        for rank_microbatch in rank_microbatches
    ]
    two.each("update", [tuple(everything), (DUMMY_MICROBATCH,) * len(everything)], 1)
    assert_close(two.gradient(tmp_path / "two"), expected, relative=EXACT)


def test_a_minibatch_of_fewer_rows_than_ranks_and_one_of_none_are_updates_like_any_other(
    two: RankGroup, tmp_path: Path
) -> None:
    two.all("make", "exact", {})
    policy = unsharded_policy("exact")
    for samples in (groups_of([(4, (6,))]), [], ragged()):
        metrics = policy.update(samples, step=1)
        assert two.update(samples)[0]["optim/grad_norm"] == pytest.approx(
            metrics["optim/grad_norm"], rel=1e-9
        )
    assert_close(two.weights()[1], weights_of(policy), relative=EXACT)


def test_several_updates_per_step_with_active_clipping_equal_those_of_one_process(
    two: RankGroup,
) -> None:
    options = {"optim": {"lr": 1e-2, "max_grad_norm": 0.3}}
    policy = unsharded_policy("exact_tied", **options)
    two.all("make", "exact_tied", options)
    clipped = 0.0
    for step in (1, 2):
        samples = policy.record_old_logprobs(ragged())
        assert recorded(two, ragged()) == [
            pytest.approx(row.old_logprobs, abs=1e-9) for row in samples
        ]
        for minibatch in (samples[:4], samples[4:7], samples[7:]):
            metrics = policy.update(minibatch, step=step)
            found = two.update(minibatch, step=step)[0]
            for name, value in metrics.items():
                if name not in OF_THE_CUT:
                    assert found[name] == pytest.approx(value, rel=1e-8, abs=1e-10), name
            assert metrics["optim/grad_norm"] > 0.3
            clipped += metrics["loss/clip_low_fraction"] + metrics["loss/clip_high_fraction"]
    assert clipped > 0
    assert_close(two.weights()[0], weights_of(policy), relative=1e-8)


def recorded(rank_group: RankGroup, samples: list[Sample]) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = [()] * len(samples)
    partitions = rank_group.partitions(samples, {"entropy_coef": 1.0})  # every row
    for rank_microbatches, answers in zip(
        partitions, rank_group.each("logprobs", partitions), strict=True
    ):
        for rank_microbatch, scores in zip(rank_microbatches, answers, strict=True):
            for i, row in zip(rank_microbatch.indices, scores, strict=False):
                rows[i] = row
    return rows


def test_an_update_that_is_skipped_is_skipped_by_every_rank(two: RankGroup) -> None:
    two.all("make", "exact", {})
    before = two.weights()[0]
    finite = groups_of([(3, (4, 4)), (2, (5,))])
    broken = [*finite[:2], replace(finite[2], advantage=math.inf)]
    for count in (1, 2):
        for metrics in two.update(broken):
            assert metrics["optim/skipped"] == 1
            assert metrics["skipped_in_a_row"] == count
    for weights in two.weights():
        assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert all(metrics["skipped_in_a_row"] == 0 for metrics in two.update(ragged()))


@pytest.mark.parametrize("model", ["llama", "tied llama"])
def test_bfloat16_is_near_one_process_and_has_float32_master_weights(
    two: RankGroup, model: str, tmp_path: Path
) -> None:
    policy = unsharded_policy(model)
    two.all("make", model, {})
    samples = policy.record_old_logprobs(ragged())
    expected = gradient_of(policy, samples, tmp_path / "whole")
    two.update(samples)
    found = two.gradient(tmp_path / "two")
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        similarity = torch.nn.functional.cosine_similarity(
            found[name].flatten(), gradient.flatten(), dim=0
        )
        assert similarity > 0.999, name
    master_weights = two.state(tmp_path / "two", "weights")
    assert all(master.dtype == torch.float32 for master in master_weights.values())
    assert all(weight.dtype == torch.bfloat16 for weight in two.weights()[0].values())


@pytest.mark.parametrize("model", ["qwen2 in float32", "qwen3 in float32"])
def test_layers_fused_before_sharding_have_the_gradient_of_one_process(
    two: RankGroup, model: str, tmp_path: Path
) -> None:
    policy = unsharded_policy(model)
    two.all("make", model, {})
    fused = sum("forward" in vars(module) for module in policy._model.modules())
    assert two.all("fused_layers") == [fused, fused]
    assert fused > 20  # norms, feed-forward blocks and products
    samples = policy.record_old_logprobs(ragged())
    expected = gradient_of(policy, samples, tmp_path / "whole")
    two.update(samples)
    assert_close(two.gradient(tmp_path / "two"), expected, relative=1e-5)


LORA = {"rank": 3, "alpha": 4.5}


def test_adapters_train_the_same_on_two_ranks_and_are_merged_for_engines(
    two: RankGroup, tmp_path: Path
) -> None:
    loss = {"kl_coef": 0.1}  # to the model without them
    options = {"lora": LORA, "loss": loss, "optim": {"lr": 1e-2}}
    policy = unsharded_policy("exact_tied", **options)
    two.all("make", "exact_tied", options)
    for step in (1, 2, 3):
        policy.update(ragged(), step=step)
        two.update(ragged(), step=step, loss=loss)
    expected = weights_of(policy)
    assert_close(two.weights()[0], expected, relative=1e-8)
    (tmp_path / "two").mkdir()
    two.all("save", tmp_path / "two")
    merged = saved_weights(tmp_path / "two", model_named("exact_tied").model)
    assert_close(dict(merged.named_tensors()), expected, relative=1e-8)


@pytest.mark.parametrize("model", ["exact_tied", "llama"])
def test_a_reference_that_moves_and_the_entropys_weight_are_those_of_one_process_and_resume(
    two: RankGroup, model: str, tmp_path: Path
) -> None:
    loss = {"kl_coef": 0.1, "reference": {"every": 2}, "entropy_target": 99.0}
    options = {"loss": loss, "optim": {"lr": 1e-2}}
    policy = unsharded_policy(model, **options)
    two.all("make", model, options)
    found = []
    for step in (1, 2, 3):
        expected = policy.update(ragged(), step=step)
        found.append(two.update(ragged(), step=step, loss=loss)[0])
        assert (
            found[-1]["loss/entropy_coef"]
            == expected["loss/entropy_coef"]
            == pytest.approx(DELTA * (step - 1))
        )
        if model == "exact_tied":  # the other one computes in bfloat16
            for name in ("loss/kl", "loss/entropy"):
                assert found[-1][name] == pytest.approx(expected[name], rel=1e-8, abs=1e-12), (
                    step,
                    name,
                )
    # the policy after step 2
    assert [metrics["loss/kl"] < 1e-12 for metrics in found] == [True, False, True]
    two.state(tmp_path / "two", "reference")
    goes_on = two.update(ragged(), step=4, loss=loss)[0]
    assert goes_on["loss/kl"] > 1e-6
    two.all("make", model, options)
    two.all("load", tmp_path / "two")
    assert two.update(ragged(), step=4, loss=loss)[0] == goes_on
    alone = unsharded_policy(model, **options)  # one process reads what two have written
    alone.load(tmp_path / "two")
    tolerance = 1e-8 if model == "exact_tied" else 0.3
    assert alone.update(ragged(), step=4)["loss/kl"] == pytest.approx(
        goes_on["loss/kl"], rel=tolerance
    )


@pytest.mark.parametrize("estimator", ["full", "k2"])
def test_two_ranks_learn_from_a_teacher_what_one_process_learns(
    two: RankGroup, estimator: str, tmp_path: Path
) -> None:
    teacher = loaded("qwen3", dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in teacher.model.named_parameters()}
    write_model_directory(weights.items(), teacher.model, teacher.tokenizer, tmp_path / "teacher")
    loss = {
        "kl_coef": 0.5,
        "kl_estimator": estimator,
        "reference": {"model": str(tmp_path / "teacher")},
    }
    options = {"loss": loss, "optim": {"lr": 1e-2}}
    policy = unsharded_policy("exact_tied", **options)
    two.all("make", "exact_tied", options)
    for step in (1, 2):
        expected = policy.update(ragged(), step=step)
        found = two.update(ragged(), step=step, loss=loss)[0]
        assert found["loss/kl"] == pytest.approx(expected["loss/kl"], rel=1e-6), step
        assert expected["loss/kl"] > 0.01
    assert_close(two.weights()[0], weights_of(policy), relative=1e-6)


def test_two_ranks_have_the_divergence_of_each_token_that_one_process_has(two: RankGroup) -> None:
    loss = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    options = {"loss": loss, "optim": {"lr": 1e-2}}
    policy = unsharded_policy("exact_tied", **options)
    two.all("make", "exact_tied", options)
    policy.update(ragged(), step=1)
    two.update(ragged(), step=1, loss=loss)
    expected = policy.token_kl(ragged(), step=2)
    partitions = two.partitions(ragged(), {"entropy_coef": 1.0})  # every row
    for passes, answers in zip(partitions, two.each("token_kl", partitions, 2), strict=True):
        for own, rows in zip(passes, answers, strict=True):
            for i, row in zip(own.indices, rows, strict=False):
                assert row == pytest.approx(list(expected[i]), abs=1e-9)
    assert max(abs(value) for row in expected for value in row) > 1e-3


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float64", {"loss": LOSSES["everything"]}),
        ("float64", {"lora": LORA, "loss": {"kl_coef": 0.1}}),
        ("bfloat16", {"loss": LOSSES["everything"]}),
    ],
)
def test_ranks_that_read_their_own_rows_train_bit_for_bit_as_those_that_load_the_whole_model(
    two: RankGroup, float64_model: Path, dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    states = []
    for in_parts in (False, True):
        assert two.all("make_from", float64_model, dtype, options, in_parts) == [in_parts] * 2
        samples = with_old(short(ragged()), gap=2.0)
        metrics = [two.update(samples, step=step, loss=options.get("loss")) for step in (1, 2)]
        folder = tmp_path / str(in_parts)
        states.append(
            {kind: two.state(folder, kind) for kind in ("weights", "exp_avg")}
            | {"all": two.weights()[1]}
        )
        states[-1]["metrics"] = {
            f"{i}": torch.tensor([*m.values()]) for i, m in enumerate(metrics[1])
        }
    for kind, tensors in states[0].items():
        assert states[1][kind].keys() == tensors.keys()
        assert all(torch.equal(states[1][kind][name], tensor) for name, tensor in tensors.items())


def short(samples: list[Sample]) -> list[Sample]:
    """With tokens of the tiny tokenizer's vocabulary."""
    return [
        replace(
            s,
            prompt_ids=tuple(t % 100 for t in s.prompt_ids),
            response_ids=tuple(t % 100 for t in s.response_ids),
        )
        for s in samples
    ]


def test_a_model_that_packing_changes_is_refused_by_every_rank_with_the_same_error(
    two: RankGroup, float64_model: Path, tmp_path: Path
) -> None:
    """Its own attention sees other tokens than packed attention does: only the comparison of
    results notices.
    """
    errors = []
    for future in [worker.call("make_changed", float64_model) for worker in two.workers]:
        with pytest.raises(ConfigError) as caught:
            future.result(60)
        errors.append(str(caught.value))
    assert "differ by" in errors[0]
    assert errors[0] == errors[1]
    two.all("make", "exact", {})
    two.update(ragged())


def test_checkpoints_load_on_any_number_of_ranks_bit_for_bit(
    rank_groups: dict[int, RankGroup], tmp_path: Path
) -> None:
    """Two ranks -> one process -> two ranks -> one rank -> two ranks -> one process."""
    two = rank_groups[2]
    one = rank_groups[1]
    model = "tied llama"
    for rank_group in (one, two):
        rank_group.all("make", model, {})
    policy = unsharded_policy(model)
    for step in (1, 2):
        two.update(ragged(), step=step)
    first = {kind: two.state(tmp_path / "0", kind) for kind in ("weights", "exp_avg", "exp_avg_sq")}
    policy.load(tmp_path / "0")
    (tmp_path / "1").mkdir()
    policy.save(tmp_path / "1")
    for rank_group, source, target in ((two, "1", "2"), (one, "2", "3"), (two, "3", "4")):
        rank_group.all("load", tmp_path / source)
        last = {kind: rank_group.state(tmp_path / target, kind) for kind in first}
        for kind, tensors in first.items():
            assert last[kind].keys() == tensors.keys()
            assert all(torch.equal(last[kind][name], tensor) for name, tensor in tensors.items())
    stored = {
        name: tensor
        for name, tensor in SavedWeights(tmp_path / "4").named_tensors()
        if name in first["weights"]
    }
    assert all(torch.equal(stored[name], tensor) for name, tensor in first["weights"].items())
    policy.load(tmp_path / "4")
    metrics = policy.update(ragged(), step=3)
    assert two.update(ragged(), step=3)[0]["optim/grad_norm"] == pytest.approx(
        metrics["optim/grad_norm"], rel=1e-2
    )
    files = sorted(path.name for path in (tmp_path / "4").rglob("*") if path.is_file())
    assert {Path(name).suffix for name in files} == {".safetensors", ".json"}


def test_one_state_is_always_saved_in_the_same_bytes(two: RankGroup, tmp_path: Path) -> None:
    """safetensors writes its metadata in the order of a hash map, which is another one each
    time.
    """
    two.all("make", "tied llama", {})
    two.update(ragged())
    saved = []
    for folder in (tmp_path / "0", tmp_path / "1"):
        folder.mkdir()
        two.all("save", folder)
        saved.append(
            {
                path.relative_to(folder): path.read_bytes()
                for path in folder.rglob("*")
                if path.is_file()
            }
        )
    assert len(saved[0]) == 7
    assert saved[0] == saved[1]


def test_a_sharded_checkpoint_of_another_model_is_refused(two: RankGroup, tmp_path: Path) -> None:
    two.all("make", "exact", {})
    tmp_path.joinpath("saved").mkdir()
    two.all("save", tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"float64 .*bfloat16|holds another model"):
        unsharded_policy("llama").load(tmp_path / "saved")
    two.all("make", "llama", {})
    with pytest.raises(CheckpointError, match="holds another model"):
        two.all("load", tmp_path / "saved")
    with pytest.raises(CheckpointError, match="is gone"):
        two.all("load", tmp_path / "nowhere")


def test_a_checkpoint_directory_that_a_rank_does_not_see_is_an_error_that_says_what_to_do(
    two: RankGroup, tmp_path: Path
) -> None:
    two.all("make", "exact", {})
    with pytest.raises(CheckpointError, match="file system that all of them share"):
        two.all("save", tmp_path / "elsewhere")
