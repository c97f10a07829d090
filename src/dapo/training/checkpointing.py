"""Saves a run's state in checkpoints, when due or after a failure, and restores a run from one."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo.core.errors import (
    CheckpointError,
    DapoError,
    NumericsError,
    OutOfMemory,
    ShortfallError,
    TrainerLost,
)
from dapo.core.files import atomic_write_json
from dapo.core.waiting import Interrupted
from dapo.runs.checkpoints import PROBLEM_STATS_FILE
from dapo.runs.manifest import PROVENANCE_FILE
from dapo.sampling.continuous import ContinuousSampling, Kept, restore_kept
from dapo.sampling.problem_stats import read_problem_stats, write_problem_stats
from dapo.sampling.saved_groups import SavedGroups, read_groups, write_groups
from dapo.training.checkpoint_writer import StorageError
from dapo.training.saved_state import MAY_RESTART, STATE_FILE, pending_metrics_of, read_state
from dapo.training.signals import StoppedByCallback
from dapo.training.state import Run, TrainState


def save_if_due(run: Run) -> None:
    """Start a checkpoint after every `train.save_every`-th step, and again after a failed one."""
    config = run.config
    state = run.state
    run.checkpoints.poll()
    every = config.train.save_every
    is_due = bool(every and state.step % every == 0) or run.checkpoints.has_failed
    if is_due and not run.is_complete:
        with run.phase("save"):
            run.checkpoints.join()  # the new snapshot replaces the one that is being written
            run.checkpoints.start(state.step, checkpoint_of(run, run.policy.snapshot()))
        state.is_saved = True


def save_now(run: Run) -> None:
    """Write the last finished step to the disk before returning.

    Raises StorageError if that fails.
    """
    with run.phase("save"):
        run.checkpoints.join()
        if not run.state.is_saved or run.checkpoints.has_failed:
            run.checkpoints.save_now(run.state.step, checkpoint_of(run, run.policy.save))
            run.state.is_saved = True


def checkpoint_of(run: Run, write_policy: Callable[[Path], None]) -> Callable[[], Path]:
    """Return a function that writes a checkpoint of the present state by `write_policy`."""
    config = run.config
    directory = run.directory
    state = run.state
    counts: dict[str, Any] = {
        "train_state": state.state_dict(),
        "stream": run.sampling.stream.state_dict(),
        "sampler": run.sampling.sampler.state_dict(),
        "judging": config.reward.judging,
    }
    if state.pending_metrics is not None:
        counts["pending_metrics"] = state.pending_metrics
    step = state.step
    accuracy = state.accuracy
    problem_stats = run.problem_stats.table()
    kept = run.sampling.kept if isinstance(run.sampling, ContinuousSampling) else Kept()
    groups = SavedGroups(state.prefetched_batch, kept)

    def write(folder: Path) -> None:
        write_policy(folder)
        atomic_write_json(folder / STATE_FILE, counts)
        write_problem_stats(folder / PROBLEM_STATS_FILE, problem_stats)
        if run.provenance:
            atomic_write_json(folder / PROVENANCE_FILE, run.provenance)
        write_groups(folder, groups)

    def save() -> Path:
        path = directory.checkpoints.save(
            step, write, config.train.kept_in_training, accuracy=accuracy
        )
        write_problem_stats(directory.problem_stats, problem_stats)
        return path

    return save


def save_after_failure(run: Run, error: DapoError | OSError) -> None:
    """Save the last finished step if possible, and log where the run will continue.

    A step that ended between its updates leaves a policy that belongs to no step: it is not saved.
    Neither are weights that are not finite, or that were lost with their processes.
    """
    log = run.tracker.message
    state = run.state
    try:
        if not state.is_consistent:
            log(f"step {state.step + 1} ended between its updates; it is discarded")
        if (
            state.is_consistent
            and not state.is_new
            and not isinstance(error, StorageError | TrainerLost)
        ):
            save_now(run)
        else:
            run.checkpoints.join()  # a resuming process removes half-written checkpoints
    except (StorageError, NumericsError, TrainerLost) as another:
        if str(another) != str(error):
            log(str(another))
    newest = run.directory.checkpoints.newest_step()
    if newest is None:
        saved = "nothing is saved yet"
    else:
        saved = f"saved: step {newest} of {run.config.train.num_steps}"
    resume = f"dapo resume {shlex.quote(str(run.directory.path))}"
    if isinstance(error, Interrupted) and not run.names_continuation:
        return
    if isinstance(error, StoppedByCallback):
        saved = f"stopped: {error}; {saved}"
    if isinstance(error, ShortfallError | OutOfMemory):  # a step is a function of the options
        log(f"{saved}; with the same options the step would fail again: {resume} OPTION=VALUE")
    else:
        log(f"{saved}; continue with: {resume}")


def restore(run: Run, checkpoint: Path) -> None:
    """Restore a run to the state of a checkpoint, with a prefetched batch if it has one."""
    state = read_state(checkpoint)
    run.policy.load(checkpoint)
    _restore_stream(run, state["stream"])
    is_same_verifier = state.get("judging") == run.config.reward.judging
    run.sampling.sampler.load_state_dict(
        state["sampler"] | ({} if is_same_verifier else {"errors": []})
    )
    try:
        run.problem_stats = read_problem_stats(checkpoint / PROBLEM_STATS_FILE)
    except DapoError as error:
        older = "a checkpoint of an older development version has none: start a new run"
        raise CheckpointError(f"{error}; {older}") from None
    # a kill may have come between the checkpoint and the copy in the run directory
    write_problem_stats(run.directory.problem_stats, run.problem_stats.table())
    pending = pending_metrics_of(state)
    groups = read_groups(checkpoint, run.sampling.stream)
    restore_kept(run.sampling, groups.kept)
    run.state = TrainState(
        **state["train_state"],
        pending_metrics=pending,
        prefetched_batch=groups.prefetched,
        is_saved=True,
    )


def _restore_stream(run: Run, state: Mapping[str, int]) -> None:
    """Restore the position in the training problems; a fork with fewer or more begins them anew."""
    stream = run.sampling.stream
    size = state.get("size", len(stream))
    if state.get(MAY_RESTART) and size != len(stream):
        run.tracker.message(
            f"the fork has {len(stream)} training problems, and its parent had {size}: the stream"
            " starts at its first problem"
        )
        return
    stream.load_state_dict(state)
