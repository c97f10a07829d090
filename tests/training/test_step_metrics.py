"""What a step writes down: the table of judged responses."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import pytest
from pyarrow.parquet import read_table

from dapo.config import load_config
from dapo.data.stream import ProblemStream
from dapo.runs.console import ProgressDisplay
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import read_metrics
from dapo.runs.outcomes import COUNTED, OUTCOMES
from dapo.runs.sinks import Tracker
from dapo.sampling.batch import Sampling
from dapo.sampling.queue import Batch
from dapo.sampling.samples import with_advantages
from dapo.training.state import Run
from dapo.training.step_metrics import batch_metrics, in_background, rollouts_in_background
from dapo.training.train import train
from dapo.types import Generation, Group, Problem, Verdict
from helpers.fake_rollout import FakeEncoder, problems
from helpers.paths import TINY
from helpers.tiny_runs import new_run, tiny


def judged(position: int, *scores: float | None) -> Group:
    """A group with these scores; None is a verdict with an error."""
    verdicts = tuple(Verdict(None, 0.0, "died") if s is None else Verdict(s > 0, s) for s in scores)
    generations = tuple(
        Generation(str(i), (5, 9), (-1.0, -1.0), "stop", 0) for i, _ in enumerate(scores)
    )
    texts = tuple(f"text {i}" for i, _ in enumerate(scores))
    return Group(
        Problem(str(position), "?", ""),
        (1,),
        generations,
        verdicts,
        id=position,
        texts=texts,
        rewards=tuple(scores),
    )


def test_each_response_has_its_own_advantage_in_the_table_also_behind_one_without_a_verdict(
    tmp_path: Path,
):
    trained = judged(0, None, 1.0, None, -1.0)
    dropped = judged(1, -1.0, -1.0)
    counts = dict.fromkeys(OUTCOMES, 1)
    batch = Batch(
        (trained,), ((trained, "trained"), (dropped, "all_wrong")), counts, counts, shortfall=0
    )
    config = load_config(TINY, [])
    sampling = Sampling(ProblemStream(problems(4), seed=0), None, None, None, FakeEncoder(), None)  # type: ignore[arg-type]
    tracker = Tracker([], ProgressDisplay(1))
    run = Run(config, sampling, None, tracker, RunDirectory.create(tmp_path / "run", "", {}))  # type: ignore[arg-type]
    with rollouts_in_background(run, batch, with_advantages(batch.groups, config)):
        pass
    tracker.close()
    rows = read_table(run.directory.rollouts(1)).to_pylist()
    assert [row["reward"] for row in rows] == [None, 1.0, None, -1.0, -1.0, -1.0]
    assert {row["fields"] for row in rows} == {None}
    assert {row["components"] for row in rows} == {None}
    found = [row["advantage"] for row in rows]
    assert (found[0], found[2], found[4], found[5]) == (None, None, None, None)
    assert [found[1], found[3]] == pytest.approx([0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize(
    ("finishes", "trained"), [(("length",) * 3 + ("stop",), 2), (("length",) * 4, 0)]
)
def test_tokens_that_do_not_train_are_not_counted_as_trained_and_the_account_adds_up(
    finishes: tuple[Literal["stop", "length"], ...], trained: int
):
    group = judged(0, 1.0, -1.0, 1.0, -1.0)
    dropped = judged(1, -1.0, -1.0)
    pairs = zip(group.generations, finishes, strict=True)
    group = replace(
        group, generations=tuple(replace(each, finish=finish) for each, finish in pairs)
    )
    without_verdict = judged(2, 1.0, None, -1.0)
    config = load_config(TINY, ["overlong.mode=filter"])
    tokens = dict.fromkeys(COUNTED, 0) | {"trained": 8 + 6, "all_wrong": 4, "aborted": 3}
    groups = dict.fromkeys(COUNTED, 0) | {"trained": 2, "all_wrong": 1, "aborted": 1}
    decided = ((group, "trained"), (dropped, "all_wrong"), (without_verdict, "trained"))
    batch = Batch((group, without_verdict), decided, groups, tokens, shortfall=0)  # type: ignore[arg-type]
    metrics = batch_metrics(batch, with_advantages(batch.groups, config))
    assert (
        metrics["rollout/tokens_trained"] == metrics["rollout/tokens_in_minibatches"] == trained + 4
    )
    assert metrics["rollout/tokens_filtered"] == 8 - trained
    assert metrics["rollout/tokens_invalid"] == 2
    assert (
        metrics["rollout/tokens_generated"]
        == 21
        == sum(metrics[f"rollout/tokens_{name}"] for name in COUNTED)
    )


def test_background_work_is_done_at_the_end_of_its_block_and_raises_there():
    def fail() -> None:
        raise OSError("no room")

    done: list[str] = []
    with in_background(lambda: done.append("work"), name="test"):
        pass
    assert done == ["work"]
    with pytest.raises(OSError, match="no room"), in_background(fail, name="test"):
        done.append("the end of the block")
    assert done[-1] == "the end of the block"
    with pytest.raises(KeyError, match="block"), in_background(fail, name="test"):
        raise KeyError("block")


def test_the_length_preference_is_the_mean_of_advantage_times_relative_length(tmp_path: Path):
    options = ("data.eval=null", "train.num_steps=2", "rollout.max_response_tokens=64")
    with new_run(tiny(*options), tmp_path / "run") as run:
        train(run)
    metrics = [row for row in read_metrics(run.directory.metrics) if row["step"] > 0]
    assert len(metrics) == 2
    for row in metrics:
        lengths = defaultdict(list)
        responses = read_table(run.directory.rollouts(row["step"])).to_pylist()
        trained = [each for each in responses if each["advantage"]]
        for each in trained:
            lengths[each["group_id"]].append(each["response_tokens"])
        products = [
            each["advantage"] * (each["response_tokens"] / fmean(lengths[each["group_id"]]) - 1)
            for each in trained
        ]
        assert row["rollout/length_preference"] == pytest.approx(fmean(products))
        assert fmean(products) != 0
