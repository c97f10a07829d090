"""Numbers that go wrong: each is counted or corrected, no broken weights are saved, and a run that
cannot go on stops with a saved state and a sentence.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo.algo.loss import engine_weights
from dapo.cli.train import resume_run, start_run
from dapo.config import Config, load_config
from dapo.core.errors import EngineError, NumericsError
from dapo.engines.checked import CheckedEngine
from dapo.engines.engine import EngineLayer, RolloutEngine
from dapo.runs.console import ProgressDisplay
from dapo.runs.directory import RunDirectory
from dapo.sampling.queue import Batch
from dapo.start.build import build
from dapo.training.state import Run
from dapo.training.step_metrics import batch_metrics
from dapo.training.stopping import entropy_collapse_steps
from dapo.training.train import train
from dapo.types import Generation, Group, Problem, Sample, Verdict
from helpers.paths import TINY
from helpers.tiny_policies import (
    assert_close,
    gradient_of,
    loaded,
    make_policy,
    ragged,
    sample,
    weights_of,
)
from helpers.tiny_runs import inputs_of

BEYOND_FLOAT32 = 1e39


def tiny(*overrides: str) -> Config:
    return load_config(TINY, ["train.threads=1", "data.eval=null", *overrides])


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights in each checkpoint, by its name."""
    return {
        path.parent.name: load_file(path)
        for path in sorted(run.glob("checkpoints/*/weights.safetensors"))
    }


@contextmanager
def open_run(config: Config, path: Path) -> Iterator[Run]:
    """A run, parts of which a test may replace."""
    run = RunDirectory.create(path, "", {})
    display = ProgressDisplay(config.train.num_steps)
    with build(inputs_of(config), run, display, first_step=1) as training_run:
        try:
            yield training_run
        finally:
            training_run.tracker.close()


# truncated importance sampling


def test_a_weight_is_the_ratio_of_trainer_to_engine_up_to_the_cap():
    old = torch.tensor([[-1.0] * 7], dtype=torch.float64, requires_grad=True)
    ratios = [1.0, 1.5, 0.5, 0.1, 0.001, 2.0, 4.0]  # there is no lower bound
    engine = torch.tensor([[-1.0 - math.log(r) for r in ratios]], dtype=torch.float64)
    weights = engine_weights(old, engine, torch.ones(1, 7), cap=2.0)
    assert weights.tolist()[0] == pytest.approx([1.0, 1.5, 0.5, 0.1, 0.001, 2.0, 2.0], rel=1e-12)
    assert not weights.requires_grad


def test_what_does_not_train_has_weight_one_whatever_stands_there():
    old = torch.tensor([[math.nan, -1.0]])
    engine = torch.tensor([[-1.0, -math.inf]])
    assert engine_weights(old, engine, torch.tensor([[0, 0]]), cap=2.0).tolist() == [[1.0, 1.0]]


def test_ratios_beyond_all_bounds_stay_finite():
    old = torch.tensor([[-900.0, 0.0]])
    engine = torch.tensor([[0.0, -900.0]])
    weights = engine_weights(old, engine, torch.ones(1, 2), cap=1e30).tolist()[0]
    assert weights == pytest.approx([math.exp(-20), math.exp(20)], rel=1e-5)


def test_a_cap_of_nothing_and_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="cap must be above 0"):
        engine_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), cap=0.0)
    with pytest.raises(ValueError, match="engine_logprobs must have a value for each token"):
        engine_weights(torch.zeros(1, 2), torch.zeros(2, 1), torch.ones(1, 2), cap=2.0)


def engine_off_by(nats: float, *, recorded: bool) -> list[Sample]:
    """Samples whose engine gave each token `nats` less than the trainer does."""
    rows = make_policy().record_old_logprobs(ragged())
    biased = [
        replace(row, engine_logprobs=tuple(p - nats for p in row.old_logprobs or ()))
        for row in rows
    ]
    return biased if recorded else [replace(row, old_logprobs=None) for row in biased]


