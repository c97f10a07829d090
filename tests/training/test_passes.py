"""`train.passes_per_step`: several passes over a step's batch, with one pi_old, which a resumed run
repeats exactly.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from dapo.cli.train import start_run
from dapo.config import build_config
from dapo.core.errors import EngineError
from dapo.policy.policy import Policy
from dapo.sampling.samples import minibatches, with_old_logprobs
from dapo.types import Sample
from helpers.async_runs import run_or_resume
from helpers.tiny_policies import groups_of
from helpers.tiny_runs import contents, metrics, tiny

ANY = {"model": "tiny-random", "data": {"train": "builtin:sums"}}
TWO = (
    "train.passes_per_step=2",
    "train.minibatch_groups=2",
    "train.num_steps=2",
    "train.save_every=1",
    "train.keep_checkpoints=9",
)


def samples() -> list[Sample]:
    """Two samples of each of six groups."""
    return groups_of([(2, (3, 4))] * 6)


def ids(updates: Sequence[Sequence[Sample]]) -> list[list[int]]:
    return [sorted({sample.group_id for sample in update}) for update in updates]


def cut(passes: int, *, step: int = 1) -> list[list[Sample]]:
    options = [
        "rollout.prompts_per_step=6",
        "train.minibatch_groups=2",
        f"train.passes_per_step={passes}",
    ]
    config = build_config(ANY, options)
    assert config.updates_per_step == 3 * passes
    return minibatches(samples(), config, step=step)


def test_each_pass_holds_every_group_once_in_an_order_of_its_own():
    updates = cut(3)
    passes = [ids(updates[start : start + 3]) for start in (0, 3, 6)]
    for each in passes:
        assert sorted(chain.from_iterable(each)) == sorted(
            {sample.group_id for sample in samples()}
        )
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert ids(cut(1)) == passes[0]
    assert ids(cut(3)) == ids(updates)
    assert ids(cut(3, step=2)) != ids(updates)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_old_log_probabilities_are_recorded_once_for_each_sample(passes: int):
    asked: list[Sample] = []

    def record(wanted: list[Sample]) -> list[Sample]:
        asked.extend(wanted)
        return [replace(sample, old_logprobs=(-1.0,)) for sample in wanted]

    first, *later = with_old_logprobs(cut(passes), record)
    assert len(asked) == len({id(sample) for sample in asked}) == (12 if passes > 1 else 8)
    assert all(sample.old_logprobs is None for sample in first)
    assert all(sample.old_logprobs == (-1.0,) for update in later for sample in update)


def test_the_ratio_leaves_1_in_the_second_pass_and_pi_old_is_that_before_the_first(tmp_path: Path):
    for passes in (1, 2):
        options = (
            f"train.passes_per_step={passes}",
            "train.minibatch_groups=4",
            "train.num_steps=1",
        )
        start_run(
            tiny("rollout.prompts_per_step=4", *options),
            run_dir=tmp_path / str(passes),
            config_name="tiny",
        )
    once = metrics(tmp_path / "1")[-1]
    twice = metrics(tmp_path / "2")[-1]
    assert (once["loss/ratio_mean"], once["loss/approx_kl"]) == (1.0, 0.0)
    assert twice["loss/ratio_mean"] != 1.0
    assert twice["loss/approx_kl"] > 0
    assert once["rollout/tokens_in_minibatches"] == twice["rollout/tokens_in_minibatches"]


def test_microbatches_change_nothing_but_rounding(tmp_path: Path):
    rows = []
    for name, tokens in (("a", 16384), ("b", 64)):
        config = tiny(*TWO, f"train.microbatch_tokens={tokens}", "model.dtype=float64")
        start_run(config, run_dir=tmp_path / name, config_name="tiny")
        rows.append(metrics(tmp_path / name)[-1])
    for name in ("loss/policy", "loss/ratio_mean", "loss/approx_kl", "optim/grad_norm"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-7, abs=1e-12)


@pytest.mark.parametrize(
    "options", [(), ("schedule=one_step_off", "rollout.engines=1")], ids=["sync", "one_step_off"]
)
def test_a_run_that_ends_between_two_passes_is_resumed_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
):
    config = tiny(*TWO, *options)
    run_or_resume(tmp_path / "whole", config)
    made: list[int] = []
    update = Policy.update

    def failing(
        self: Policy, minibatch: Sequence[Sample], *, step: int, custom: object = None
    ) -> dict[str, float]:
        made.append(step)
        if made.count(2) > config.updates_per_step // 2 + 1:
            raise EngineError("ended in the second pass")
        return update(self, minibatch, step=step)

    monkeypatch.setattr(Policy, "update", failing)
    with pytest.raises(EngineError, match="in the second pass"):
        run_or_resume(tmp_path / "cut", config)
    monkeypatch.undo()
    assert [row["step"] for row in metrics(tmp_path / "cut")][-1] == 1
    run_or_resume(tmp_path / "cut", config)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
