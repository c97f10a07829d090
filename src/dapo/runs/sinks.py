"""Sinks of metrics: experiment trackers, which are optional packages, and the `Tracker` that feeds
all sinks.
"""

import importlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from dapo.core.errors import ConfigError
from dapo.core.files import atomic_write_text
from dapo.core.loading import require_package
from dapo.core.secrets import mask_options

PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""The package that each tracker of `log.sinks` needs."""


def require_tracker(name: str) -> None:
    """Raise ConfigError, with the command that installs it, if a tracker is not installed."""
    require_package(PACKAGES[name], purpose="log.sinks", error=ConfigError)


Metrics: TypeAlias = Mapping[str, float | int]


class Sink(Protocol):
    """A receiver of the metrics of each step; a step may be logged in several parts."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None:
        """Write pending values. Nothing may be logged afterwards."""


class TensorBoardSink:
    """Event files for `tensorboard --logdir DIRECTORY`.

    A resumed run passes its `first_step`: TensorBoard then hides an earlier process's values from
    that step on.
    """

    def __init__(self, directory: str | Path, *, first_step: int | None = None) -> None:
        require_tracker("tensorboard")
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(directory), purge_step=first_step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        # TensorBoard is watched while the run trains
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. Secrets in `config` are masked.

    The run's id is chosen here and kept in `directory`, so that a resumed run, or a second attempt
    to connect, continues the same curves. W&B cannot overwrite: it keeps the first values of steps
    that a resumed run repeats.
    """

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], directory: str | Path
    ) -> None:
        """Start or continue a run of W&B.

        Args:
            project: the project that it belongs to.
            name: its name there.
            config: the options of the run.
            directory: the folder for W&B's files.
        """
        require_tracker("wandb")
        wandb: Any = importlib.import_module("wandb")
        id_file = Path(directory) / "wandb-run-id"
        if not id_file.exists():
            atomic_write_text(id_file, f"{uuid.uuid4().hex[:8]}\n")
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(directory),
            id=id_file.read_text().strip(),
            config=mask_options(config),
            resume="allow",
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """trackio, which stores its data in the directory TRACKIO_DIR. Secrets in `config` are masked.

    A run of the same name is continued; steps that a resumed run repeats appear twice.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        require_tracker("trackio")
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project=project, name=name, config=mask_options(config), resume="allow")

    def log(self, step: int, metrics: Metrics) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class Display(Sink, Protocol):
    """Shows progress to a person."""

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None: ...

    def message(self, text: str) -> None: ...

    def recall(self, earlier_steps: Iterable[Metrics]) -> None:
        """Receive the metrics of the steps before a resume."""


class Tracker:
    """Sends each step's metrics to all sinks, the display, and then `listeners`."""

    def __init__(
        self, sinks: Sequence[Sink], display: Display, listeners: Sequence[Sink] = ()
    ) -> None:
        self._sinks = (*sinks, display, *listeners)
        self.phase = display.phase
        self.message = display.message

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Write pending values, and close all sinks."""
        for sink in self._sinks:
            sink.close()