TIS = {"engine_correction": "tis"}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("nats", "weight", "truncated"),
    [(0.0, 1.0, 0.0), (math.log(1.5), 1.5, 0.0), (-3.0, math.exp(-3.0), 0.0)],
)
def test_a_corrected_gradient_is_the_plain_one_times_the_weights(
    tmp_path: Path, nats: float, weight: float, truncated: float, recorded: bool
):
    rows = engine_off_by(nats, recorded=recorded)
    plain = gradient_of(make_policy(), rows, tmp_path / "plain")
    corrected = gradient_of(make_policy(loss=TIS), rows, tmp_path / "corrected")
    assert_close(corrected, {name: weight * g for name, g in plain.items()}, relative=1e-6)
    update_metrics = make_policy(loss=TIS).update(rows, step=1)
    assert update_metrics["loss/engine_weight_mean"] == pytest.approx(weight)
    assert update_metrics["loss/engine_weight_truncated_fraction"] == truncated
    assert update_metrics["loss/ratio_mean"] == pytest.approx(
        1.0
    )  # of the trainer to itself: the engine has no part in it


def test_weights_above_the_cap_are_cut_and_counted(tmp_path: Path):
    rows = engine_off_by(math.log(4), recorded=True)
    plain = gradient_of(make_policy(), rows, tmp_path / "plain")
    corrected = gradient_of(make_policy(loss=TIS), rows, tmp_path / "corrected")
    assert_close(corrected, {name: 2 * g for name, g in plain.items()}, relative=1e-6)
    update_metrics = make_policy(loss={"engine_correction": 3.0}).update(rows, step=1)
    assert (
        update_metrics["loss/engine_weight_mean"],
        update_metrics["loss/engine_weight_truncated_fraction"],
    ) == (
        3.0,
        1.0,
    )


def test_the_term_for_entropy_is_corrected_as_the_surrogate_is(tmp_path: Path):
    rows = [replace(row, advantage=0.0) for row in engine_off_by(0.7, recorded=True)]
    terms = {"entropy_coef": 0.1}
    plain = gradient_of(make_policy(loss=terms), rows, tmp_path / "plain")
    assert any(float(g.abs().max()) > 0 for g in plain.values())
    corrected = gradient_of(make_policy(loss=terms | TIS), rows, tmp_path / "tis")
    assert_close(corrected, {name: 2 * g for name, g in plain.items()}, relative=1e-6)


def test_without_correction_the_engine_has_no_part_in_the_update():
    update_metrics = [
        make_policy().update(engine_off_by(nats, recorded=True), step=1) for nats in (0.0, 3.0)
    ]
    reference, biased = (
        {name: v for name, v in row.items() if "engine_logprob_gap" not in name}
        for row in update_metrics
    )
    assert reference == biased
    assert not any(name.startswith("loss/engine_weight") for name in reference)


def test_a_correction_without_the_engines_logprobs_is_an_error_and_never_left_out():
    with pytest.raises(ValueError, match="needs engine_logprobs"):
        make_policy(loss=TIS).update([sample(0, (1,), (2, 3))], step=1)


# a ratio that explodes


@pytest.mark.parametrize(
    ("nats", "approx_kl"), [(4.0, math.e**4 - 1 - 4), (-15.0, math.e**-15 - 1 + 15)]
)
def test_an_update_too_far_from_the_policy_that_sampled_is_skipped_and_counted(
    nats: float, approx_kl: float
):
    rows = make_policy().record_old_logprobs(ragged())
    rows = [
        replace(row, old_logprobs=tuple(p - nats for p in row.old_logprobs or ())) for row in rows
    ]
    policy = make_policy()
    before = weights_of(policy)
    update_metrics = policy.update(rows, step=1)
    assert update_metrics["loss/approx_kl"] == pytest.approx(approx_kl)  # by hand: r - 1 - log r
    assert (update_metrics["optim/skipped"], policy.skipped_in_a_row) == (1.0, 1)
    assert math.isfinite(update_metrics["optim/grad_norm"])
    assert_close(weights_of(policy), before, relative=0)
    for limit in (None, approx_kl + 1):
        free = make_policy(loss={"max_approx_kl": limit})
        assert (free.update(rows, step=1)["optim/skipped"], free.skipped_in_a_row) == (0.0, 0)


