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
from dapo.training.prefetched_batch import read_prefetched_batch, write_prefetched_batch
from dapo.training.state import Run, TrainState

STATE_FILE = "state.json"
PROBLEM_STATS_FILE = "problems.json"
"""Of a checkpoint, and as of the newest one in the run directory."""


def save_when_due(config: Config, run: Run, train_state: TrainState) -> None:
    """Have a checkpoint written beside training after every `save_every`-th step, and again where one failed."""
    run.checkpoints.settle()
    every = config.train.save_every
    is_due = bool(every and train_state.step % every == 0) or run.checkpoints.has_failed
    if is_due and train_state.step < config.train.num_steps:
        run.tracker.phase("save")
        run.checkpoints.settle(wait=True)  # the snapshot takes the place of the one before
        write = run.policy.snapshot()
        run.checkpoints.start(train_state.step, checkpoint_of(config, run, train_state, write))
        train_state.is_saved = True


def save_now(config: Config, run: Run, train_state: TrainState) -> None:
    """See the last finished step to the disk. Raises StorageError if that fails."""
    run.tracker.phase("save")
    run.checkpoints.settle(wait=True)
    if train_state.is_saved and not run.checkpoints.has_failed:
        return
    run.checkpoints.save_now(train_state.step, checkpoint_of(config, run, train_state, run.policy.save))
    train_state.is_saved = True


def checkpoint_of(
    config: Config, run: Run, train_state: TrainState, write_policy: Callable[[Path], None]
) -> Callable[[], Path]:
    """What writes a checkpoint of the state as it is now; the policy's part comes from `write_policy`."""
    state: dict[str, Any] = {
        "train_state": train_state.state_dict(),
        "stream": run.stream.state_dict(),
        "sampler": run.sampler.state_dict(),
    }
    if train_state.unlogged is not None:
        state["unlogged"] = train_state.unlogged
    problem_stats, prefetched_batch = run.problem_stats.state_dict(), train_state.prefetched_batch
    save = partial(run.directory.save_checkpoint, accuracy=train_state.accuracy, keep_best=True)
    step = train_state.step

    def write(directory: Path) -> None:
        write_policy(directory)
        atomic_write_json(directory / STATE_FILE, state)
        atomic_write_json(directory / PROBLEM_STATS_FILE, problem_stats)
        if prefetched_batch is not None:
            write_prefetched_batch(directory, prefetched_batch)

    def save_all() -> Path:
        path = save(step, write, config.train.keep_checkpoints)
        atomic_write_json(run.directory.path / PROBLEM_STATS_FILE, problem_stats)
        return path

    return save_all


def save_after_failure(config: Config, run: Run, train_state: TrainState, error: DapoError | OSError) -> None:
    """Save what is worth it and whole, and tell from where the run will continue.

    A step that broke off between its updates leaves a policy that no step of the run ever had: it is not saved, and
    neither are weights that are not finite, or lost with the processes that held them.
    """
    log = run.tracker.message
    try:
        if not train_state.is_consistent:
            log(f"step {train_state.step + 1} broke off in the middle of its updates; nothing of it is kept")
        if train_state.is_consistent and not train_state.is_new and not isinstance(error, StorageError | TrainerLost):
            save_now(config, run, train_state)
        else:
            run.checkpoints.settle(wait=True)  # what comes next may clear up where it is still at work
    except (StorageError, NumericsError, TrainerLost) as another:
        if str(another) != str(error):
            log(str(another))
    newest = run.directory.newest_step()
    saved = "nothing is saved yet" if newest is None else f"saved: step {newest} of {config.train.num_steps}"
    log(f"{saved}; continue with: dapo resume {shlex.quote(str(run.directory.path))}")


def restore(run: Run, checkpoint: Path) -> TrainState:
    """Put policy, stream and sampler back to a checkpoint's state; what it holds of the next step comes along."""
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    run.policy.load(checkpoint)
    run.stream.load_state_dict(state["stream"])
    run.sampler.load_state_dict(state["sampler"])
    if (problem_stats := checkpoint / PROBLEM_STATS_FILE).exists():  # runs of an earlier version kept none
        run.problem_stats.load_state_dict(json.loads(problem_stats.read_text(encoding="utf-8")))
        # a kill may have come between the checkpoint and the run's own copy
        atomic_write_json(run.directory.path / PROBLEM_STATS_FILE, run.problem_stats.state_dict())
    prefetched_batch = read_prefetched_batch(checkpoint, run.stream)
    return TrainState(
        **state["train_state"], unlogged=_unlogged(state), prefetched_batch=prefetched_batch, is_saved=True
    )


def is_logged(checkpoint: Path) -> bool:
    """Whether the metrics of a checkpoint's step were written before it was."""
    return _unlogged(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))) is None


def _unlogged(state: Mapping[str, Any]) -> dict[str, float] | None:
    """JSON has no number that is not finite, and null stands for it here as in the metrics."""
    unlogged = state.get("unlogged")
    return unlogged and {name: math.nan if value is None else value for name, value in unlogged.items()}
