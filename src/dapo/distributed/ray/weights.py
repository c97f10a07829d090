"""Weights between machines: a version's tensors as one object in Ray's object store, fetched once per node."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from dapo.core.errors import EngineError
from dapo.distributed.weight_files import WeightsFile, stored_names


class RayWeights:
    """A version as the controller holds it; each worker is sent the form that it can read, made when first needed."""

    def __init__(self, file: WeightsFile, *, timeout_s: float) -> None:
        self._file, self._timeout_s = file, timeout_s
        self._object: WeightsObject | None = None

    @property
    def version(self) -> int:
        return self._file.version

    def open(self) -> WeightsFile:
        return self._file.open()

    def for_worker(self, *, reads_files: bool) -> "WeightsFile | WeightsObject":
        """The file itself, or the object store for a worker on another machine. Raises EngineError if it is gone."""
        if reads_files:
            return self._file
        if self._object is None:
            self._object = WeightsObject(_put(self._file.open()), self.version, self._timeout_s)
        return self._object

    def forget(self) -> None:
        self._object = None


@dataclass(frozen=True)
class WeightsObject:
    """A version's weights in the object store."""

    reference: Any  # the ObjectRef of a StoredWeights
    version: int
    timeout_s: float

    def open(self) -> "StoredWeights":
        """Fetch the weights to this node. Raises EngineError if they are gone or do not arrive in time."""
        import ray

        try:
            stored: StoredWeights = ray.get(self.reference, timeout=self.timeout_s)
        except ray.exceptions.RayError as error:
            late = f"the weights of version {self.version} did not come within {self.timeout_s:g} s"
            raise EngineError(f"{late}: {error}") from error
        return stored


class StoredTensor(NamedTuple):
    """A tensor's bytes as an array, which Ray stores without pickling it; NumPy has no bfloat16."""

    data: "np.ndarray[Any, np.dtype[np.uint8]]"
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class StoredWeights:
    """Weights whose arrays lie in the node's object store, read-only: one tensor at a time is copied out of it."""

    tensors: Mapping[str, StoredTensor]
    names: Mapping[str, str]  # every weight's name -> the name in `tensors`; tied weights are stored once

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, stored in self.names.items():
            data, dtype, shape = self.tensors[stored]
            yield name, torch.from_numpy(data.copy()).view(dtype).reshape(shape)


def _put(source: WeightsFile) -> Any:
    import ray

    with safe_open(source.path, framework="pt") as file:
        names = stored_names(file)
        tensors = {}
        for stored in dict.fromkeys(names.values()):
            tensor = file.get_tensor(stored)  # mapped, not read
            tensors[stored] = StoredTensor(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)
        try:
            return ray.put(StoredWeights(tensors, names))
        except ray.exceptions.RayError as error:
            raise EngineError(f"the weights do not fit into Ray's object store: {error}") from error