# weights that are no numbers


def set_weights(policy: Any, value: float) -> None:
    """The policy's own first weight tensor."""
    next(iter(policy.weights(version=0).named_tensors()))[1].fill_(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, value: float):
    policy = make_policy()
    set_weights(policy, value)
    for save in (lambda: policy.save(tmp_path), policy.snapshot):
        with pytest.raises(NumericsError, match=r"the weights are not finite .*embed_tokens"):
            save()
    assert list(tmp_path.iterdir()) == []


def test_weights_whose_sum_alone_leaves_the_numbers_are_saved(tmp_path: Path):
    policy = make_policy(loaded(dtype=torch.float32))
    set_weights(policy, 3e38)
    policy.save(tmp_path)
    assert (tmp_path / "weights.safetensors").is_file()


def test_an_update_that_leads_out_of_the_numbers_is_found_before_anything_follows_from_it(
    tmp_path: Path,
):
    policy = make_policy(loaded(dtype=torch.float32), optim={"lr": BEYOND_FLOAT32})
    policy.update(ragged(), step=1)
    policy.record_old_logprobs(ragged())
    what_follows = (
        lambda: policy.update(ragged(), step=1),
        lambda: policy.weights(version=1),
        lambda: policy.save(tmp_path),
        policy.snapshot,
    )
    for follow in what_follows:
        with pytest.raises(NumericsError, match="the weights are not finite after 1 updates"):
            follow()
    assert policy._optimizer.num_updates == 1


def test_a_run_whose_weights_leave_the_numbers_keeps_the_checkpoint_before_and_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    start_run(tiny("train.num_steps=2"), run_dir=run, config_name="tiny")
    before = checkpoints(run)
    with pytest.raises(NumericsError) as caught:
        resume_run(run, ["train.num_steps=4", f"optim.lr={BEYOND_FLOAT32}"])
    assert str(caught.value).startswith("the weights are not finite after 5 updates (")
    assert "saved: step 2 of 4; continue with: dapo resume" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["exit_reason"].startswith(
        "NumericsError: the weights are"
    )
    after = checkpoints(run)
    assert after.keys() == before.keys() == {"step_000002"}
    assert_close(after["step_000002"], before["step_000002"], relative=0)
    resume_run(run, ["train.num_steps=3", "optim.lr=0.001"])
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]


@pytest.mark.parametrize("finished_steps", [0, 2])
def test_a_policy_of_nan_is_neither_sampled_from_nor_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], finished_steps: int
):
    config = tiny("train.save_every=1")
    with open_run(config, tmp_path / "run") as training_run:
        if finished_steps:
            training_run.config = tiny(f"train.num_steps={finished_steps}")
            train(training_run)
            training_run.config = config
            training_run.state.is_saved = False
        set_weights(training_run.policy, math.nan)
        training_run.sampling.engine_version = None
        with pytest.raises(NumericsError, match="neither saved nor sampled from"):
            train(training_run)
    kept = checkpoints(tmp_path / "run")
    assert all(tensor.isfinite().all() for weights in kept.values() for tensor in weights.values())
    output = capsys.readouterr().out
    if finished_steps:
        assert list(kept) == ["step_000002"]
        assert "saved: step 2 of 5" in output
    else:
        assert "nothing is saved yet" in output


