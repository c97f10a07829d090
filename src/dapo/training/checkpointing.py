"""When a run's state is saved, what belongs to it, and how it is put back."""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dapo.training.prefetched_batch import read_ahead, write_ahead
from dapo.config.options import Config
from dapo.core.errors import DapoError, NumericsError, TrainerLost
from dapo.training.state import Parts, Progress
from dapo.training.run_directory import atomic_write_json
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dapo.core.errors import DapoError
from dapo.training.run_directory import RunDirectory


MAX_FAILED_SAVES = 5
"""Attempts in a row, one a step, after which a run that cannot save stops."""

# Of a processor that training wants the writer gets next to nothing, and it takes what training leaves idle.
WRITER_NICENESS = 19


class StorageError(DapoError):
    """The disk of the run directory cannot be written: full, read-only, gone."""


class CheckpointWriter:
    """Writes one checkpoint at a time. Made, asked and waited for in one thread, the one that trains."""

    def __init__(self, run: RunDirectory, *, tell: Callable[[str], None]) -> None:
        self._run, self._tell = run, tell
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None
        self._failures = 0

    @property
    def has_failed(self) -> bool:
        """The newest attempt that has ended did not succeed: the state is still to be saved."""
        return self._failures > 0

    def start(self, step: int, save: Callable[[], object]) -> None:
        """Begin with the checkpoint of a step, which `save` writes, once the one before is done.

        `save` runs in another thread: what it reads must not change before `settle(wait=True)` has returned.
        """
        self.settle(wait=True)
        self._step = step
        self._thread = threading.Thread(target=self._work, args=(save,), name="dapo-checkpoint")
        self._thread.start()

    def save_now(self, step: int, save: Callable[[], object]) -> None:
        """Save while the caller waits. Raises StorageError if that fails."""
        self.settle(wait=True)
        try:
            save()
        except OSError as error:
            raise StorageError(self._failure(step, error)) from error
        self._failures = 0

    def settle(self, *, wait: bool = False) -> None:
        """Look how the checkpoint at work fared, or wait for it; if it failed, say so.

        Raises StorageError at the `MAX_FAILED_SAVES`-th failure in a row, and whatever is no fault of the disk.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            self._failures = 0
        elif isinstance(error, OSError):
            self._count_failure(error)
        else:
            raise error

    def _work(self, save: Callable[[], object]) -> None:
        _yield_the_processor()
        try:
            save()
        except BaseException as error:  # raised, or told, where the run looks for it
            self._error = error

    def _count_failure(self, error: OSError) -> None:
        self._failures += 1
        reason = self._failure(self._step, error)
        if self._failures >= MAX_FAILED_SAVES:
            raise StorageError(f"{reason}; that was attempt {self._failures} in a row") from error
        self._tell(f"{reason}; training goes on, attempt {self._failures + 1} of {MAX_FAILED_SAVES} follows")

    def _failure(self, step: int, error: OSError) -> str:
        newest = self._run.newest_step()
        kept = f"the one of step {newest} is kept" if newest is not None else "there is none before it"
        return f"the checkpoint of step {step} could not be written ({describe(error)}); {kept}"


@contextmanager
def disk_errors_in_words() -> Iterator[None]:
    """An OSError from inside becomes a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"a file could not be read or written ({describe(error)}); make room there, or make it writable"
        ) from error


def describe(error: OSError) -> str:
    """What the system said, and of which file."""
    return f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)


def _yield_the_processor() -> None:
    if sys.platform == "linux":  # elsewhere niceness belongs to the whole process
        with contextlib.suppress(OSError):  # a sandbox may forbid it: then it is only slower
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


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
