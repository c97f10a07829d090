"""Sinks of metrics: experiment trackers, which are optional packages, and the `Tracker` that feeds
all sinks.
"""

import importlib
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dapo.config.option_entries import flatten
from dapo.core.errors import ConfigError
from dapo.core.files import atomic_write_text
from dapo.core.loading import require_package
from dapo.core.secrets import mask_options

PACKAGES: Mapping[str, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""The package that each tracker of `log.sinks` needs."""
_END_STATUS = {"finished": "FINISHED", "solved": "FINISHED", "stopped": "KILLED"}
"""MLflow's status of a run by its state here; any other state is FAILED."""
_PARAMS_PER_CALL = 100
_PARAM_CHARS = 500
"""MLflow's limits on parameters."""
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w\-. /:]", re.ASCII)


def require_tracker(name: str) -> None:
    """Raise ConfigError, with the command that installs it, if a tracker is not installed."""
    require_package(PACKAGES[name], purpose="log.sinks", error=ConfigError)


Metrics: TypeAlias = Mapping[str, float | int]


class Sink(Protocol):
    """A receiver of the metrics of each step; a step may be logged in several parts."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None:
        """Write pending values. Nothing may be logged afterwards."""


@runtime_checkable
class EndingSink(Sink, Protocol):
    """A sink that records how the run has ended."""

    def end(self, state: str) -> None:
        """Receive the state of the run (`dapo status`), before `close`."""


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
        self._finish: Callable[[], object] = self._run.finish

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def end(self, state: str) -> None:
        if state == "failed":
            self._finish = partial(self._run.finish, exit_code=1)

    def close(self) -> None:
        self._finish()


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


class MlflowSink:
    """MLflow, at the server or database that MLFLOW_TRACKING_URI names.

    The options of the run are its parameters, with secrets masked. The run's id is kept in
    `directory`, so that a resumed run continues the same one there. MLflow cannot overwrite: an
    option that a resume has changed becomes a tag, and steps that a resumed run repeats keep their
    first values.
    """

    def __init__(
        self, experiment: str, name: str, config: Mapping[str, Any], directory: str | Path
    ) -> None:
        """Start or continue a run of MLflow.

        Args:
            experiment: the experiment that it belongs to, which is made if there is none.
            name: its name there.
            config: the options of the run.
            directory: the folder of the file with its id.
        """
        require_tracker("mlflow")
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        id_file = Path(directory) / "mlflow-run-id"
        self._may_repeat = id_file.exists()
        if id_file.exists():
            self._id = id_file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
        else:
            stored = self._client.get_experiment_by_name(experiment)
            if stored is None:
                experiment_id = self._client.create_experiment(experiment)
            else:
                experiment_id = stored.experiment_id
            self._id = self._client.create_run(experiment_id, run_name=name).info.run_id
            atomic_write_text(id_file, f"{self._id}\n")
        self._log_options(dict(flatten(mask_options(config))))

    def _log_options(self, options: Mapping[str, Any]) -> None:
        """Log options as parameters, and those that differ from the first start as tags."""
        logged = self._client.get_run(self._id).data.params
        params = []
        for option, value in options.items():
            name = _mlflow_name(option)
            text = str(value)[:_PARAM_CHARS]
            if name not in logged:
                params.append(self._entities.Param(name, text))
            elif logged[name] != text:
                self._client.set_tag(self._id, name, text)
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_PER_CALL])

    def log(self, step: int, metrics: Metrics) -> None:
        values = {_mlflow_name(name): float(value) for name, value in metrics.items()}
        if self._may_repeat:
            new = {name: value for name, value in values.items() if not self._has(name, step)}
            self._may_repeat = len(new) < len(values)
            values = new
        time_ms = round(1000 * time.time())
        entries = [
            self._entities.Metric(name, value, time_ms, step) for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=entries)

    def _has(self, name: str, step: int) -> bool:
        """Return True if MLflow has a metric of this step."""
        history = self._client.get_metric_history(self._id, name)
        return any(entry.step == step for entry in history)

    def end(self, state: str) -> None:
        self._client.set_terminated(self._id, _END_STATUS.get(state, "FAILED"))

    def close(self) -> None:
        """Every call has written its values."""


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow refuses in a name."""
    return _NOT_IN_MLFLOW_NAMES.sub("_", name)


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

    def end(self, state: str) -> None:
        """Tell the sinks that record it how the run has ended."""
        for sink in self._sinks:
            if isinstance(sink, EndingSink):
                sink.end(state)

    def close(self) -> None:
        """Write pending values, and close all sinks."""
        for sink in self._sinks:
            sink.close()
