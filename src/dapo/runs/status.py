"""Reads the status of a run from its directory alone, without disturbing or changing the run."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
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
"""`running`: a process holds the run's lock; `stopped`: a signal, a kill or a callback has ended it;
`failed`: an error.
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

    @property
    def stop_reason(self) -> str | None:
        """The signal that has ended a stopped run, or what its callback said; None: no reason."""
        if self.state != "stopped" or self.exit_reason is None:
            return None
        return self.exit_reason.partition(": ")[2]


@dataclass(frozen=True)
class RunStatus(RunProgress):
    """The status of a run."""

    run: str  # the run directory
    model: str | None  # name of the model; None if config.yaml does not name one
    started: str | None  # the time of its start, ISO 8601 in UTC
    updated: str | None  # the time at which its newest metrics were written, or of its start
    seconds_since_step: float | None  # seconds since a running run last wrote metrics
    # metrics of the newest step, without evaluations
    metrics: dict[str, float | None] = field(repr=False)
    evaluations: dict[str, dict[str, float | None]] = field(repr=False)
    """Newest evaluation of each set: step, accuracy, low, high and other metrics."""
    # the newest checkpoint: step and path; its checksums are not verified
    checkpoint: dict[str, Any] | None
    disk_bytes: dict[str, int]  # disk usage: total, checkpoints, rollouts, eval, logs
    fork: dict[str, Any] | None
    """Parent, step, branch, checksum of the parent's options, and changed options of a fork."""
    # the options that resumes changed, with the last step before each change
    changes: list[dict[str, Any]]
    # the content of summary.json, which is written at the end
    summary: dict[str, Any] | None = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        return {"run": self.run} | asdict(self)


def run_progress(run: RunDirectory, records: Sequence[Mapping[str, Any]]) -> RunProgress:
    """Read the progress of a run from its lock, summary, options and `records` of its metrics.

    Raises:
        DataError: a file is damaged.
        ConfigError: config.yaml is damaged.
    """
    steps = _training_steps(records)
    step = max((record["step"] for record in steps), default=0)
    configured = _configured(run)
    configured_steps = None
    if configured is not None:
        configured_steps = configured.num_steps
    holder = run.holder()
    if holder is not None:
        process, num_steps = holder
        num_steps = num_steps or configured_steps
        seconds_left = _seconds_left(steps, num_steps, configured)
        return RunProgress("running", process, None, step, num_steps, seconds_left)
    # the summary of an earlier end stays until the run ends again
    summary = _read_summary(run)
    if summary is None:
        return RunProgress("stopped", None, None, step, configured_steps, None)
    reason = str(summary.get("exit_reason"))
    num_steps = summary.get("num_steps") or configured_steps
    return RunProgress(end_state(reason), None, reason, step, num_steps, None)


def run_status(path: str | Path) -> RunStatus:
    """Read the status of the run at `path`.

    Raises:
        CheckpointError: it is not a run directory.
        DataError: a file is damaged.
        ConfigError: config.yaml is damaged.
    """
    run = RunDirectory.open(path)
    manifest = read_manifest(run)
    started = manifest.get("started")
    with damage_of(path):
        return _read_status(run, started if isinstance(started, str) else None)


def _read_status(run: RunDirectory, started: str | None) -> RunStatus:
    """Read all files of a run that tell of its status."""
    records = []
    updated = started
    if run.metrics.exists():
        records = read_metrics(run.metrics)
        written_at = datetime.fromtimestamp(run.metrics.stat().st_mtime, tz=UTC)
        updated = written_at.isoformat(timespec="seconds")
    progress = run_progress(run, records)
    steps = _training_steps(records)
    is_live = progress.state == "running"
    metrics = {}
    seconds_since_step = None
    if steps:
        metrics = {name: value for name, value in steps[-1].items() if _is_of_training(name)}
    if steps and is_live:
        # a clock that was set back must not give negative seconds
        seconds_since_step = max(0.0, time.time() - run.metrics.stat().st_mtime)
    newest = run.checkpoints.newest_step()
    checkpoint = None
    if newest is not None:
        checkpoint = {"step": newest, "path": str(run.checkpoints.path(newest))}
    fork = Fork.of(run)
    return RunStatus(
        run=str(run.path),
        model=_model_name(run),
        started=started,
        updated=updated,
        **asdict(progress),
        seconds_since_step=seconds_since_step,
        metrics=metrics,
        evaluations=_newest_evaluations(records),
        checkpoint=checkpoint,
        disk_bytes=_disk_bytes(run.path),
        fork=None if fork is None else asdict(fork),
        changes=option_changes(run),
        summary=None if is_live else _read_summary(run),
    )


def _training_steps(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Select the records of finished steps, without evaluations before or after all steps."""
    after_start = [record for record in records if record["step"] > 0]
    return [dict(record) for record in after_start if any(map(_is_of_training, record))]


def _is_of_training(name: str) -> bool:
    return name != "step" and not name.startswith("eval/")


def end_state(reason: str) -> State:
    """Return the state of a run that has ended for this reason."""
    match reason:
        case "finished" | "solved":
            return reason
        case _:
            return "stopped" if reason.startswith(("interrupted:", "stopped:")) else "failed"


def _read_summary(run: RunDirectory) -> dict[str, Any] | None:
    """Read summary.json; None if the run has not ended, or was killed."""
    with damage_of(run.summary):
        try:
            summary = read_json(run.summary)
        except FileNotFoundError:
            return None
        has_reason = isinstance(summary["exit_reason"], str)
        if not has_reason or not isinstance(summary.get("num_steps"), int | None):
            raise ValueError("its exit_reason must be a text, and its num_steps a number")
        return dict(summary)


def _configured(run: RunDirectory) -> TrainConfig | None:
    options = read_options(run.config)
    try:
        return build_config(options).train
    except ConfigError:  # of another version
        return None


def _model_name(run: RunDirectory) -> str | None:
    model = read_options(run.config).get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    return None if name is None else str(name)


def _seconds_left(
    steps: Sequence[Mapping[str, Any]], num_steps: int | None, configured: TrainConfig | None
) -> float | None:
    """Estimate the seconds that a running run takes to its end; None if nothing tells."""
    if num_steps is None:
        return None
    token_budget = None
    if configured is not None:
        token_budget = configured.token_budget
    time_left = TimeLeft(token_budget)
    for record in steps:
        time_left.add(record)
    newest = max((record["step"] for record in steps), default=0)
    seconds = time_left.seconds(num_steps - newest)
    if seconds is None or not isfinite(seconds):
        return None
    return seconds


def _newest_evaluations(records: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Collect `eval/NAME/METRIC` of the newest record that has it, by NAME."""
    newest: dict[str, dict[str, float | None]] = {}
    for record in records:
        metrics_by_set: dict[str, dict[str, float | None]] = {}
        for name, value in record.items():
            prefix, _, metric_path = name.partition("/")
            # the name of a data set may itself contain a slash
            data_set, slash, metric = metric_path.rpartition("/")
            if prefix == "eval" and slash:
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