def test_a_run_that_skips_too_many_updates_stops_after_a_whole_step_saved_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """An entropy term beyond float32 makes every loss infinite: two skips per step, so ten are
    reached in step 5.
    """
    run = tmp_path / "run"
    config = tiny(f"loss.entropy_coef={BEYOND_FLOAT32}", "train.num_steps=7")
    with pytest.raises(NumericsError) as caught:
        start_run(config, run_dir=run, config_name="tiny")
    assert str(caught.value).startswith(
        "10 updates in a row were skipped (at most 9 may be): the loss or "
    )
    output = capsys.readouterr().out
    assert output.count("step 1: 2 of 2 updates skipped, with optim/grad_norm ") == 1
    assert output.count("updates skipped") == 1  # once, not in every step
    assert "saved: step 5 of 7" in output
    assert [row["optim/skipped"] for row in metrics(run)] == [2.0] * 5
    with open_run(tiny(), tmp_path / "untrained") as untrained:
        expected = {
            name: tensor.clone()
            for name, tensor in untrained.policy.weights(version=0).named_tensors()
        }
    saved = checkpoints(run)["step_000005"]
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    resume_run(run, ["train.num_steps=6", "loss.entropy_coef=0"])
    assert metrics(run)[-1]["optim/skipped"] == 0.0


# entropy


def batch_with(*logprobs: tuple[float, ...], outcome: str = "trained") -> Batch:
    generations = tuple(
        Generation(str(i), (1,) * len(row), row, "length", 0) for i, row in enumerate(logprobs)
    )
    group = Group(Problem("p", "?", "!"), (1,), generations, (Verdict(True, 1.0),) * len(logprobs))
    return Batch((), ((group, outcome),), {}, {}, 0)  # type: ignore[arg-type]


def test_entropy_is_estimated_from_every_sampled_token_of_decided_groups():
    assert batch_metrics(batch_with((-1.0, -2.0), (-6.0,)), ())["rollout/entropy_estimate"] == 3.0
    assert (
        batch_metrics(batch_with((-1.0,), outcome="all_correct"), ())["rollout/entropy_estimate"]
        == 1.0
    )
    steps = (
        ((-1e-5,), "trained", 3),
        ((-1.0,), "trained", 0),
        ((-1.0,), "excess", 2),
        ((), "trained", 2),
    )
    for rows, outcome, in_a_row in steps:
        assert (
            entropy_collapse_steps(batch_metrics(batch_with(rows, outcome=outcome), ()), 2)
            == in_a_row
        )


def test_an_entropy_collapse_ends_the_run_saved_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """At temperature 0.000001 the model says one thing; without dynamic sampling nothing else ends
    the run.
    """
    run = tmp_path / "run"
    config = tiny(
        "train.num_steps=20", "rollout.temperature=0.000001", "dynamic_sampling.enabled=false"
    )
    with pytest.raises(NumericsError) as caught:
        start_run(config, run_dir=run, config_name="tiny")
    assert str(caught.value).startswith(
        "the policy has collapsed: its entropy was below 0.0001 nats per token in 5 steps in a row"
    )
    assert "saved: step 5 of 20" in capsys.readouterr().out
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5]
    # the count is part of the state
    with pytest.raises(NumericsError, match="in 6 steps in a row"):
        resume_run(run, [])
    resume_run(run, ["rollout.temperature=1", "train.num_steps=8"])
    assert len(metrics(run)) == 8


# the gap between sampler and trainer


class AlteredEngine(EngineLayer):
    """A sound engine, but for what `alter` makes of each answer."""

    def __init__(self, engine: RolloutEngine, alter: Callable[[Generation], Generation]) -> None:
        super().__init__(engine)
        self._alter = alter

    def poll(self) -> list[Generation]:
        return [self._alter(generation) for generation in super().poll()]


ENGINE_IS_OLD = [
    "train.num_steps=2",
    "train.minibatch_groups=1",
    "model.dtype=float32",
    "loss.old_logprobs=engine",
]
"""Four updates per step, the last three of them with the engine's log-probabilities for pi_old."""


