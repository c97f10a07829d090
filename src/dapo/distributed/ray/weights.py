"""Weights between machines: the chunks of a weights file as objects in Ray's object store, fetched once per node.

The processes of a node share one file in its shared memory: the first to need a version writes it from the chunks,
and the last to read it removes it. The object store holds a version only while it is fetched.
"""

import contextlib
import fcntl
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dapo.core.errors import EngineError
from dapo.distributed.weight_files import PIECE_BYTES, WeightsFile, shared_folder, write_chunks

PREFIX = "dapo-node-weights-"
CHUNK_BYTES = 4 * PIECE_BYTES  # the largest size of an object in the store


class RayWeights:
    """Published weights on the controller, converted when first needed to a form that a worker can read."""

    def __init__(self, file: WeightsFile, *, timeout_s: float) -> None:
        self._file, self._timeout_s = file, timeout_s
        self._sent: Callable[[], WeightsObject | None] = lambda: None

    @property
    def version(self) -> int:
        return self._file.version

    def open(self) -> contextlib.AbstractContextManager[WeightsFile]:
        return self._file.open()

    def for_worker(self, *, reads_files: bool) -> "WeightsFile | WeightsObject":
        """The file, or its chunks, which the object store keeps while the result exists. Raises EngineError."""
        if reads_files:
            return self._file
        if (sent := self._sent()) is None:
            name = f"{PREFIX}{self._file.path.parent.name}-{self._file.path.name}"
            sent = WeightsObject(_put(self._file), name, self._file.path.stat().st_size, self.version, self._timeout_s)
            self._sent = weakref.ref(sent)
        return sent


@dataclass(frozen=True)
class WeightsObject:
    """A version's weights in the object store."""

    chunks: tuple[Any, ...]  # ObjectRefs: the content of a weights file, in order
    name: str  # of the file that a node keeps while its processes read it
    size: int  # of that file, in bytes
    version: int
    timeout_s: float

    @contextlib.contextmanager
    def open(self) -> Iterator[WeightsFile]:
        """Fetch the weights unless they are on this node, whose processes can read the path. Raises EngineError."""
        with (
            shared_file(private_folder(shared_folder()) / self.name, self._fetch) as path,
            WeightsFile(path, self.version).open() as weights,
        ):
            yield weights

    def _fetch(self, path: Path) -> None:
        import ray

        try:
            chunks = (memoryview(ray.get(chunk, timeout=self.timeout_s)) for chunk in self.chunks)
            write_chunks(path, chunks, size=self.size)
        except ray.exceptions.RayError as error:
            late = f"the weights of version {self.version} did not arrive within {self.timeout_s:g} s"
            raise EngineError(f"{late}: {error}") from error


def private_folder(parent: Path) -> Path:
    """This user's folder, which no other user may enter. Raises EngineError if it is not private."""
    folder = parent / f"{PREFIX}{os.getuid()}"
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineError(f"weights are not written to {folder}, which other users may enter: remove it")
    return folder


@contextlib.contextmanager
def shared_file(path: Path, write: Callable[[Path], None]) -> Iterator[Path]:
    """A file that processes of this machine share: the first calls `write`, the last to leave removes it.

    Users of the file hold a shared lock, which the system frees when a process ends. Abandoned files are removed when
    the next one is written.
    """
    name = path.with_suffix(".lock")
    while not (_is_same(lock := _open_locked(name, fcntl.LOCK_SH), name) and path.exists()):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_same(lock, name) and not path.exists():
                for other in set(path.parent.glob(f"{PREFIX}*.lock")) - {name}:
                    _remove_unused(other)
                write(path)
        finally:
            os.close(lock)
    try:
        yield path
    finally:
        os.close(lock)
        _remove_unused(name)


def _open_locked(name: Path, kind: int) -> int:
    lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, kind)
    return lock


def _is_same(lock: int, name: Path) -> bool:
    """Whether the lock still has its name: another process may have removed it before it was locked here."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), name.stat())
    return False


def _remove_unused(name: Path) -> None:
    """Remove a lock and its file, unless a process uses them or they are another user's."""
    with contextlib.suppress(OSError):
        lock = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(lock, name):
                name.with_suffix(".tmp").unlink(missing_ok=True)
                name.with_suffix(".safetensors").unlink(missing_ok=True)
                name.unlink()
        finally:
            os.close(lock)


def _put(weights: WeightsFile) -> tuple[Any, ...]:
    import ray

    with weights.open():
        content = np.memmap(weights.path, dtype=np.uint8, mode="r")  # mapped, not read
    try:
        return tuple(ray.put(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES))
    except ray.exceptions.RayError as error:
        raise EngineError(f"the weights do not fit into Ray's object store: {error}") from error
