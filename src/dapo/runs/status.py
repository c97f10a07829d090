"""Reads the status of a run from its directory alone, without disturbing or changing the run."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from dapo.config.load import build_config, read_options
from dapo.config.training_options import TrainConfig
from dapo.core.errors import ConfigError
from dapo.core.files import damage_of, read_json
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork, read_manifest
from dapo.runs.metrics_file import read_metrics
from dapo.runs.stored_config import option_changes
from dapo.runs.time_left import TimeLeft

State = Literal["running", "stopped", "finished", "solved", "failed"]
"""`running`: a process holds the run's lock; `stopped`: a signal or a kill has ended it; `failed`:
an error.
"""
_PARTS = ("checkpoints", "rollouts", "eval", "logs")


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, as the page and `dapo status` show it."""

    state: State
    process: int | None  # id of the training process on its machine; None if the run is not running
    # reason for the end; None while the run is running, or if its process was killed
    exit_reason: str | None
    step: int  # the newest step with metrics
    num_steps: int | None  # step at which training ends; None if the configuration cannot be read
    seconds_left: float | None
    """An estimate from the latest steps; None if the run is not running, or has finished no step.
    """


@dataclass(frozen=True)
class RunStatus(RunProgress):
    """The status of a run."""

    run: str  # the run directory
    seconds_since_step: float | None  # seconds since a running run last wrote metrics
    metrics: dict[str, float | None]  # metrics of the newest step, without evaluations
    evaluations: dict[str, dict[str, float | None]]
    """Newest evaluation of each set: step, accuracy, low, high and other metrics."""
    # the newest checkpoint: step and path; its checksums are not verified
    checkpoint: dict[str, Any] | None
    disk_bytes: dict[str, int]  # disk usage: total, checkpoints, rollouts, eval, logs
    fork: dict[str, Any] | None
    """Parent, step, branch, checksum of the parent's options, and changed options of a fork."""
    # the options that resumes changed, with the last step before each change
    changes: list[dict[str, Any]]
    summary: dict[str, Any] | None  # the content of summary.json, which is written at the end

    def as_json(self) -> dict[str, Any]:
        return {"run": self.run} | asdict(self)


def run_progress(run: RunDirectory, records: Sequence[Mapping[str, Any]]) -> RunProgress:
    """Read the progress of a run from its lock, summary, options and `records` of its metrics.

    Raises DataError or ConfigError if a file is damaged.
    """
    holder = run.holder()
    summary = None if holder else _read_summary(run)
    reason = None if summary is None else str(summary.get("exit_reason"))
    steps = _training_steps(records)
    step = max((record["step"] for record in steps), default=0)
    configured = _configured(run)
    recorded = holder[1] if holder else (summary or {}).get("num_steps")
    num_steps = recorded or (None if configured is None else configured.num_steps)
    return RunProgress(
        state="running" if holder else _ended(reason),
        process=holder[0] if holder else None,
        exit_reason=reason,
        step=step,
        num_steps=num_steps,
        seconds_left=_seconds_left(steps, num_steps, configured) if holder else None,
    )


def run_status(path: str | Path) -> RunStatus:
    """Read the status of the run at `path`.

    Raises CheckpointError if it is not a run directory, and DataError or ConfigError if a file is
    damaged.
    """
    run = RunDirectory.open(path)
    read_manifest(run)
    with damage_of(path):
        return _read_status(run)


def _read_status(run: RunDirectory) -> RunStatus:
    records = read_metrics(run.metrics) if run.metrics.exists() else []
    progress = run_progress(run, records)
    steps = _training_steps(records)
    newest = run.checkpoints.newest_step()
    is_live = progress.state == "running"
    return RunStatus(
        run=str(run.path),
        **asdict(progress),
        seconds_since_step=(
            max(0.0, time.time() - run.metrics.stat().st_mtime) if is_live and steps else None
        ),
        metrics={k: v for k, v in steps[-1].items() if _is_of_training(k)} if steps else {},
        evaluations=_newest_evaluations(records),
        checkpoint=(
            None if newest is None else {"step": newest, "path": str(run.checkpoints.path(newest))}
        ),
        disk_bytes=_disk_bytes(run.path),
        fork=None if (fork := Fork.of(run)) is None else asdict(fork),
        changes=option_changes(run),
        summary=None if is_live else _read_summary(run),
    )


def _training_steps(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Select the records of finished steps, without evaluations before or after all steps."""
    return [
        dict(record)
        for record in records
        if record["step"] > 0 and any(map(_is_of_training, record))
    ]


def _is_of_training(name: str) -> bool:
    return name != "step" and not name.startswith("eval/")


def _ended(reason: str | None) -> State:
    match reason:
        case "finished" | "solved":
            return reason
        case _:
            return "stopped" if reason is None or reason.startswith("interrupted") else "failed"


def _read_summary(run: RunDirectory) -> dict[str, Any] | None:
    with damage_of(run.summary):
        try:
            summary = read_json(run.summary)
        except FileNotFoundError:
            return None
        if not isinstance(summary["exit_reason"], str) or not isinstance(
            summary.get("num_steps"), int | None
        ):
            raise ValueError("its exit_reason must be a text, and its num_steps a number")
        return dict(summary)


def _configured(run: RunDirectory) -> TrainConfig | None:
    options = read_options(run.config)
    try:
        return build_config(options).train
    except ConfigError:  # of another version
        return None


def _seconds_left(
    steps: Sequence[Mapping[str, Any]], num_steps: int | None, configured: TrainConfig | None
) -> float | None:
    if num_steps is None:
        return None
    time_left = TimeLeft(None if configured is None else configured.token_budget)
    for record in steps:
        time_left.add(record)
    seconds = time_left.seconds(num_steps - max((record["step"] for record in steps), default=0))
    return seconds if seconds is not None and isfinite(seconds) else None


def _newest_evaluations(records: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Collect `eval/NAME/METRIC` of the newest record that has it, by NAME."""
    newest: dict[str, dict[str, float | None]] = {}
    for record in records:
        metrics_by_set: dict[str, dict[str, float | None]] = {}
        for name, value in record.items():
            if name.startswith("eval/"):
                metric_path = name.removeprefix("eval/")
                if "/" in metric_path:
                    data_set, _, metric = metric_path.rpartition("/")
                    metrics_by_set.setdefault(data_set, {"step": record["step"]})[metric] = value
        newest |= metrics_by_set
    return newest


def _disk_bytes(path: Path) -> dict[str, int]:
    """Measure the disk usage of a run and of its larger parts; files may disappear meanwhile."""
    sizes: dict[str, int] = dict.fromkeys(("total", *_PARTS), 0)
    for folder, _, names in os.walk(path):
        part = Path(folder).relative_to(path).parts[:1]
        for name in names:
            try:
                size = os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
            for counted in ("total", *part):
                if counted in sizes:
                    sizes[counted] += size
    return sizes
