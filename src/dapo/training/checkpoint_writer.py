"""Writes checkpoints in the background: the state is copied at once, and a thread writes the copy
to the disk.
"""

import contextlib
import errno
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from urllib.error import URLError

from dapo.core.errors import DapoError
from dapo.core.files import DiskRefused
from dapo.runs.directory import RunDirectory

MAX_FAILED_SAVES = 5  # failed attempts in a row, one per step, that stop a run
_OF_OPEN_FILES = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EROFS,
        errno.EACCES,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENFILE,
    )
)
"""The errors of open files, which carry no name."""
# niceness of the writing thread, which uses the processor time that training leaves idle
WRITER_NICENESS = 19


class StorageError(DapoError):
    """The disk of the run directory is full, read-only or gone."""


class ConnectionFailed(DapoError):
    """A connection, or another process, has failed in a way that no part of the run handles."""


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread.

    Its methods are called from the thread that trains.
    """

    def __init__(self, run: RunDirectory, *, log: Callable[[str], None]) -> None:
        self._run = run
        self._log = log
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="dapo-checkpoint", initializer=_lower_thread_priority
        )
        self._pending: Future[object] | None = None
        self._step = 0
        self._failures = 0

    @property
    def has_failed(self) -> bool:
        """True if the last attempt failed, so that the state must still be saved."""
        return self._failures > 0

    def start(self, step: int, save: Callable[[], object]) -> None:
        """Call `save`, which writes a step's checkpoint, in the background after the last one.

        The data that `save` writes must not change before `join` has returned.
        """
        self.join()
        self._step, self._pending = step, self._pool.submit(save)

    def save_now(self, step: int, save: Callable[[], object]) -> None:
        """Save before returning. Raises StorageError if that fails."""
        self.join()
        try:
            save()
        except OSError as error:
            raise StorageError(self._failure(step, error)) from error
        self._failures = 0

    def poll(self) -> None:
        if self._pending is not None and self._pending.done():
            self.join()

    def join(self) -> None:
        """Wait until the checkpoint is written, and log its failure.

        Raises StorageError at the `MAX_FAILED_SAVES`-th failure in a row, and any error that is not
        an OSError.
        """
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if error is None:
            self._failures = 0
            return
        if not isinstance(error, OSError):
            raise error
        self._failures += 1
        reason = self._failure(self._step, error)
        if self._failures >= MAX_FAILED_SAVES:
            raise StorageError(f"{reason}; that was attempt {self._failures} in a row") from error
        self._log(
            f"{reason}; training continues, attempt {self._failures + 1} of {MAX_FAILED_SAVES}"
            " follows"
        )

    def _failure(self, step: int, error: OSError) -> str:
        newest = self._run.checkpoints.newest_step()
        if newest is not None:
            newest_note = f"the checkpoint of step {newest} is kept"
        else:
            newest_note = "there is no earlier one"
        return (
            f"the checkpoint of step {step} could not be written ({describe(error)}); {newest_note}"
        )


@contextmanager
def os_errors_as_dapo_errors() -> Iterator[None]:
    """Turn an OSError of the block into StorageError if it names a file, else ConnectionFailed."""
    try:
        yield
    except OSError as error:
        if is_of_files(error):
            raise StorageError(
                f"a file could not be read or written ({describe(error)}); free space there, or"
                " make it writable"
            ) from error
        raise ConnectionFailed(
            f"a connection or another process has failed ({type(error).__name__}:"
            f" {describe(error)}); what is saved stays, and the run can be resumed"
        ) from error


def is_of_files(error: OSError) -> bool:
    """Return True if a file or a disk has caused an OSError, and not a network or another process.

    ConnectionError, TimeoutError and the errors of HTTP clients are OSErrors too. An error of a
    file names it, or is one that a write to an open file gives.
    """
    if isinstance(error, DiskRefused):
        return True
    # URLError may name its address
    if isinstance(error, URLError | socket.gaierror | ssl.SSLError | ConnectionError):
        return False
    return error.filename is not None or error.errno in _OF_OPEN_FILES


def describe(error: OSError) -> str:
    """Return the system's message and the file that it names."""
    return (
        f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
    )


def _lower_thread_priority() -> None:
    if sys.platform == "linux":  # elsewhere niceness belongs to the whole process
        with contextlib.suppress(OSError):  # where a sandbox forbids it, training is only slower
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
