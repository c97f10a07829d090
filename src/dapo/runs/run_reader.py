"""Reads the small files of a run for the page: metrics, configuration, manifest, summary and
evaluations.

Nothing is written into the run. Values are cached until their file changes.
"""

import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dapo.config.data_spec import parse_spec
from dapo.config.load import read_options
from dapo.config.option_entries import flatten
from dapo.core.errors import CheckpointError, DapoError, DataError
from dapo.core.files import damage_of
from dapo.core.secrets import mask_options
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import load_evaluation
from dapo.runs.manifest import read_manifest
from dapo.runs.metrics_file import metrics_by_step
from dapo.runs.stages import StagesFolder, has_stages
from dapo.runs.status import run_progress

Value = TypeVar("Value")

SIGNIFICANT_DIGITS = 7


class RunReader:
    """Reads the files of one run, which the page shows under `name`."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.directory = RunDirectory(path)
        self._cache: dict[Path, tuple[tuple[int, ...], Any]] = {}
        """The value of each file that was read, with the version of the file."""

    def require_run(self) -> None:
        """Raise CheckpointError if the directory holds no run, or links, pipes and the like."""
        RunDirectory.open(self.directory.path)

    def metrics(self) -> dict[str, Any]:
        """Return all metrics by column: `steps`, `columns` (one list per metric), `problem`.

        Several lines of one step are merged. A line that is still being written is left out; a
        damaged file gives no steps, and `problem` explains it.
        """
        try:
            self.require_run()
            return self._rows_and_columns()[1]
        except DapoError as error:
            return _columns({}) | {"problem": str(error)}

    def _rows_and_columns(self) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
        """Return the metrics by step and by column; none if no step was logged yet."""
        with damage_of(self.directory.metrics):
            try:
                return self._cached(self.directory.metrics, _rows_and_columns)
            except FileNotFoundError:
                return {}, _columns({})

    def metrics_version(self) -> str:
        """Return a text that changes when the metrics do."""
        try:
            return "-".join(map(str, _version(self.directory.metrics)))
        except OSError:
            return "none"

    def config(self) -> dict[str, Any]:
        """Read the options in config.yaml by dotted name; secrets are masked.

        Raises ConfigError or DataError.
        """
        return self._options()[0]

    def _options(self) -> tuple[dict[str, Any], dict[str, str | None]]:
        """Return options by dotted name, and labels of the data."""
        with damage_of(self.directory.config):
            return self._cached(self.directory.config, _options_and_labels)

    def evaluations(self) -> list[dict[str, Any]]:
        """Read the summaries of the stored evaluations, by step; a damaged one has a `problem`."""
        summaries = []
        for step in self.directory.evaluations():
            try:
                summary = self.evaluation(step)
                # the page asks for the table of one evaluation when it shows it
                summary.pop("table", None)
            except DataError as error:
                summary = {"step": step, "problem": str(error)}
            summaries.append(summary)
        return summaries

    def evaluation(self, step: int) -> dict[str, Any]:
        """Read an evaluation with its table. Raises DataError if it is missing or damaged."""
        path = self.directory.eval(step)
        if not os.path.lexists(path):
            raise DataError(f"{self.name} has no evaluation of step {step}")
        with damage_of(path):
            return {"step": step} | self._cached(path, load_evaluation)

    def summary(self) -> dict[str, Any]:
        """Return the head of the page: model, data, steps done and planned, state, time left.

        A run with a damaged file has the state `damaged`, with the reason in `problem`.
        """
        defaults: dict[str, Any] = {
            "name": self.name,
            "path": str(self.directory.path),
            "model": None,
            "data": None,
            "held_out": None,
            "num_steps": None,
            "note": None,
            "started": None,
            "seconds_left": None,
            "problem": None,
            "steps": 0,
            "seconds": 0.0,
            "tokens": 0,
        }
        try:
            self.require_run()
            with damage_of(self.directory.path):
                return defaults | self._facts()
        except DapoError as error:
            return defaults | {"state": "damaged", "note": str(error), "problem": str(error)}

    def _facts(self) -> dict[str, Any]:
        """Return the part of `summary` that the files of the run tell."""
        config, labels = self._options()
        manifest = read_manifest(self.directory)
        rows, metrics = self._rows_and_columns()
        progress = run_progress(self.directory, list(rows.values()))
        columns = metrics["columns"]
        return {
            "model": config.get("model.name", "unknown"),
            **labels,
            "steps": progress.step,
            "num_steps": progress.num_steps,
            "state": progress.state,
            "note": progress.exit_reason,
            "started": manifest.get("started"),
            "seconds": sum(value or 0.0 for value in columns.get("time/step_s", [])),
            "seconds_left": progress.seconds_left,
            "tokens": sum(value or 0 for value in columns.get("rollout/tokens_generated", [])),
        }

    def _cached(self, path: Path, read: Callable[[Path], Value]) -> Value:
        """Return the value that `read` returns for a file, from memory until the file changes."""
        # before it is read: a change meanwhile is seen by the next call
        version = _version(path)
        if path not in self._cache or self._cache[path][0] != version:
            self._cache[path] = (version, read(path))
        value: Value = self._cache[path][1]
        return value


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Find the named runs.

    A folder of runs stands for its runs, the newest first, the damaged ones included; it may hold
    none yet.

    Raises:
        CheckpointError: a path does not exist, or there is only a damaged run.
    """
    named_paths: list[Path] = []
    for path in paths:
        if has_stages(path):
            named_paths += StagesFolder.open(path).run_paths[::-1]
        elif RunDirectory.is_run(path) or not os.path.isdir(path):
            named_paths.append(path)
        else:
            named_paths += _runs_inside(path)
    run_paths = list(dict.fromkeys(named_paths))
    for path in run_paths:
        # among others a damaged run is shown as such
        if len(run_paths) == 1 or not RunDirectory.is_run(path):
            RunDirectory.open(path)
    return run_paths


