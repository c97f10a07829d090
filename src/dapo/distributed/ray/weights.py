"""Weights between machines: the chunks of a weights file as objects in Ray's object store, fetched once per node.

A process that needs a version writes it from the chunks to its machine's shared memory, for itself and its children.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.core.errors import EngineError
from dapo.distributed.weight_files import PIECE_BYTES, WeightsFile, WeightsFolder, write_chunks

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
            sent = WeightsObject(_put(self._file), self._file.path.stat().st_size, self.version, self._timeout_s)
            self._sent = weakref.ref(sent)
        return sent


@dataclass(frozen=True)
class WeightsObject:
    """A version's weights in the object store."""

    chunks: tuple[Any, ...]  # ObjectRefs: the content of a weights file, in order
    size: int  # of that file, in bytes
    version: int
    timeout_s: float

    @contextlib.contextmanager
    def open(self) -> Iterator[WeightsFile]:
        """Fetch the weights into a file of this process, which is removed after the block. Raises EngineError."""
        import ray

        with contextlib.closing(WeightsFolder()) as folder:
            path = folder.path_of(self.version)
            ray.wait(list(self.chunks), num_returns=len(self.chunks), timeout=0)  # fetches all of them ahead
            try:
                chunks = (memoryview(ray.get(chunk, timeout=self.timeout_s)) for chunk in self.chunks)
                write_chunks(path, chunks, size=self.size)
            except ray.exceptions.RayError as error:
                late = f"the weights of version {self.version} did not arrive within {self.timeout_s:g} s"
                raise EngineError(f"{late}: {error}") from error
            with WeightsFile(path, self.version).open() as weights:
                yield weights


def _put(weights: WeightsFile) -> tuple[Any, ...]:
    import ray

    with weights.open():
        content = np.memmap(weights.path, dtype=np.uint8, mode="r")  # mapped, not read
    try:
        return tuple(ray.put(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES))
    except ray.exceptions.RayError as error:
        raise EngineError(f"the weights do not fit into Ray's object store: {error}") from error