def test_with_the_engine_s_logprobs_for_old_ones_the_run_is_the_same_up_to_rounding(tmp_path: Path):
    rows = {}
    weights = {}
    for source in ("policy", "engine"):
        start_run(
            tiny(*ENGINE_IS_OLD, f"loss.old_logprobs={source}"),
            run_dir=tmp_path / source,
            config_name="tiny",
        )
        rows[source] = metrics(tmp_path / source)
        weights[source] = checkpoints(tmp_path / source)["step_000002"]
    before = weights_of(make_policy(inputs_of(tiny(*ENGINE_IS_OLD)).loaded))
    moved = {name: tensor - before[name] for name, tensor in weights["policy"].items()}
    assert_close(
        {name: tensor - before[name] for name, tensor in weights["engine"].items()},
        moved,
        relative=1e-3,
    )
    for row in rows["engine"][1:]:  # of the first update: of the others it would be 0
        assert (
            0
            < row["rollout/engine_logprob_gap_mean"]
            < row["rollout/engine_logprob_gap_max"]
            < 1e-5
        )
    for name in ("loss/policy", "loss/ratio_mean", "loss/approx_kl"):
        assert rows["engine"][-1][name] == pytest.approx(
            rows["policy"][-1][name], rel=1e-3, abs=1e-5
        )


def test_an_engine_that_differs_ends_a_run_that_takes_its_logprobs_for_old_ones(tmp_path: Path):
    config = tiny(*ENGINE_IS_OLD, "train.save_every=1")
    with open_run(config, tmp_path / "run") as training_run:
        differs_by = {0: 0.0005, 1: 0.0015}  # by the version of the weights
        training_run.sampling.engine = AlteredEngine(
            training_run.sampling.engine,
            lambda g: replace(g, logprobs=tuple(p - differs_by[g.version] for p in g.logprobs)),
        )
        with pytest.raises(
            EngineError, match=r"by 0\.0015 nats \(more than 0\.001\).*loss.old_logprobs=policy"
        ):
            train(training_run)
        after = {
            name: weight.clone()
            for name, weight in training_run.policy.weights(version=1).named_tensors()
        }
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]
    saved = checkpoints(tmp_path / "run")["step_000001"]
    # no update of step 2 was made
    assert all(torch.equal(after[name], tensor) for name, tensor in saved.items())


CAPPED = [*ENGINE_IS_OLD, "loss.engine_correction=tis"]


def test_a_run_whose_ratios_are_to_the_engine_never_scores_and_resumes_to_equal_bytes(
    tmp_path: Path,
):
    plain = tmp_path / "plain"
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    start_run(tiny(*ENGINE_IS_OLD, "loss.old_logprobs=policy"), run_dir=plain, config_name="tiny")
    start_run(tiny(*CAPPED), run_dir=whole, config_name="tiny")
    start_run(tiny(*CAPPED, "train.num_steps=1"), run_dir=parts, config_name="tiny")
    resume_run(parts, ["train.num_steps=2"])
    weights = [checkpoints(path)["step_000002"] for path in (whole, parts)]
    assert_close(*weights, relative=0)
    rows = metrics(whole)
    assert all("time/old_logprobs_s" in row for row in metrics(plain)[1:])
    assert not any("time/old_logprobs_s" in row for row in rows)
    for row, reference in zip(rows[1:], metrics(plain)[1:], strict=True):
        # an engine that rounds as the trainer: the ratio is that to pi_old, and nothing is capped
        assert row["loss/ratio_mean"] == pytest.approx(reference["loss/ratio_mean"], rel=1e-4)
        assert row["loss/engine_weight_mean"] == pytest.approx(row["loss/ratio_mean"])
        assert row["loss/engine_weight_truncated_fraction"] == 0
        assert 0 < row["rollout/engine_logprob_gap_mean"] < 1e-5


