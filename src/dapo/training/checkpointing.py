"""When a run's state is saved, what belongs to it, and how it is put back."""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dapo.config import Config
from dapo.core.errors import DapoError, NumericsError, TrainerLost
from dapo.core.files import atomic_write_json
from dapo.training.checkpoint_store import StorageError
from dapo.training.prefetched_batch import read_ahead, write_ahead
from dapo.training.state import Parts, Progress

"""Attempts in a row, one a step, after which a run that cannot save stops."""

# Of a processor that training wants the writer gets next to nothing, and it takes what training leaves idle.
STATE_FILE = "state.json"
HISTORY_FILE = "problems.json"
"""Of a checkpoint, and as of the newest one in the run directory."""


def save_when_due(config: Config, parts: Parts, progress: Progress) -> None:
    """Have a checkpoint written beside training after every `save_every`-th step, and again where one failed."""
    parts.checkpoints.settle()
    every = config.train.save_every
    is_due = bool(every and progress.step % every == 0) or parts.checkpoints.has_failed
    if is_due and progress.step < config.train.num_steps:
        parts.tracker.phase("save")
        parts.checkpoints.settle(wait=True)  # the snapshot takes the place of the one before
        write = parts.policy.snapshot()
        parts.checkpoints.start(progress.step, checkpoint_of(config, parts, progress, write))
        progress.is_saved = True


def save_now(config: Config, parts: Parts, progress: Progress) -> None:
    """See the last finished step to the disk. Raises StorageError if that fails."""
    parts.tracker.phase("save")
    parts.checkpoints.settle(wait=True)
    if progress.is_saved and not parts.checkpoints.has_failed:
        return
    parts.checkpoints.save_now(progress.step, checkpoint_of(config, parts, progress, parts.policy.save))
    progress.is_saved = True


def checkpoint_of(
    config: Config, parts: Parts, progress: Progress, write_policy: Callable[[Path], None]
) -> Callable[[], Path]:
    """What writes a checkpoint of the state as it is now; the policy's part comes from `write_policy`."""
    state: dict[str, Any] = {
        "progress": progress.state_dict(),
        "stream": parts.stream.state_dict(),
        "sampler": parts.sampler.state_dict(),
    }
    if progress.unlogged is not None:
        state["unlogged"] = progress.unlogged
    history, ahead = parts.history.state_dict(), progress.ahead
    save = partial(parts.run.save_checkpoint, accuracy=progress.accuracy, keep_best=config.train.keep_best)
    step = progress.step

    def write(directory: Path) -> None:
        write_policy(directory)
        atomic_write_json(directory / STATE_FILE, state)
        atomic_write_json(directory / HISTORY_FILE, history)
        if ahead is not None:
            write_ahead(directory, ahead)

    def save_all() -> Path:
        path = save(step, write, config.train.keep_checkpoints)
        atomic_write_json(parts.run.path / HISTORY_FILE, history)
        return path

    return save_all


def save_after_failure(config: Config, parts: Parts, progress: Progress, error: DapoError | OSError) -> None:
    """Save what is worth it and whole, and tell from where the run will continue.

    A step that broke off between its updates leaves a policy that no step of the run ever had: it is not saved, and
    neither are weights that are not finite, or lost with the processes that held them.
    """
    tell = parts.tracker.message
    try:
        if not progress.is_whole:
            tell(f"step {progress.step + 1} broke off in the middle of its updates; nothing of it is kept")
        if progress.is_whole and not progress.is_new and not isinstance(error, StorageError | TrainerLost):
            save_now(config, parts, progress)
        else:
            parts.checkpoints.settle(wait=True)  # what comes next may clear up where it is still at work
    except (StorageError, NumericsError, TrainerLost) as another:
        if str(another) != str(error):
            tell(str(another))
    newest = parts.run.newest_step()
    saved = "nothing is saved yet" if newest is None else f"saved: step {newest} of {config.train.num_steps}"
    tell(f"{saved}; continue with: dapo resume {shlex.quote(str(parts.run.path))}")


def restore(parts: Parts, checkpoint: Path) -> Progress:
    """Put policy, stream and sampler back to a checkpoint's state; what it holds of the next step comes along."""
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    parts.policy.load(checkpoint)
    parts.stream.load_state_dict(state["stream"])
    parts.sampler.load_state_dict(state["sampler"])
    if (history := checkpoint / HISTORY_FILE).exists():  # runs of an earlier version kept none
        parts.history.load_state_dict(json.loads(history.read_text(encoding="utf-8")))
        # a kill may have come between the checkpoint and the run's own copy
        atomic_write_json(parts.run.path / HISTORY_FILE, parts.history.state_dict())
    ahead = read_ahead(checkpoint, parts.stream)
    return Progress(**state["progress"], unlogged=_unlogged(state), ahead=ahead, is_saved=True)


def is_logged(checkpoint: Path) -> bool:
    """Whether the metrics of a checkpoint's step were written before it was."""
    return _unlogged(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))) is None


def _unlogged(state: Mapping[str, Any]) -> dict[str, float] | None:
    """JSON has no number that is not finite, and null stands for it here as in the metrics."""
    unlogged = state.get("unlogged")
    return unlogged and {name: math.nan if value is None else value for name, value in unlogged.items()}
