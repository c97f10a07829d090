"""Runs an experiment: one `dapo train` or `dapo resume` per run, several at a time.

    FOLDER/runs/NAME/           a run directory like any other
    FOLDER/logs/NAME.log        the output of the command
    FOLDER/options/NAME.json    the options that the run was started with

However this process ends, another call continues: it skips finished runs and resumes the others. A
failed run does not stop the runs after it.
"""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM
from statistics import fmean
from typing import Any, Protocol, TypeAlias

from dapo.analysis.ablate.experiment import Experiment, PlannedRun
from dapo.config.load import without_repeats
from dapo.config.option_entries import flat_options
from dapo.config.option_fields import options_of
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.files import atomic_write_json, read_json
from dapo.core.text import with_interval
from dapo.core.waiting import Interrupted
from dapo.runs.directory import ENDED, RunDirectory
from dapo.runs.status import run_status
from dapo.training.signals import StopRequest

FREE_OPTIONS = ("train.threads", "train.save_every", "train.keep_checkpoints", "log.", "profile.")
"""Options, and prefixes of options, in which a run may differ from the current experiment."""
_POLL_S = 0.3
_FIGURES_S = 3.0


Process: TypeAlias = "subprocess.Popen[bytes]"


class Display(Protocol):
    """Shows the progress of an experiment."""

    def update(self, progress: "RunProgress") -> None:
        """Show the progress; called several times per second."""

    def message(self, text: str) -> None:
        """Print a line that stays."""


@dataclass
class RunProgress:
    """The progress of an experiment."""

    total: int
    finished: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # the reasons of failed runs, by name
    # the position of each active run, by its description
    running: dict[str, str] = field(default_factory=dict)
    seconds_left: float | None = None


@dataclass
class _Running:
    run: PlannedRun
    # the command; None: another process holds the run, and this one waits for it
    process: "Process | None"
    started: float