def unique_name(path: Path, used_names: Container[str]) -> str:
    """Name a run by its folder, with a number if the name is taken."""
    base = re.sub(r"[^\w.@=+-]", "_", path.resolve().name) or "run"
    name = base
    number = 2
    while name in used_names:
        name = f"{base}.{number}"
        number += 1
    return name


def _runs_inside(folder: Path) -> list[Path]:
    """Return the runs in a folder, newest first. Raises CheckpointError if it cannot be read."""
    try:
        entries = list(os.scandir(folder))
        folders = [Path(entry.path) for entry in entries if entry.is_dir()]
        run_paths = []
        for path in folders:
            if has_stages(path):
                run_paths += _begun_in(path)
            elif RunDirectory.is_run(path):
                run_paths.append(path)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    runs = []
    for path in run_paths:
        with suppress(OSError):  # removed since
            runs.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(runs, reverse=True)]


def _begun_in(folder: Path) -> list[Path]:
    """Return the runs of a training in stages, also if its file is damaged or of an older
    version: among others it must not hide them.
    """
    try:
        return StagesFolder.open(folder).run_paths
    except DapoError:
        return sorted(config.parent for config in folder.glob("*/config.yaml"))


def _version(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file does; a replaced file has another inode."""
    status = path.stat(follow_symlinks=False)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _rows_and_columns(path: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    rows = metrics_by_step(path)
    return rows, _columns(rows)


def _columns(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of each step as columns, with None where a step lacks a metric."""
    steps = sorted(rows)
    names: dict[str, None] = {}
    for step in steps:
        names.update(dict.fromkeys(rows[step]))
    names.pop("step", None)
    columns = {}
    for name in names:
        columns[name] = [_rounded(rows[step].get(name)) for step in steps]
    return {"steps": steps, "columns": columns, "problem": None}


def _rounded(value: Any) -> Any:
    """Round a number to the digits that a plot can show, which halves the bytes to send."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _options_and_labels(path: Path) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return options by dotted name, and short names of the training and the held-out problems."""
    options = read_options(path)
    train = options["data"]["train"]
    held_out = options["data"].get("eval")
    labels = {
        "data": parse_spec(train).label,
        "held_out": None if held_out is None else parse_spec(held_out).label,
    }
    return dict(flatten(mask_options(options))), labels
