"""Where metrics go: `metrics.jsonl`, which every run has, and trackers that are installed separately."""

import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from dapo.config.secrets import mask_options
from dapo.core.errors import ConfigError, DataError
from dapo.core.files import atomic_file, to_json

Metrics: TypeAlias = Mapping[str, float | int]


class Sink(Protocol):
    """Takes the metrics of one step after the other; a step may be logged in several parts."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record `area/name -> number`."""

    def close(self) -> None:
        """Write what is pending. Nothing may be logged afterwards."""


class JsonlSink:
    """Appends `{"step": 12, "reward/mean": 0.5, ...}` lines, each written at once so it can be followed.

    Keys keep the order they are given in. JSON has no infinity and no NaN: both are written as null.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def log(self, step: int, metrics: Metrics) -> None:
        """Append one line, whole or not at all. Raises OSError, as on a full disk."""
        line = (to_json({"step": step, **metrics}) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(before)
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Event files for `tensorboard --logdir DIRECTORY`.

    A resumed run gives its `first_step`: TensorBoard then hides what an earlier process wrote from that step on.
    """

    def __init__(self, directory: str | Path, *, first_step: int | None = None) -> None:
        tensorboard = _tracker("torch.utils.tensorboard", package="tensorboard")
        self._writer = tensorboard.SummaryWriter(str(directory), purge_step=first_step)

    def log(self, step: int, metrics: Metrics) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()


class WandbSink:
    """Weights & Biases; secrets among the options are masked.

    The run's id is kept in `directory`, so that a resumed run continues the same curves.
    W&B's history only grows: of the steps that are repeated after a resume it keeps what it saw first.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any], directory: str | Path) -> None:
        wandb = _tracker("wandb", package="wandb")
        id_file = Path(directory) / "wandb-run-id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self._run = wandb.init(
            project=project, name=name, config=mask_options(config), dir=str(directory), id=run_id, resume="allow"
        )
        id_file.write_text(f"{self._run.id}\n")

    def log(self, step: int, metrics: Metrics) -> None:
        """Send one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._run.finish()


class TrackioSink:
    """trackio, which keeps its data where TRACKIO_DIR says; secrets are masked. A run of the same name is continued.

    Steps that are repeated after a resume are there twice.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._trackio = _tracker("trackio", package="trackio")
        self._trackio.init(project=project, name=name, config=mask_options(config), resume="allow")

    def log(self, step: int, metrics: Metrics) -> None:
        """Record one step."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._trackio.finish()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Every line of a metrics file, oldest first; a last line that is still being written is left out.

    Raises DataError for a missing file, or a line that is no `{"step": ...}` object.
    """
    return [record for _, record in _records(Path(path))]


def truncate_after(path: str | Path, step: int) -> None:
    """Cut the lines of later steps, and a torn last line, so that a resumed run appends in their place.

    The file is replaced as a whole: a crash leaves the old one or the new one. A missing file is left missing.
    """
    path = Path(path)
    if not path.exists():
        return
    with atomic_file(path) as temporary, open(temporary, "wb") as kept:
        for line, record in _records(path):
            if record["step"] <= step:
                kept.write(line)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.is_file():
        raise DataError(f"no metrics file {path}; expected the metrics.jsonl of a run directory")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # the writer was killed, or is at work, in the middle of this line
            try:
                record = json.loads(line)
                is_step = isinstance(record, dict) and isinstance(record.get("step"), int)
            except ValueError:
                is_step = False
            if not is_step:
                raise DataError(f'{path}, line {number}: expected an object with a "step", got {line[:80]!r}')
            yield line, record


def _tracker(module: str, *, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"log.sinks asks for {package}, which is not installed; run pip install 'dapo-rl[{package}]' "
            f"or leave {package} out of log.sinks"
        ) from None


class Display(Protocol):
    """What shows progress to a person."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Hands each step's metrics to all sinks and the display."""

    def __init__(self, sinks: Sequence[Sink], display: Display) -> None:
        self._sinks = sinks
        self._display = display

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A finished step."""
        for sink in self._sinks:
            sink.log(step, metrics)
        self._display.log(step, metrics)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """What is going on now, and how far it is."""
        self._display.phase(name, done, total)

    def message(self, text: str) -> None:
        """Something a person should know."""
        self._display.message(text)

    def close(self) -> None:
        """Flush and close everything."""
        for sink in self._sinks:
            sink.close()
        self._display.close()