def start_process(arguments: Sequence[str], log: Path) -> Process:
    """Start `dapo ARGUMENTS` with its output in a log and out of reach of the terminal's Ctrl-C."""
    with log.open("ab") as output:
        command = [sys.executable, "-m", "dapo", *arguments]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def require_same_options(experiment: Experiment, folder: Path) -> None:
    """Compare the options of existing runs with the experiment.

    Raises ConfigError naming an option that differs.
    """
    for run in experiment.runs():
        at_start = _stored_options(folder, run)
        if at_start is None:
            continue
        now = flat_options(run.config)
        defaults = {name: info.default for name, info in options_of()}
        for name in sorted(at_start.keys() | now.keys()):
            old, new = (table.get(name, defaults.get(name)) for table in (at_start, now))
            if old != new and not name.startswith(FREE_OPTIONS):
                raise ConfigError(
                    f"{folder / 'runs' / run.name} was started with {name}={old}, and"
                    f" {run.describe()} now has {new}; restore the option, give another --folder,"
                    " or remove this run to start it again"
                )


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    jobs: int,
    stop: StopRequest,
    display: Display,
    on_finished: Callable[[Mapping[str, str]], None] = lambda failures: None,
    start: Callable[[Sequence[str], Path], Process] = start_process,
) -> dict[str, str]:
    """Run the missing runs of a valid experiment, `jobs` at a time, by seed.

    Args:
        experiment: the experiment, valid.
        folder: the folder of runs, logs and options.
        jobs: how many runs train at a time.
        stop: reports a signal, after which the runs save their states and stop.
        display: shows the progress.
        on_finished: gets the failures so far when a run has ended.
        start: starts a command, with its log.

    Returns the reasons of failed runs, by name. Raises ConfigError if an option of an existing run
    has changed, before any run starts, and Interrupted after a signal.
    """
    require_same_options(experiment, folder)
    for name in ("runs", "logs", "options"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    runner = _Runner(experiment.runs(), folder, jobs, display, on_finished, start)
    try:
        runner.run(stop)
    except (Interrupted, KeyboardInterrupt):
        runner.stop_all()
        raise
    return runner.progress.failed


def is_finished(folder: Path, run: PlannedRun) -> bool:
    """Return True if a run has ended successfully."""
    return RunDirectory(folder / "runs" / run.name).exit_reason() in ENDED


def threads_per_run(configured: int | None, jobs: int) -> int | None:
    """Return `train.threads` for each of `jobs` runs; None: torch's default."""
    if jobs == 1:
        return configured
    available = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    return max(1, (configured or available) // jobs)


@dataclass
class _Runner:
    """The state of `run_experiment`."""

    runs: Sequence[PlannedRun]
    folder: Path
    jobs: int
    display: Display
    on_finished: Callable[[Mapping[str, str]], None]
    start: Callable[[Sequence[str], Path], Process]
    running: list[_Running] = field(default_factory=list)
    # of the finished runs, by variant
    seconds: dict[str, list[float]] = field(default_factory=dict)
    next_figures: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = deque(run for run in self.runs if not is_finished(self.folder, run))
        for run in self.runs:
            if run not in self.waiting:
                self._note_seconds(run)
        self.progress = RunProgress(len(self.runs), finished=len(self.runs) - len(self.waiting))

    def run(self, stop: StopRequest) -> None:
        while self.waiting or self.running:
            stop.check()
            while self.waiting and len(self.running) < self.jobs:
                self._begin(self.waiting.popleft())
            ended = [job for job in self.running if self._has_ended(job)]
            for job in ended:
                self.running.remove(job)
                self._report(job)
                self.next_figures = 0.0  # the running ones have changed
            self._refresh()
            if self.running:
                time.sleep(_POLL_S)

    def stop_all(self) -> None:
        """Let every run save and end, and wait for it; a further Ctrl-C ends them at once."""
        processes = [job.process for job in self.running if job.process is not None]
        try:
            for process in processes:
                process.send_signal(SIGTERM)
            for process in processes:
                process.wait()
        except KeyboardInterrupt:
            for process in processes:
                process.send_signal(SIGINT)

    def _begin(self, run: PlannedRun) -> None:
        path = self.folder / "runs" / run.name
        started = time.monotonic()
        if _is_held(path):
            self.running.append(_Running(run, None, started))
            return
        if _stored_options(self.folder, run) is None:
            atomic_write_json(
                self.folder / "options" / f"{run.name}.json", flat_options(run.config)
            )
        if RunDirectory.is_run(path):
            arguments = ["resume", str(path)]
        else:
            threads = threads_per_run(run.config.train.threads, self.jobs)
            threads_option = [] if threads is None else [f"train.threads={threads}"]
            arguments = [
                "train",
                str(run.base),
                *without_repeats([*run.overrides, *threads_option]),
                "--run-dir",
                str(path),
            ]
        process = self.start(arguments, self.folder / "logs" / f"{run.name}.log")
        self.running.append(_Running(run, process, started))

    def _has_ended(self, job: _Running) -> bool:
        if job.process is not None:
            return job.process.poll() is not None
        return not _is_held(self.folder / "runs" / job.run.name)

    def _report(self, job: _Running) -> None:
        run = job.run
        took = time.monotonic() - job.started
        if is_finished(self.folder, run):
            self.progress.finished += 1
            self._note_seconds(run, took)
            summary = read_json(RunDirectory(self.folder / "runs" / run.name).summary)
            last = summary.get("eval_last") or {}
            result = "no evaluation"
            if last and last.get("binary", True):
                result = f"accuracy {with_interval(last['accuracy'], None)}"
            elif last:
                result = f"mean score {with_interval(last['accuracy'], None, '.3f')}"
            work = f"{summary['steps']} steps and {summary['tokens_generated']:,} tokens"
            self.display.message(f"{run.describe()}: {result} after {work}, {took:,.0f} s")
        elif job.process is None:  # another process held it, and did not finish it
            self.waiting.appendleft(run)
            return
        else:
            self.progress.failed[run.name] = reason = self._why(job)
            log = self.folder / "logs" / f"{run.name}.log"
            self.display.message(f"{run.describe()}: failed, {reason}; its log: {log}")
        self.on_finished(self.progress.failed)

    def _why(self, job: _Running) -> str:
        code = job.process.poll() if job.process is not None else None
        if code is not None and code < 0:
            return f"ended by signal {-code}"
        reason = RunDirectory(self.folder / "runs" / job.run.name).exit_reason()
        if reason is not None and reason not in ENDED:
            return reason
        return _last_line(self.folder / "logs" / f"{job.run.name}.log") or f"exit code {code}"

    def _note_seconds(self, run: PlannedRun, took: float = 0.0) -> None:
        """Record the larger of a run's own seconds, without start-up, and `took`."""
        summary: Any = read_json(RunDirectory(self.folder / "runs" / run.name).summary)
        self.seconds.setdefault(run.variant, []).append(
            max(took, float(summary.get("wall_s") or 0.0))
        )

    def _refresh(self) -> None:
        """Show the progress; the files of the runs are read every few seconds only."""
        if (now := time.monotonic()) >= self.next_figures:
            self.next_figures = now + _FIGURES_S
            remaining = []
            self.progress.running = {}
            for job in self.running:
                text, seconds = self._state(job, now)
                self.progress.running[job.run.describe()] = text
                remaining.append(seconds)
            ahead = [self._expected(run) for run in self.waiting]
            estimates = [seconds for seconds in (*remaining, *ahead) if seconds is not None]
            complete = len(estimates) == len(remaining) + len(ahead)
            parallel = min(self.jobs, len(remaining) + len(ahead)) or 1
            self.progress.seconds_left = (
                max(sum(estimates) / parallel, *estimates, 0.0) if estimates and complete else None
            )
        self.display.update(self.progress)

    def _state(self, job: _Running, now: float) -> tuple[str, float | None]:
        """Return the position of a run, and an estimate of its remaining seconds."""
        expected = self._expected(job.run)
        remaining = None if expected is None else max(0.0, expected - (now - job.started))
        try:
            status = run_status(self.folder / "runs" / job.run.name)
        except CheckpointError:  # it has not started
            return "starting", remaining
        where = f"step {status.step} of {status.num_steps}"
        return (
            where if job.process is not None else f"{where}, in another process",
            status.seconds_left if remaining is None else remaining,
        )

    def _expected(self, run: PlannedRun) -> float | None:
        """Return the mean seconds of finished runs of the row, else of all rows, else None."""
        every = [seconds for row in self.seconds.values() for seconds in row]
        durations = self.seconds.get(run.variant) or every
        return fmean(durations) if durations else None


def _is_held(path: Path) -> bool:
    return RunDirectory(path).holder() is not None


def _stored_options(folder: Path, run: PlannedRun) -> dict[str, Any] | None:
    """Return the options that a run was started with; None for a run that does not exist."""
    if not RunDirectory.is_run(folder / "runs" / run.name):
        return None
    try:
        options = read_json(folder / "options" / f"{run.name}.json")
    except (OSError, ValueError):
        return None
    return options if isinstance(options, dict) else None


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "")
