"""The runner: what is started and in which order, what is left alone, what ends it.

Commands are fakes.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from dapo.analysis.ablate.experiment import Experiment, load_experiment
from dapo.analysis.ablate.runner import RunProgress, run_experiment, threads_per_run
from dapo.core.errors import ConfigError
from dapo.core.waiting import Interrupted
from dapo.runs.directory import RunDirectory
from dapo.training.signals import StopRequest
from helpers.ablations import FakeCommand, path_of, write_run

FILE = "{base: tiny, seeds: [0, 1], variants: {a: [], b: [loss.clip_high=0.3]}}"


class Shown:
    """A display that remembers."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.most = 0

    def update(self, progress: RunProgress) -> None:
        self.most = max(self.most, len(progress.running))

    def message(self, text: str) -> None:
        self.messages.append(text)


class Commands:
    """Starts fakes, and remembers them."""

    def __init__(self, failing: Sequence[str] = (), polls: int = 0) -> None:
        self.started: list[FakeCommand] = []
        self._failing = failing
        self._polls = polls

    def __call__(self, arguments: Sequence[str], log: Path) -> FakeCommand:
        def finish(arguments: Sequence[str]) -> int:
            name = path_of(arguments).name
            return write_run(
                arguments, reason="NumericsError: it broke" if name in self._failing else "finished"
            )

        self.started.append(FakeCommand(arguments, polls=self._polls, finish=finish))
        return self.started[-1]

    @property
    def names(self) -> list[str]:
        return [f"{each.arguments[0]} {path_of(each.arguments).name}" for each in self.started]


def experiment_in(folder: Path, text: str = FILE, overrides: Sequence[str] = ()) -> Experiment:
    path = folder / "e.yaml"
    path.write_text(text)
    return load_experiment(path, overrides)


def run(
    experiment: Experiment,
    folder: Path,
    commands: Commands,
    *,
    jobs: int = 1,
    stop: StopRequest | None = None,
):
    shown = Shown()
    stop = stop or StopRequest()
    failures = run_experiment(
        experiment, folder, jobs=jobs, stop=stop, display=shown, start=commands
    )
    return failures, shown


def test_runs_are_made_seed_by_seed_and_finished_ones_are_not_repeated(tmp_path: Path):
    experiment = experiment_in(tmp_path)
    commands = Commands()
    failures, shown = run(experiment, tmp_path / "x", commands)
    assert failures == {}
    assert commands.names == ["train a-seed0", "train b-seed0", "train a-seed1", "train b-seed1"]
    assert shown.messages[0].startswith("a, seed 0: accuracy 50.0% after 4 steps and 1,000 tokens")
    more = experiment_in(tmp_path, FILE.replace("[0, 1]", "[0, 1, 2]"))
    again = Commands()
    run(more, tmp_path / "x", again)
    assert again.names == ["train a-seed2", "train b-seed2"]


def test_a_failed_run_stops_no_other_and_is_resumed_by_the_next_call(tmp_path: Path):
    experiment = experiment_in(tmp_path)
    failures, shown = run(experiment, tmp_path / "x", Commands(failing=["b-seed0"]))
    assert failures == {"b-seed0": "NumericsError: it broke"}
    assert "b, seed 0: failed, NumericsError: it broke; its log: " in shown.messages[1]
    assert len(shown.messages) == 4
    again = Commands()
    assert run(experiment, tmp_path / "x", again)[0] == {}
    assert again.names == ["resume b-seed0"]


def test_several_runs_at_a_time_share_the_threads(tmp_path: Path):
    commands = Commands(polls=2)
    _, shown = run(
        experiment_in(tmp_path, overrides=["train.threads=8"]), tmp_path / "x", commands, jobs=3
    )
    assert shown.most == 3
    assert all("train.threads=2" in each.arguments for each in commands.started)
    assert (threads_per_run(None, 1), threads_per_run(8, 1), threads_per_run(2, 4)) == (None, 8, 1)


def test_a_signal_stops_every_run_with_its_state_saved(tmp_path: Path):
    stop = StopRequest()
    commands = Commands(polls=10**6)
    shown = Shown()
    shown.update = lambda progress: setattr(stop, "signum", signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        run_experiment(
            experiment_in(tmp_path),
            tmp_path / "x",
            jobs=2,
            stop=stop,
            display=shown,
            start=commands,
        )
    assert [each.signals for each in commands.started] == [[signal.SIGTERM], [signal.SIGTERM]]


def test_an_option_that_changed_since_a_run_was_started_is_refused_by_name(tmp_path: Path):
    run(experiment_in(tmp_path), tmp_path / "x", Commands())
    changed = experiment_in(tmp_path, FILE.replace("0.3", "0.4"))
    commands = Commands()
    with pytest.raises(
        ConfigError, match=r"b-seed0 was started with loss.clip_high=0.3, and b, seed 0 now has 0.4"
    ):
        run(changed, tmp_path / "x", commands)
    assert commands.started == []
    run(
        experiment_in(tmp_path, overrides=["train.threads=1", "log.rollouts=none"]),
        tmp_path / "x",
        commands,
    )
    assert commands.started == []


def test_a_run_that_another_process_has_is_waited_for(tmp_path: Path):
    experiment = experiment_in(tmp_path, FILE.replace("[0, 1]", "[0]"))
    folder = tmp_path / "x"
    other = [
        "train",
        str(experiment.base),
        "train.seed=0",
        "--run-dir",
        str(folder / "runs" / "a-seed0"),
    ]
    write_run(other)
    directory = RunDirectory(folder / "runs" / "a-seed0")
    directory.summary.unlink()
    commands = Commands(polls=3)
    lock = directory.lock()
    lock.__enter__()

    class Ends(Shown):
        def update(self, progress: RunProgress) -> None:
            if any("in another process" in where for where in progress.running.values()):
                lock.__exit__(None, None, None)

    run_experiment(experiment, folder, jobs=1, stop=StopRequest(), display=Ends(), start=commands)
    assert commands.names == ["resume a-seed0", "train b-seed0"]
    assert os.path.exists(directory.summary)
