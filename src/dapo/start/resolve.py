"""The second step of a start: replaces what depends on this machine by its value."""

import pkgutil
from dataclasses import dataclass

import torch

from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.policy.model import device_of
from dapo.start.auto import resolve_auto
from dapo.start.check import Checked, UserCode
from dapo.start.export import with_exported_runs


@dataclass(frozen=True)
class Resolved:
    """Options for this machine, without `auto` but in the engine's section, and the user's code."""

    config: Config
    code: UserCode
    training: bool
    notes: tuple[str, ...]


def resolve(checked: Checked, *, training: bool = True) -> Resolved:
    """Resolve `auto`, and export the checkpoints of runs that options name as models.

    Raises ConfigError if this machine cannot do it, and CheckpointError for a run without a
    checkpoint.
    """
    config = checked.config
    notes: list[str] = []
    require_hardware(config, training=training)
    if training:
        config = with_exported_runs(config, notes.append)
    config = resolve_auto(config, training=training, log=notes.append)
    return Resolved(config, checked.code, training, tuple(notes) if training else ())


def require_hardware(config: Config, *, training: bool = True) -> None:
    """Raise ConfigError if this machine lacks GPUs, or a requirement of the engine."""
    ranks = config.distributed.trainer_ranks if training else 1
    gpus = torch.cuda.device_count()
    if not config.uses_ray and device_of(config.train.device) == "cuda" and ranks > gpus:
        raise ConfigError(
            f"distributed.trainer_ranks={ranks}: expected at most {gpus}, the number of GPUs here,"
            f" because NCCL takes one rank per GPU; set distributed.trainer_ranks={gpus}, or"
            " launcher=ray:HOST:PORT for a cluster with more"
        )
    if (require := config.rollout.engine_kind.require) is not None:
        pkgutil.resolve_name(require)(config)
