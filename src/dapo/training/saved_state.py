"""Reads the counts in a checkpoint. Imports no torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.files import read_json

if TYPE_CHECKING:
    from dapo.config import Config

STATE_FILE = "state.json"
MAY_RESTART = "may_restart"
"""The entry of a stream's state in a fork that may have another number of problems."""


def is_logged(checkpoint: Path) -> bool:
    """Return True if the metrics of a checkpoint's step were logged before the checkpoint."""
    return pending_metrics_of(read_state(checkpoint)) is None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the counts of a checkpoint with the state of its stream and sampler.

    Raises CheckpointError.
    """
    path = checkpoint / STATE_FILE
    try:
        state = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} was not written by a run: it holds a {type(state).__name__}")
    if absent := sorted({"train_state", "stream", "sampler"} - state.keys()):
        raise CheckpointError(f"{path} was not written by a run: it lacks {', '.join(absent)}")
    return state


def steps_of_epochs(config: "Config", checkpoint: Path | None) -> list[str]:
    """Return the override of `train.num_steps` for a run that changes `train.epochs`.

    Args:
        config: the changed options.
        checkpoint: the checkpoint with the number of the run's rows; None: there is none yet.

    Returns:
        An empty list if the options have no `train.epochs`.

    Raises:
        ConfigError: the number of rows is not known, or other options do not fit it.
    """
    if config.train.epochs is None:
        return []
    if checkpoint is None:
        raise ConfigError(
            "train.epochs can change once the run has a checkpoint; set train.num_steps"
        )
    num_rows = read_state(checkpoint)["stream"]["size"]
    num_steps = config.with_steps_of_epochs(num_rows).train.num_steps
    return [f"train.num_steps={num_steps}"]


def pending_metrics_of(state: Mapping[str, Any]) -> dict[str, float] | None:
    """Read the metrics that were not written yet; null stands for NaN, as in metrics.jsonl."""
    pending_metrics = state.get("pending_metrics")
    return pending_metrics and {
        name: math.nan if value is None else value for name, value in pending_metrics.items()
    }
