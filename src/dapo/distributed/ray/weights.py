"""Weights between machines: a version's safetensors file as one object in Ray's object store, fetched once a node."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from dapo.core.errors import EngineError
from dapo.distributed.weight_files import TIED_KEY, VERSION_KEY, WeightsFile

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
# safetensors' names
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class RayWeights:
    """A version as the controller holds it; each worker is sent the form that it can read, made when first needed."""

    def __init__(self, file: WeightsFile, *, timeout_s: float) -> None:
        self._file = file
        self._timeout_s = timeout_s
        self._object: WeightsObject | None = None

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._file.version

    def open(self) -> WeightsFile:
        """See WeightsHandle; on the controller's machine."""
        return self._file.open()

    def for_worker(self, *, reads_files: bool) -> "WeightsFile | WeightsObject":
        """The file itself, or the object store for a worker on another machine. Raises EngineError if it is gone."""
        if reads_files:
            return self._file
        if self._object is None:
            data = np.asarray(np.memmap(self._file.open().path, dtype=np.uint8, mode="r"))
            self._object = WeightsObject(_put(data), self.version, self._timeout_s)
        return self._object

    def forget(self) -> None:
        """Let the object store drop it."""
        self._object = None


@dataclass(frozen=True)
class WeightsObject:
    """A version's weights in the object store."""

    reference: Any
    """ObjectRef."""
    version: int
    timeout_s: float

    def open(self) -> "SafetensorsBytes":
        """Fetch them to this node. Raises EngineError where they are gone, late, or not of this version."""
        import ray

        try:
            data = ray.get(self.reference, timeout=self.timeout_s)
        except ray.exceptions.RayError as error:
            raise EngineError(
                f"the weights of version {self.version} did not come within {self.timeout_s:g} s: {error}"
            ) from error
        weights = SafetensorsBytes(data)
        if (found := weights.metadata.get(VERSION_KEY)) != str(self.version):
            raise EngineError(f"the object store holds weights of version {found}, expected {self.version}")
        return weights


class SafetensorsBytes:
    """A safetensors file in memory that nobody may write to; one tensor at a time is copied out of it."""

    def __init__(self, data: Bytes) -> None:
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries: dict[str, dict[str, Any]] = header
        self._data = data[8 + length :]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightsFile."""
        for name in self._entries:
            yield name, self._tensor(name)
        for pair in self.metadata.get(TIED_KEY, "").split():
            name, stored = pair.split("=", 1)
            yield name, self._tensor(stored)

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        if start == end:
            return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        return torch.from_numpy(self._data[start:end].copy()).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _put(data: Bytes) -> Any:
    import ray

    try:
        return ray.put(data)
    except ray.exceptions.RayError as error:
        raise EngineError(f"the weights do not fit into Ray's object store: {error}") from error
