"""Reads the small files of a run for the page: metrics, configuration, manifest, summary and evaluations.

Nothing is written into the run. Values are kept until the file that they come from changes.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from dapo.core.errors import CheckpointError, DataError
from dapo.core.files import read_json
from dapo.core.secrets import mask_options
from dapo.evaluation.scores import paired_difference, require_summary
from dapo.runs.directory import RunDirectory, step_of
from dapo.telemetry.sinks import read_metrics

Value = TypeVar("Value")

STEPS_FOR_ETA = 20
SIGNIFICANT_DIGITS = 7
_EVALUATION_NAME = re.compile(r"step_\d{6,}\.json")


class RunFiles:
    """The files of one run, by the name under which the page shows it."""

    def __init__(self, name: str, path: Path) -> None:
        """Raises CheckpointError if `path` holds no run."""
        self.name = name
        self.directory = RunDirectory.open(path)
        self._kept: dict[Path, tuple[tuple[int, int], Any]] = {}

    def metrics(self) -> dict[str, Any]:
        """All metrics by column: `steps`, `columns` (a list per metric with None where a step lacks it), `problem`.

        A step that has several lines, such as a last evaluation, is one entry. A line that is still being written is
        left out; a damaged file gives no steps, and `problem` says why.
        """
        try:
            return self._keep(self.directory.metrics, lambda path: _columns(read_metrics(path)))
        except FileNotFoundError:
            return _columns([])
        except DataError as error:
            return _columns([]) | {"problem": str(error)}

    def metrics_version(self) -> str:
        """A text that changes when the metrics do."""
        try:
            return "-".join(map(str, _version(self.directory.metrics)))
        except OSError:
            return "none"

    def config(self) -> dict[str, Any]:
        """The options as they stand in config.yaml, by dotted name; secrets are masked."""
        import yaml

        def read(path: Path) -> dict[str, Any]:
            try:
                found = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
                raise DataError(f"{path} is damaged: it is no YAML") from None
            if not isinstance(found, dict):
                raise DataError(f"{path} is damaged: it holds no options")
            return flatten(mask_options(found))

        try:
            return self._keep(self.directory.config, read)
        except (OSError, DataError):
            return {}

    def manifest(self) -> dict[str, Any]:
        """Versions, machine, command line and seed; empty where the file is damaged."""
        return self._object(self.directory.manifest)

    def evaluations(self) -> list[dict[str, Any]]:
        """The summary of each stored evaluation, without its table, by step; `problem` where one cannot be read."""
        found = []
        for path in sorted(self.directory.path.glob("eval/step_*.json")):
            if _EVALUATION_NAME.fullmatch(path.name):
                try:
                    found.append(self._keep(path, _evaluation_summary))
                except (OSError, DataError) as error:
                    found.append({"step": step_of(path), "problem": str(error)})
        return sorted(found, key=lambda each: each["step"])

    def evaluation(self, step: int) -> dict[str, Any]:
        """One evaluation with its table. Raises DataError where there is none of this step, or it is damaged."""
        path = self.directory.eval(step)
        try:
            return _evaluation(path)
        except FileNotFoundError:
            raise DataError(f"{self.name} has no evaluation of step {step}") from None

    def summary(self) -> dict[str, Any]:
        """What the head of the page says of the run: model, data, steps done and wanted, state, seconds left."""
        config, metrics, manifest = self.config(), self.metrics(), self.manifest()
        steps = [step for step in metrics["steps"] if step > 0]
        wanted = config.get("train.num_steps")
        state, note = self._state()
        return {
            "name": self.name,
            "path": str(self.directory.path),
            "model": config.get("model.name", "unknown"),
            "data": _data_label(config, "data.train"),
            "held_out": _data_label(config, "data.eval"),
            "steps": steps[-1] if steps else 0,
            "num_steps": wanted,
            "state": state,
            "note": note,
            "started": manifest.get("started"),
            "seconds": sum(value or 0.0 for value in metrics["columns"].get("time/step_s", [])),
            "seconds_left": _seconds_left(metrics, wanted) if state == "running" else None,
            "tokens": sum(value or 0 for value in metrics["columns"].get("rollout/tokens_generated", [])),
            "problem": metrics["problem"],
        }

    def _state(self) -> tuple[str, str | None]:
        """`running`, `finished`, `stopped` or `interrupted`, and the reason that the run gave for its end."""
        if (reason := self.directory.exit_reason()) is not None:
            return ("finished" if reason == "finished" else "stopped"), reason
        return ("running" if self._holder_is_alive() else "interrupted"), None

    def _holder_is_alive(self) -> bool:
        """Whether the process that the lock file names exists. The lock itself is not touched."""
        try:
            os.kill(int((self.directory.path / "lock").read_text(encoding="ascii").strip()), 0)
        except PermissionError:
            return True  # another user's
        except (OSError, ValueError, OverflowError):
            return False
        return True

    def _object(self, path: Path) -> dict[str, Any]:
        try:
            found = self._keep(path, read_json)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _keep(self, path: Path, read: Callable[[Path], Value]) -> Value:
        """What `read` gives for a file, read again when the file has changed."""
        version = _version(path)
        kept = self._kept.get(path)
        if kept is None or kept[0] != version:
            kept = self._kept[path] = (version, read(path))
        value: Value = kept[1]
        return value


def find_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """The runs that are named, or those in `./runs` if none is; each under a name of its own.

    A path that is no run but holds some stands for them, the newest first. Raises CheckpointError where there is none.
    """
    found: list[Path] = []
    for path in paths or [Path("runs")]:
        if (path / "config.yaml").is_file() or not path.is_dir():
            found.append(path)
            continue
        inside = [each for each in path.iterdir() if (each / "config.yaml").is_file()]
        if not inside:
            raise CheckpointError(
                f"{path} holds no run: expected run directories that `dapo train` made, such as {path}/quickstart-..."
            )
        found += sorted(inside, key=lambda each: each.stat().st_mtime, reverse=True)
    if not paths and not found[0].is_dir():
        raise CheckpointError("there is no folder ./runs; name a run: dapo view RUN")
    names: dict[str, Path] = {}
    for path in dict.fromkeys(found):
        base = re.sub(r"[^\w.@=+-]", "_", path.resolve().name) or "run"
        number = next(n for n in range(1, len(found) + 2) if (base if n == 1 else f"{base}.{n}") not in names)
        names[base if number == 1 else f"{base}.{number}"] = path
    return [RunFiles(name, path) for name, path in names.items()]


def compare_configs(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """The options in which the runs differ: each with its name and its value per run, None where a run lacks it."""
    configs = [run.config() for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [{"name": name, "values": [config.get(name) for config in configs]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def compare_evaluations(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The paired difference, second minus first, over the problems of both, and a row per problem.

    Problems that only one of them holds are counted in `unpaired`. Raises DataError where they share none.
    """
    rows, others = ({row["id"]: row for row in each["table"]} for each in (first, second))
    shared = [key for key in rows if key in others]
    if not shared:
        raise DataError("the two evaluations have no problem in common: nothing can be paired")
    result = paired_difference(
        [rows[key] for key in shared],
        [others[key] for key in shared],
        binary=bool(first["binary"] and second["binary"]),
    )
    table = [
        {
            **{name: rows[key].get(name, "") for name in ("id", "source", "question", "answer")},
            "first": rows[key]["accuracy"],
            "second": others[key]["accuracy"],
        }
        for key in shared
    ]
    return {**result, "unpaired": len(rows.keys() ^ others.keys()), "table": table}


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted name; lists and empty sections stay values."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[int, dict[str, Any]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    steps = sorted(merged)
    names = dict.fromkeys(name for step in steps for name in merged[step] if name != "step")
    columns = {name: [_short(merged[step].get(name)) for step in steps] for name in names}
    return {"steps": steps, "columns": columns, "problem": None}


