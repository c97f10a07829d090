"""Reads the small files of a run for the page: metrics, configuration, manifest, summary and evaluations.

Nothing is written into the run. Values are cached until their file changes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dapo.config.option_entries import flatten
from dapo.core.errors import CheckpointError, DataError
from dapo.core.files import read_json
from dapo.core.secrets import mask_options
from dapo.evaluation.scores import require_summary
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import metrics_by_step, read_metrics
from dapo.runs.status import run_progress

Value = TypeVar("Value")

SIGNIFICANT_DIGITS = 7


class RunReader:
    """Reads the files of one run, which the page shows under `name`."""

    def __init__(self, name: str, path: Path) -> None:
        """Open the run at `path`. Raises CheckpointError if there is none."""
        self.name = name
        self.directory = RunDirectory.open(path)
        self._kept: dict[Path, tuple[tuple[int, int], Any]] = {}

    def metrics(self) -> dict[str, Any]:
        """Read all metrics: `steps`, `columns` (a list per metric, with None where a step lacks it) and `problem`.

        Several lines of a step are one entry, and a line that is still being written is left out. A damaged file gives
        no steps, and `problem` explains it.
        """
        try:
            return self._keep(self.directory.metrics, lambda path: _columns(metrics_by_step(path)))
        except FileNotFoundError:
            return _columns({})
        except DataError as error:
            return _columns({}) | {"problem": str(error)}

    def _records(self) -> list[dict[str, Any]]:
        """Read the lines of the metrics; none if the file is missing or damaged."""
        try:
            return read_metrics(self.directory.metrics)
        except DataError:
            return []

    def metrics_version(self) -> str:
        """Return a text that changes with the metrics."""
        try:
            return "-".join(map(str, _version(self.directory.metrics)))
        except OSError:
            return "none"

    def config(self) -> dict[str, Any]:
        """Read the options in config.yaml by dotted name; secrets are masked."""
        import yaml

        def read(path: Path) -> dict[str, Any]:
            try:
                found = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
                raise DataError(f"{path} is damaged: it is no YAML") from None
            if not isinstance(found, dict):
                raise DataError(f"{path} is damaged: it holds no options")
            return dict(flatten(mask_options(found)))

        try:
            return self._keep(self.directory.config, read)
        except (OSError, DataError):
            return {}

    def manifest(self) -> dict[str, Any]:
        """Read versions, machine, command line and seed; empty if the file is damaged."""
        return self._object(self.directory.manifest)

    def evaluations(self) -> list[dict[str, Any]]:
        """Read each stored evaluation without its table, by step; an unreadable one has `problem` instead."""
        found = []
        for step, path in self.directory.evaluations().items():
            try:
                found.append(self._keep(path, _evaluation_summary))
            except (OSError, DataError) as error:
                found.append({"step": step, "problem": str(error)})
        return found

    def evaluation(self, step: int) -> dict[str, Any]:
        """Read a step's evaluation with its table. Raises DataError if it is missing or damaged."""
        path = self.directory.eval(step)
        try:
            return _evaluation(path)
        except FileNotFoundError:
            raise DataError(f"{self.name} has no evaluation of step {step}") from None

    def summary(self) -> dict[str, Any]:
        """Collect the head of the page: model, data, finished and planned steps, state, seconds left."""
        config, metrics, manifest = self.config(), self.metrics(), self.manifest()
        progress = run_progress(self.directory, self._records())
        return {
            "name": self.name,
            "path": str(self.directory.path),
            "model": config.get("model.name", "unknown"),
            "data": _data_label(config, "data.train"),
            "held_out": _data_label(config, "data.eval"),
            "steps": progress.step,
            "num_steps": progress.num_steps,
            "state": progress.state,
            "note": progress.exit_reason,
            "started": manifest.get("started"),
            "seconds": sum(value or 0.0 for value in metrics["columns"].get("time/step_s", [])),
            "seconds_left": progress.seconds_left,
            "tokens": sum(value or 0 for value in metrics["columns"].get("rollout/tokens_generated", [])),
            "problem": metrics["problem"],
        }

    def _object(self, path: Path) -> dict[str, Any]:
        try:
            found = self._keep(path, read_json)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _keep(self, path: Path, read: Callable[[Path], Value]) -> Value:
        """Call `read` for a file, or return its cached value if the file has not changed."""
        version = _version(path)
        kept = self._kept.get(path)
        if kept is None or kept[0] != version:
            kept = self._kept[path] = (version, read(path))
        value: Value = kept[1]
        return value


def find_runs(paths: Sequence[Path]) -> list[RunReader]:
    """Find the runs at `paths`, by default in `./runs`, and give each a unique name.

    A folder of runs is replaced by its runs, the newest first. Raises CheckpointError if there is none.
    """
    found: list[Path] = []
    for path in paths or [Path("runs")]:
        if RunDirectory.is_run(path) or not path.is_dir():
            found.append(path)
            continue
        inside = [each for each in path.iterdir() if RunDirectory.is_run(each)]
        if not inside:
            raise CheckpointError(
                f"{path} holds no run: expected run directories of `dapo train`, such as {path}/quickstart-..."
            )
        found += sorted(inside, key=lambda each: each.stat().st_mtime, reverse=True)
    if not paths and not found[0].is_dir():
        raise CheckpointError("there is no folder ./runs; name a run: dapo view RUN")
    names: dict[str, Path] = {}
    for path in dict.fromkeys(found):
        base = re.sub(r"[^\w.@=+-]", "_", path.resolve().name) or "run"
        number = next(n for n in range(1, len(found) + 2) if (base if n == 1 else f"{base}.{n}") not in names)
        names[base if number == 1 else f"{base}.{number}"] = path
    return [RunReader(name, path) for name, path in names.items()]


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _columns(merged: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    steps = sorted(merged)
    names = dict.fromkeys(name for step in steps for name in merged[step] if name != "step")
    columns = {name: [_rounded(merged[step].get(name)) for step in steps] for name in names}
    return {"steps": steps, "columns": columns, "problem": None}


def _rounded(value: Any) -> Any:
    """Round a number to the digits that a plot can show, which halves the bytes to send."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def _evaluation(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except ValueError:
        raise DataError(f"{path} is damaged: it is no JSON") from None
    return {"step": step_of(path), **require_summary(found, str(path))}


def _evaluation_summary(path: Path) -> dict[str, Any]:
    return {name: value for name, value in _evaluation(path).items() if name != "table"}


def _data_label(config: Mapping[str, Any], name: str) -> str | None:
    """Return a short name of the data: the file or source, the tasks, or the parts of a mix."""
    if config.get(name) is not None:
        return str(config[name])
    inside = [key.removeprefix(f"{name}.").split(".") for key in config if key.startswith(f"{name}.")]
    if tasks := list(dict.fromkeys(key[1] for key in inside if key[0] in ("builtin", "gym", "mix") and len(key) > 1)):
        return "+".join(tasks)
    for key in ("path", "hub", "builtin", "gym"):
        if f"{name}.{key}" in config:
            return str(config[f"{name}.{key}"])
    return None
