"""A run trains on the same groups, however fast its engine answers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.core.waiting import Interrupted
from dapo.data.stream import ProblemStream
from dapo.runs.checkpoints import numbered
from dapo.runs.metrics_file import metrics_by_step
from dapo.sampling.batch import Sampling, collect
from dapo.sampling.problem_stats import ProblemStats
from dapo.sampling.queue import Batch
from dapo.sampling.selection import ProblemSelector
from dapo.training.saved_state import read_state
from dapo.training.state import Run
from dapo.types import GenerationRequest, Problem
from helpers.fake_rollout import FakeEncoder, FakeJudge, plan, random_script, sampler
from helpers.scripted_runs import scripted_run

Delay = Callable[[GenerationRequest], int]


def position(request: GenerationRequest) -> int:
    return int(request.id.split("/")[1])


SPEEDS: dict[str, dict[str, Any]] = {
    "each group after the next": {"delay": lambda request: 1 + position(request) % 2},
    "late groups by turns": {"delay": lambda request: 1 + 3 * (position(request) % 7)},
    "the first come last": {"delay": lambda request: 30 - position(request) % 29},
    "a random time for each response": {
        "delay": lambda request: 1 + int(20 * keyed_uniforms(request.seed, 3)[2])
    },
    "two responses at a time": {"slots": 2},
}
"""Against an engine that answers everything in the next poll, with which nothing but the newest
group is in flight.
"""


@dataclass(frozen=True)
class History:
    """A few steps of sampling, whose options are a function of its number."""

    number: int
    predict: bool

    @cached_property
    def choice(self) -> Callable[[str, list[Any]], Any]:
        seed = keyed_seed(5, "history", self.number)
        return lambda name, of: of[int(len(of) * keyed_uniforms(keyed_seed(seed, name), 1)[0])]

    def problems(self) -> list[Problem]:
        """Up to five sources of different difficulty in one mix, where `i % 5` decides how hard
        problem i is.
        """
        sources = self.choice("sources", [1, 2, 5])
        return [
            Problem(str(i), "?", "!", f"s{i % sources}")
            for i in range(self.choice("problems", [7, 40, 150]))
        ]

    def steps(self, **speed: Any) -> list[Any]:
        """What each of six steps trains on and leaves for the next one; one of them fails first,
        and is repeated.
        """
        prompts = self.choice("prompts", [1, 3, 6])
        group_size = self.choice("group_size", [2, 4, 8])
        bound = prompts * self.choice("bound", [2, 3, 10])
        # one step off: a batch is predicted without the step before it
        is_ahead = self.choice("ahead", [False, True])
        engine = ScriptedEngine(random_script, **({"delay": lambda _: 1} | speed))
        stats = ProblemStats()
        found = []
        stream = ProblemStream(self.problems(), seed=self.number)
        of_group = plan(group_size)
        sampling = Sampling(
            stream, engine, FakeJudge(), sampler(prompts, bound), FakeEncoder(), of_group
        )
        waiting: list[tuple[Batch, int]] = []
        for step in range(1, 7):
            selector = self.selector(stats, step, group_size)
            if step == self.choice("fails", [2, 3, 4]):
                collect(sampling, step=step, selector=selector)
                sampling.roll_back(finished_steps=step - 1)
            batch = collect(sampling, step=step, selector=selector)
            waiting.append((batch, step))
            if not is_ahead or step > 1:
                ready, of_step = waiting.pop(0)
                stats.record([group for group, _ in ready.decided], step=of_step)
            found.append(self.trained(batch, sampling, stats))
        return found

    def selector(self, stats: ProblemStats, step: int, group_size: int) -> ProblemSelector | None:
        if not self.predict:
            return None
        return ProblemSelector(stats.history(), step=step, group_size=group_size, seed=self.number)

    def trained(self, batch: Batch, sampling: Sampling, stats: ProblemStats) -> dict[str, Any]:
        after = self.selector(stats, 9, 4)
        return {
            "decided": [
                (group.id, outcome, group.texts, group.rewards) for group, outcome in batch.decided
            ],
            "groups": [group.id for group in batch.groups],
            "shortfall": batch.shortfall,
            "epoch": batch.epoch,
            "prediction": batch.prediction,
            "stream": sampling.stream.position,
            "sampler": sampling.sampler.state_dict(),
            "problems": stats.table().to_pylist(),
            "posteriors": (
                None if after is None else [after.posterior(problem) for problem in self.problems()]
            ),
        }


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("first", range(0, 32, 8))
def test_what_is_trained_and_skipped_depends_on_no_engines_speed(predict: bool, first: int):
    """320 pairs of histories, an option of each of which is one of those that read the stream."""
    for number in range(first, first + 8):
        expected = History(number, predict).steps()
        for name, speed in SPEEDS.items():
            for step, (ours, theirs) in enumerate(
                zip(History(number, predict).steps(**speed), expected, strict=True)
            ):
                differing = [key for key in theirs if ours[key] != theirs[key]]
                assert differing == [], f"history {number}, {name}, step {step + 1}"


def test_a_batch_ends_after_its_last_decided_group_with_skipped_problems_behind_it():
    ends = set()
    for number in range(8):
        for step in History(number, True).steps():
            assert step["stream"] == step["decided"][-1][0] + 1
            ends.add(step["shortfall"] > 0)
    assert ends == {True, False}


# whole runs: the loop, its files, and a resume on another machine

PREDICTED = (
    "dynamic_sampling.predict=true",
    "train.num_steps=6",
    "train.save_every=1",
    "train.keep_checkpoints=9",
    "rollout.group_size=4",
    "train.seed=3",  # of the first four, the one in which a batch closes before skipped problems
    "rollout.prompts_per_step=2",
    "train.minibatch_groups=1",
)
SYNC = ("schedule=sync", "rollout.engines=0", "loss.engine_correction=null")
ALL_GENERATED = ("time/", "rollout/groups_", "rollout/tokens_", "rollout/keep")
"""Metrics of everything generated, the excess included, and of the machine."""


def files(run: Path) -> dict[str, Any]:
    """What a run has trained on, and what it goes on with."""
    tables = {path.name: read_table(path).to_pylist() for path in numbered(run / "rollouts")}
    states = {path.name: read_state(path) for path in numbered(run / "checkpoints")}
    return {
        "metrics": {
            step: {name: value for name, value in row.items() if not name.startswith(ALL_GENERATED)}
            for step, row in metrics_by_step(run / "metrics.jsonl").items()
        },
        "responses": {
            name: [row for row in rows if row["outcome"] != "excess"]
            for name, rows in tables.items()
        },
        "stream": {name: state["stream"] for name, state in states.items()},
        "sampler": {name: state["sampler"] for name, state in states.items()},
        "problems": (run / "problems.parquet").read_bytes(),
    }


def many(run: Run) -> None:
    run.sampling.stream = ProblemStream(
        [Problem(str(i), "?", "!", f"s{i % 5}") for i in range(60)], seed=0
    )


@pytest.mark.parametrize("schedule", [SYNC, ()], ids=["sync", "one_step_off"])
def test_whole_runs_and_a_resume_with_another_engine_have_the_same_files(
    tmp_path: Path, schedule: tuple[str, ...]
):
    options = (*PREDICTED, *schedule)
    scripted_run(
        tmp_path / "fast",
        *options,
        engine=ScriptedEngine(random_script, delay=lambda _: 1),
        change=many,
    )
    expected = files(tmp_path / "fast")
    assert sum(row["rollout/problems_skipped"] for row in expected["metrics"].values()) > 5
    for number, speed in enumerate(SPEEDS.values()):
        run = tmp_path / str(number)

        def stop_after_three(training_run: Run) -> None:
            many(training_run)
            log = training_run.tracker.log

            def logged(step: int, metrics: Any) -> None:
                log(step, metrics)
                training_run.stop.signum = 15 if step == 3 else None

            training_run.tracker.log = logged  # type: ignore[method-assign]

        with pytest.raises(Interrupted):
            scripted_run(
                run,
                *options,
                engine=ScriptedEngine(random_script, **speed),
                change=stop_after_three,
            )
        scripted_run(
            run, *options, engine=ScriptedEngine(random_script, delay=lambda _: 2), change=many
        )
        found = files(run)
        assert [name for name in expected if found[name] != expected[name]] == [], (
            f"{schedule} with engine {number}"
        )
