"""Laws of `rollout.clock: arrival`: what arrives counts at once; a run that follows the record is
equal to the byte.
"""

import json
import random
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pyarrow.parquet import read_table

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.clock import Clock
from dapo.core.errors import CheckpointError
from dapo.core.rng import keyed_uniforms
from dapo.runs.directory import RunDirectory
from dapo.training.checkpointing import is_logged
from dapo.training.state import Run
from dapo.types import Generation, GenerationRequest, Problem, Verdict
from helpers.fake_rollout import END, FILL, RIGHT, WRONG, FakeJudge, SlowJudge
from helpers.scripted_runs import CountingPolicy, scripted_run
from helpers.tiny_runs import contents, differences, metrics

ARRIVAL = (
    "schedule=async",
    "rollout.clock=arrival",
    "rollout.max_response_tokens=64",
    "rollout.prompts_per_step=8",
    "train.num_steps=6",
    "train.save_every=1",
    "train.keep_checkpoints=9",
)
BOUNDS = [1, 3]


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


def run_with_delays(
    path: Path, *options: str, seed: int, engine: ScriptedEngine | None = None
) -> Run:
    """A run, to its end or on from where it stands, whose engine, verifiers and trainer take random
    times.
    """
    chance = random.Random(seed)

    def update(number: int) -> None:
        time.sleep(0.02 * chance.random())

    def change(run: Run) -> None:
        run.sampling.judge = SlowJudge(chance, longest_s=0.01)
        if isinstance(engine, WaitingEngine):
            engine.run = run

    policy = CountingPolicy(on_update=update)
    return scripted_run(
        path, *ARRIVAL, *options, engine=engine or SlowEngine(chance), policy=policy, change=change
    )


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "clock.jsonl").read_text().splitlines()]


def back_to(whole: Path, run: Path, step: int) -> Path:
    """A copy of a run with its whole record, as if it had been killed when `step` was saved; 0:
    before any was.
    """
    if step == 0:
        run.mkdir()
        shutil.copy(whole / "clock.jsonl", run)
        return run
    shutil.copytree(whole, run)
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    directory = RunDirectory(run)
    directory.truncate_after(step, is_logged=is_logged(directory.checkpoints.find(step)))
    return run


@pytest.mark.parametrize("eta", BOUNDS)
def test_events_count_when_they_arrive_and_new_weights_in_the_middle_of_a_batch(
    tmp_path: Path, eta: int
):
    engine = WaitingEngine(random.Random(1))
    run_with_delays(tmp_path / "run", f"max_staleness={eta}", seed=1, engine=engine)
    rows = [row for row in metrics(tmp_path / "run") if row["step"]]
    found = events(tmp_path / "run")
    assert {each["event"] for each in found} == {"verdict", "weights", "close"}
    assert [(each["step"], each["id"]) for each in found if each["event"] == "weights"] == [
        (step, str(step - 1)) for step in range(2, 7)
    ]
    assert [each["step"] for each in found if each["event"] == "close"] == [1, 2, 3, 4, 5, 6]
    assert len({each["id"] for each in found if each["event"] == "verdict"}) > 20
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


@pytest.mark.parametrize("eta", [0, *BOUNDS])
def test_a_run_that_follows_the_record_is_equal_to_the_byte_from_any_step(tmp_path: Path, eta: int):
    whole = tmp_path / "whole"
    run_with_delays(whole, f"max_staleness={eta}", seed=2)
    for step in (0, 1, 2, 5):
        run = back_to(whole, tmp_path / f"run{step}", step)
        run_with_delays(run, f"max_staleness={eta}", seed=100 + step)
        assert differences(contents(run), contents(whole)) == []
        assert (run / "clock.jsonl").read_bytes() == (whole / "clock.jsonl").read_bytes()