def _short(value: Any) -> Any:
    """Numbers with the digits that a picture can show: half as many bytes to send."""
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
    """A short name of the data: the file or source, the tasks, or the parts of a mix."""
    if config.get(name) is not None:
        return str(config[name])
    inside = [key.removeprefix(f"{name}.").split(".") for key in config if key.startswith(f"{name}.")]
    if tasks := list(dict.fromkeys(key[1] for key in inside if key[0] in ("builtin", "gym", "mix") and len(key) > 1)):
        return "+".join(tasks)
    for key in ("path", "hub", "builtin", "gym"):
        if f"{name}.{key}" in config:
            return str(config[f"{name}.{key}"])
    return None


def _seconds_left(metrics: Mapping[str, Any], wanted: Any) -> float | None:
    steps = [step for step in metrics["steps"] if step > 0]
    seconds = [value for value in metrics["columns"].get("time/step_s", []) if value is not None]
    evaluations = [value or 0.0 for value in metrics["columns"].get("time/evaluate_s", [])]
    if not seconds or not isinstance(wanted, int):
        return None
    recent = [total - extra for total, extra in zip(seconds[::-1], evaluations[::-1], strict=False)] or seconds[::-1]
    per_step = median(recent[:STEPS_FOR_ETA]) + (fmean(evaluations[-STEPS_FOR_ETA:]) if evaluations else 0.0)
    return float(per_step * max(0, wanted - steps[-1]))
