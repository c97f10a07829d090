"""A policy's state on disk: weights and AdamW's moments as safetensors, counters as JSON; exact, and no pickle."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dapo.errors import CheckpointError
from dapo.policy.optim import MasterAdamW
from dapo.policy.tensor_file import write_tensors

WEIGHTS_FILE = "weights.safetensors"
COUNTERS_FILE = "policy.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_optimizer(optimizer: MasterAdamW, directory: Path) -> None:
    """Write master weights, moments and counters into `directory`, which exists, and see them to the disk.

    Raises OSError where that fails, as on a full disk.
    """
    _write(directory, _tensors(optimizer), _counters(optimizer))


class OptimizerCopy:
    """A copy of an optimiser's state in main memory, from which a checkpoint is written while training goes on.

    It takes as much memory as the state itself, 12 bytes a parameter in float32, and keeps it from one checkpoint to
    the next: into memory that is already there the copy is made four times as fast.
    """

    def __init__(self, optimizer: MasterAdamW) -> None:
        self._optimizer = optimizer
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self) -> Callable[[Path], None]:
        """Copy the state as it is now; the result does with the copy what `save_optimizer` does, in any thread.

        The next `take` overwrites the copy.
        """
        copied = {
            file: {name: self._copy((file, name), tensor) for name, tensor in tensors.items()}
            for file, tensors in _tensors(self._optimizer).items()
        }
        return partial(_write, tensors=copied, counters=_counters(self._optimizer))

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach())


def load_optimizer(optimizer: MasterAdamW, directory: Path) -> None:
    """Put `optimizer` and its model into the state that `save_optimizer` wrote: bit for bit.

    Raises CheckpointError where files are missing or unreadable, or hold another model or type.
    """
    counters = _read_counters(directory)
    weights = _read_tensors(directory / WEIGHTS_FILE, optimizer.masters)
    # moments of a policy that was never updated are empty, and are not looked at
    moments = {}
    if counters["num_updates"]:
        moments = {kind: _read_tensors(directory / f"{kind}.safetensors", optimizer.masters) for kind in MOMENTS}
    optimizer.restore(
        weights, moments, num_updates=counters["num_updates"], skipped_in_a_row=counters["skipped_in_a_row"]
    )


class SavedWeights:
    """The weights of a saved policy as a WeightSource, read one at a time."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._tied = _read_counters(self._directory)["tied"]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name, tied ones under each of their names."""
        path = self._directory / WEIGHTS_FILE
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    yield name, file.get_tensor(name)
                for name, stored in self._tied.items():
                    yield name, file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_counters(directory: Path) -> dict[str, Any]:
    path = directory / COUNTERS_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_tensors(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, which must have the names, shapes and types of `like`."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if differing := sorted(tensors.keys() ^ like.keys()):
        raise CheckpointError(f"{path} is of another model: {len(differing)} names differ, {differing[0]} first")
    for name, expected in like.items():
        found = tensors[name]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise CheckpointError(
                f"{path} is of another model: {name} is {found.dtype} {list(found.shape)} there and "
                f"{expected.dtype} {list(expected.shape)} here; resume with the model and model.dtype it was saved with"
            )
    return tensors


def _tensors(optimizer: MasterAdamW) -> dict[str, Mapping[str, Tensor]]:
    """What is saved, by file name."""
    return {WEIGHTS_FILE: optimizer.masters} | {f"{kind}.safetensors": v for kind, v in optimizer.moments().items()}


def _counters(optimizer: MasterAdamW) -> dict[str, Any]:
    return {
        "num_updates": optimizer.num_updates,
        "skipped_in_a_row": optimizer.skipped_in_a_row,
        "tied": optimizer.tied,
    }


def _write(directory: Path, tensors: Mapping[str, Mapping[str, Tensor]], counters: Mapping[str, Any]) -> None:
    for file, values in tensors.items():
        path = directory / file
        write_tensors(path, values)
    path = directory / COUNTERS_FILE
    path.write_text(json.dumps(counters, indent=2) + "\n", encoding="utf-8")
    _to_disk(path)


def _to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
