"""Finds the model or the checkpoint that is to answer prompts, without torch."""

from dataclasses import dataclass
from pathlib import Path

from dapo.config import Config, build_config
from dapo.core.errors import CheckpointError
from dapo.core.terminal import warn
from dapo.core.text import did_you_mean
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.stages import unbegun_advice
from dapo.runs.stored_config import load_run_config
from dapo.start.check import require_model

DEFAULT_TOKENS = 1024
"""The response limit of a model that is no run."""
_UNUSED_DATA = "builtin:sums"  # options need a data source, and prompts are typed here


@dataclass(frozen=True)
class ModelChoice:
    """A model, or a run and its checkpoint."""

    name: str
    """What the user typed."""
    config: Config
    """The options of the run, or the defaults with this model."""
    checkpoint: Path | None = None
    """The checkpoint of the run; None for a model."""

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None for a model."""
        return None if self.checkpoint is None else step_of(self.checkpoint)


def choose_model(name: str | Path, *, step: int | None = None) -> ModelChoice:
    """Find the model or run that `dapo eval`, `dapo chat` and `dapo generate` take.

    Args:
        name: an alias, a Hugging Face id, a model directory or a run directory.
        step: the step of a run's checkpoint; None: the newest.

    Raises:
        CheckpointError: the run has no such checkpoint.
        ConfigError: there is no such model or run.
    """
    if RunDirectory.is_run(name):
        run = RunDirectory.open(name)
        if step is None:
            checkpoint = run.checkpoints.latest(warn=warn)
        else:
            checkpoint = run.checkpoints.find(step)
        if checkpoint is None:
            raise CheckpointError(
                f"{run.path} has no checkpoint yet: its model is still the initial one"
            )
        return ModelChoice(str(name), load_run_config(run), checkpoint)
    if step is not None:
        raise CheckpointError(f"a step was given, and {name} is not a run directory")
    _require_no_missing_run(Path(name))
    require_model(str(name))
    options = {
        "model": str(name),
        "data": {"train": _UNUSED_DATA},
        "overlong": {"mode": "off"},
        "rollout": {"max_response_tokens": DEFAULT_TOKENS},
    }
    return ModelChoice(str(name), build_config(options, [], where=str(name)))


def _require_no_missing_run(path: Path) -> None:
    """Raise CheckpointError for a missing path in a folder of runs, which reads like a hub id.

    So it does for a training of which no stage has begun, and for a stage that has not.
    """
    if advice := unbegun_advice(path):
        raise CheckpointError(f"there is no run {path}; {advice}")
    if path.exists() or path.parent == Path():
        return
    runs = sorted(config.parent.name for config in path.parent.glob("*/config.yaml"))
    if runs:
        near = did_you_mean(path.name, runs, otherwise=f"the newest are {', '.join(runs[-5:])}")
        raise CheckpointError(f"there is no run {path}; {near}")