def test_two_runs_without_a_record_in_common_differ(tmp_path: Path):
    """Otherwise the equality above would show nothing."""
    for seed in (3, 4):
        run_with_delays(tmp_path / f"run{seed}", "max_staleness=3", seed=seed)
    assert differences(contents(tmp_path / "run3"), contents(tmp_path / "run4"))


@pytest.mark.parametrize("lines", [2, 9, 24])
def test_the_record_of_a_run_that_was_killed_is_followed_as_far_as_it_goes(
    tmp_path: Path, lines: int
):
    """The first run is killed after so many lines of its third step; what the second adds, a third
    run follows.
    """
    whole = tmp_path / "whole"
    run_with_delays(whole, "max_staleness=3", seed=5)
    killed = back_to(whole, tmp_path / "killed", 1)
    record = (killed / "clock.jsonl").read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(record) if json.loads(line)["step"] == 3)
    known = record[: first + lines]
    (killed / "clock.jsonl").write_text("".join(known) + record[first + lines][:9])
    run_with_delays(killed, "max_staleness=3", seed=6)
    assert (killed / "clock.jsonl").read_text().startswith("".join(known))
    followed = back_to(killed, tmp_path / "followed", 0)
    run_with_delays(followed, "max_staleness=3", seed=7)
    assert differences(contents(followed), contents(killed)) == []


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


@pytest.mark.parametrize(("clock", "polls"), [("history", 1), ("arrival", 20), ("load", 20)])
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

    options = (*ARRIVAL, "schedule=sync", "train.num_steps=1", f"rollout.clock={clock}")
    scripted_run(tmp_path / "run", *options, engine=CountedEngine(script, slots=6), change=change)
    assert judges[0].polls == polls
    assert (tmp_path / "run" / "clock.jsonl").exists() == (clock == "arrival")


@pytest.mark.parametrize(
    ("clock", "eta", "samples_on"),
    [("history", 3, False), ("arrival", 3, True), ("arrival", 1, False)],
)
def test_the_engine_samples_for_later_batches_until_the_update_has_ended(
    tmp_path: Path, clock: str, eta: int, samples_on: bool
):
    """The last update of step 2 lasts until the engine was polled 15 times behind the end of its
    batch.
    """
    runs: list[Run] = []
    later = [0]
    enough = threading.Event()

    def update(number: int) -> None:
        if number == 4:
            enough.wait(2)

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

    options = (*ARRIVAL, f"rollout.clock={clock}", f"max_staleness={eta}")
    run = scripted_run(
        tmp_path / "run",
        *options,
        engine=LaterPolls(script, slots=24),
        policy=CountingPolicy(on_update=update),
        change=change,
    )
    assert enough.is_set() == samples_on
    assert not run.sampling.kept.groups


# --- the clock alone ------------------------------------------------------------------------------------------------


def test_a_recorded_event_waits_for_its_poll_and_others_for_the_end_of_the_record(tmp_path: Path):
    path = tmp_path / "clock.jsonl"
    first = Clock("arrival", path)
    first.begin(1)
    first.poll = 5
    assert first.takes("verdict", 7, has_arrived=lambda: True)
    assert not first.takes("verdict", 8, has_arrived=lambda: False)
    first.close()
    second = Clock("arrival", path)
    second.begin(1)
    for second.poll in range(9):
        assert second.takes("verdict", 7, has_arrived=lambda: False) is (second.poll >= 5)
        if second.poll < 8:
            assert second.takes("verdict", 8, has_arrived=lambda: True) is (second.poll > 5)
    second.close()
    assert [json.loads(line)["poll"] for line in path.read_text().splitlines()] == [5, 6]


def test_a_line_that_no_run_writes_is_an_error_that_names_it(tmp_path: Path):
    path = tmp_path / "clock.jsonl"
    path.write_text('{"step": 1, "poll": 2, "event": "close"}\n{"step": 1}\n')
    with pytest.raises(CheckpointError, match=r"clock.jsonl, line 2: expected .*remove the line"):
        Clock("arrival", path)