def test_an_engine_that_differs_is_corrected_by_the_ratio_itself(tmp_path: Path):
    with open_run(tiny(*CAPPED), tmp_path / "run") as training_run:
        training_run.sampling.engine = AlteredEngine(
            training_run.sampling.engine,
            lambda g: replace(g, logprobs=tuple(p - 0.1 for p in g.logprobs)),
        )
        train(training_run)
    for row in metrics(tmp_path / "run"):
        assert row["rollout/engine_logprob_gap_mean"] == pytest.approx(0.1, rel=1e-3)
        assert row["loss/ratio_mean"] == pytest.approx(math.exp(0.1), rel=0.05)


# with recorded log-probabilities, and with a single update
@pytest.mark.parametrize("minibatch_groups", [2, 4])
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_over_the_limit_the_run_warns_or_corrects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], correction: str, minibatch_groups: int
):
    overrides = [
        f"loss.engine_correction={correction}",
        f"train.minibatch_groups={minibatch_groups}",
    ]
    config = tiny("train.num_steps=2", "model.dtype=float64", *overrides)
    with open_run(config, tmp_path / "run") as training_run:
        training_run.sampling.engine = AlteredEngine(
            training_run.sampling.engine,
            lambda g: replace(g, logprobs=tuple(p - 0.5 for p in g.logprobs)),
        )
        train(training_run)
    output = capsys.readouterr().out
    rows = metrics(tmp_path / "run")
    assert [row["rollout/engine_logprob_gap_mean"] for row in rows] == pytest.approx([0.5, 0.5])
    warning = "sampler and trainer differ by 0.5 nats per token on average (more than 0.1)"
    # once
    assert [f"step {step}: {warning}" in output for step in (1, 2)] == [correction == "none", False]
    if correction == "tis":
        assert [row["loss/engine_weight_mean"] for row in rows] == pytest.approx(
            [math.exp(0.5)] * 2
        )
        assert [row["loss/engine_weight_truncated_fraction"] for row in rows] == [0.0, 0.0]


def test_with_an_engine_that_agrees_a_corrected_run_is_the_plain_one_within_rounding(
    tmp_path: Path,
):
    ends: list[dict[str, torch.Tensor]] = []
    for correction in ("none", "tis"):
        config = tiny(
            "train.num_steps=2", "model.dtype=float64", f"loss.engine_correction={correction}"
        )
        with open_run(config, tmp_path / correction) as training_run:
            train(training_run)
        ends += checkpoints(tmp_path / correction).values()
    assert_close(*ends, relative=1e-9)


# an engine that answers nonsense


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        (lambda g: replace(g, logprobs=(math.nan, *g.logprobs[1:])), "got nan at token 0"),
        (lambda g: replace(g, version=1), "expected weights of version 2, got version 1"),
        (lambda g: replace(g, token_ids=(10**6, *g.token_ids[1:])), "got 1000000 at token 0"),
    ],
)
def test_nothing_that_an_engine_got_wrong_is_trained_on_and_the_step_before_is_saved(
    tmp_path: Path, nonsense: Callable[[Generation], Generation], message: str
):
    config = tiny("train.num_steps=2")
    with open_run(config, tmp_path / "sound") as training_run:
        train(training_run)
    config = tiny("train.num_steps=5")
    with open_run(config, tmp_path / "run") as training_run:
        altered = AlteredEngine(
            training_run.sampling.engine, lambda g: nonsense(g) if g.version == 2 else g
        )
        training_run.sampling.engine = CheckedEngine(altered, vocabulary=1000)
        with pytest.raises(EngineError, match=message):
            train(training_run)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    reference = checkpoints(tmp_path / "sound")
    saved = checkpoints(tmp_path / "run")
    assert reference.keys() == saved.keys() == {"step_000002"}
    assert_close(saved["step_000002"], reference["step_000002"], relative=0)
