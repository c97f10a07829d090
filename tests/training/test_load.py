"""Laws of `rollout.clock: load`: what arrives counts at once, also new weights in the middle of a
batch.
"""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.rng import keyed_uniforms
from dapo.training.state import Run
from dapo.types import Generation, GenerationRequest, Problem, Verdict
from helpers.fake_rollout import END, FILL, RIGHT, WRONG, FakeJudge, SlowJudge
from helpers.scripted_runs import CountingPolicy, scripted_run
from helpers.tiny_runs import metrics

UPDATES_PER_STEP = 4
LOAD = (
    "schedule=async",
    "rollout.clock=load",
    "rollout.max_response_tokens=64",
    "rollout.prompts_per_step=8",
    "train.num_steps=6",
    "train.save_every=1",
    "train.keep_checkpoints=9",
)


def script(request: GenerationRequest) -> tuple[list[int], str]:
    mark, length = keyed_uniforms(request.seed, 2)
    return [RIGHT if mark < 0.5 else WRONG] + [FILL] * int(length**3 * 60) + [END], "stop"


class SlowEngine(ScriptedEngine):
    """Takes a random time for some polls."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(script, slots=24, logprob=-0.25)
        self.chance = chance

    def poll(self) -> list[Generation]:
        time.sleep(self.chance.choice([0, 0, 0.002]))
        return super().poll()


class WaitingEngine(SlowEngine):
    """Waits at its fourth poll of a batch until the trainer has made newer weights."""

    run: Run | None = None
    batch: tuple[int, int] = (0, 0)
    """The version of the weights to come, and the polls since they were announced."""

    def poll(self) -> list[Generation]:
        new = None if self.run is None else self.run.sampling.new_weights
        if new is not None:
            self.batch = new.version, self.batch[1] + 1 if new.version == self.batch[0] else 1
            assert self.batch[1] != 4 or new.exist.wait(20)
        return super().poll()


@pytest.mark.parametrize("eta", [1, 3])
def test_new_weights_are_taken_in_the_middle_of_a_batch(tmp_path: Path, eta: int):
    """Engine, verifiers and trainer take random times."""
    chance = random.Random(1)
    engine = WaitingEngine(chance)

    def update(number: int) -> None:
        time.sleep(0.02 * chance.random())

    def change(run: Run) -> None:
        run.sampling.judge = SlowJudge(chance, longest_s=0.01)
        engine.run = run

    scripted_run(
        tmp_path / "run",
        *LOAD,
        f"max_staleness={eta}",
        engine=engine,
        policy=CountingPolicy(on_update=update),
        change=change,
    )
    rows = [row for row in metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["rollout/staleness_max"] for row in rows) <= eta
    assert sum(row["rollout/recomputed_tokens"] for row in rows) > 0
    parts = [
        row["versions"]
        for path in sorted((tmp_path / "run" / "rollouts").iterdir())
        for row in read_table(path).to_pylist()
        if row.get("versions")
    ]
    assert parts
    assert min(row["rollout/staleness_mean"] for row in rows[1:]) < 1


class HeldFirst(FakeJudge):
    """Gives the verdicts of the first group of the stream after 20 more polls of the engine, or
    else after a second.
    """

    def __init__(self, first: Problem) -> None:
        super().__init__()
        self.first = first
        self.polls = 0
        self.is_held = False
        self.released = threading.Event()

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        found = super().submit(problem, responses, token_ids)
        if problem != self.first or self.is_held:
            return found
        late: Future[tuple[Verdict, ...]] = Future()
        self.is_held = True

        def answer() -> None:
            self.released.wait(1)
            self.released.set()
            late.set_result(found.result())

        threading.Thread(target=answer).start()
        return late

    def count(self) -> None:
        self.polls += self.is_held and not self.released.is_set()
        if self.polls == 20:
            self.released.set()


@pytest.mark.parametrize(("clock", "polls"), [("history", 1), ("load", 20)])
def test_only_with_history_a_slow_verifier_holds_up_the_engine(
    tmp_path: Path, clock: str, polls: int
):
    judges: list[HeldFirst] = []

    class CountedEngine(ScriptedEngine):
        def poll(self) -> list[Generation]:
            judges[0].count()
            return super().poll()

    def change(run: Run) -> None:
        _, first = run.sampling.stream.take()
        run.sampling.stream.rewind(0)
        run.sampling.judge = HeldFirst(first)
        judges.append(run.sampling.judge)

    options = (*LOAD, "schedule=sync", "train.num_steps=1", f"rollout.clock={clock}")
    scripted_run(tmp_path / "run", *options, engine=CountedEngine(script, slots=6), change=change)
    assert judges[0].polls == polls


@pytest.mark.parametrize(
    ("clock", "eta", "samples_on"), [("history", 3, False), ("load", 3, True), ("load", 1, False)]
)
def test_the_engine_samples_for_later_batches_until_the_update_has_ended(
    tmp_path: Path, clock: str, eta: int, samples_on: bool
):
    """The last update of step 2 lasts until the engine was polled 60 times for batch 3 and behind
    it: batch 3 alone takes fewer.
    """
    runs: list[Run] = []
    later = [0]
    enough = threading.Event()

    def update(number: int) -> None:
        if number == 2 * UPDATES_PER_STEP:
            enough.wait(60 if samples_on else 2)  # a busy machine may take long to poll

    class LaterPolls(ScriptedEngine):
        def poll(self) -> list[Generation]:
            found = super().poll()
            new = runs[0].sampling.new_weights if runs else None
            if (
                new is not None
                and new.version == 2
                and len(self.submitted) >= 2 * 8 * 4
                and not new.exist.is_set()
            ):
                later[0] += 1
                if later[0] == 60:
                    enough.set()
            return found

    def change(run: Run) -> None:
        runs.append(run)

    options = (*LOAD, f"rollout.clock={clock}", f"max_staleness={eta}")
    run = scripted_run(
        tmp_path / "run",
        *options,
        engine=LaterPolls(script, slots=24),
        policy=CountingPolicy(on_update=update),
        change=change,
    )
    assert enough.is_set() == samples_on
    assert run.policy.updates == 6 * UPDATES_PER_STEP
    assert not run.sampling.kept.groups
