"""Weights between machines: a file's content in Ray's object store, fetched once per node.

A process that needs a version writes it to its machine's shared memory, for itself and its
children.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dapo.core.errors import EngineError
from dapo.distributed.weight_files import WeightsFile, WeightsFolder, write_chunks


@dataclass
class RayWeights:
    """Published weights: a file, or its content for a process that does not see the file."""

    file: WeightsFile
    timeout_s: float
    content: Any = None  # an ObjectRef
    _sent: "Callable[[], RayWeights | None]" = field(default=lambda: None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayWeights, (self.file, self.timeout_s, self.content)

    @property
    def version(self) -> int:
        return self.file.version

    def for_worker(self, *, reads_files: bool) -> "WeightsFile | RayWeights":
        """Return the form that a worker can read, which keeps the content in the object store.

        Raises EngineError.
        """
        if reads_files:
            return self.file
        if (sent := self._sent()) is None:
            sent = replace(self, content=_put(self.file))
            self._sent = weakref.ref(sent)
        return sent

    @contextlib.contextmanager
    def open(self) -> Iterator[WeightsFile]:
        """Give the weights; fetched ones are in a file of this process, which ends with the block.

        Raises EngineError.
        """
        with contextlib.closing(WeightsFolder()) as folder:
            file = self.file
            if self.content is not None:
                file = WeightsFile(folder.path_of(self.version), self.version)
                content = _get(self.content, self.version, self.timeout_s)
                write_chunks(file.path, [content], size=len(content))
            with file.open() as weights:
                yield weights


def _get(content: Any, version: int, timeout_s: float) -> memoryview:
    import ray

    try:
        return memoryview(ray.get(content, timeout=timeout_s))
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"the weights of version {version} did not arrive within {timeout_s:g} s: {error}"
        ) from error


def _put(weights: WeightsFile) -> Any:
    import ray

    with weights.open():
        content = np.memmap(weights.path, dtype=np.uint8, mode="r")  # mapped, not read
    try:
        return ray.put(np.asarray(content))
    except ray.exceptions.RayError as error:
        raise EngineError(f"the weights do not fit into Ray's object store: {error}") from error
