"""A policy's state on disk, exact and without pickle: safetensors, and counters as JSON.

Each kind of tensors is one file, such as `weights.safetensors`, or a folder `weights/` if several
ranks wrote it. Every reader accepts both.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dapo.core.errors import CheckpointError
from dapo.policy.hf_io import layout_of, with_tied, write_tensors
from dapo.policy.optim import MOMENTS, MasterAdamW
from dapo.types import WeightLayout

WEIGHTS = "weights"
COUNTERS_FILE = "policy.json"
BUFFER_BYTES = 2**30
ALIGNMENT = 64
"""The size of a buffer for copies of tensors, and the multiple of bytes at which each begins. About
as much of a folder of shards is read at a time.
"""

ReadTensors: TypeAlias = Callable[[Path, str, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Returns this process's tensors of a kind like `like`, from `(checkpoint, kind, like)`."""


class State(NamedTuple):
    """The content of a policy's checkpoint."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Tensors by kind and name: the master weights, and AdamW's moments after the first update."""
    counters: Mapping[str, Any]  # the rest of the state


def state_of(optimizer: MasterAdamW) -> State:
    """Return the current state. Its tensors are the optimizer's; later updates change them."""
    counters: dict[str, Any] = {
        "num_updates": optimizer.num_updates,
        "skipped_in_a_row": optimizer.skipped_in_a_row,
        "tied": optimizer.tied,
    }
    if optimizer.lora is not None:
        counters["lora"] = dict(optimizer.lora)
    return State({WEIGHTS: optimizer.master_weights, **optimizer.moments()}, counters)


class StateCopy:
    """A copy of the state in main memory, for writing a checkpoint while training continues.

    It takes about as much memory as the state itself, 12 bytes per parameter in float32. The memory
    is reused for the next checkpoint: copying into allocated memory is four times as fast. Tensors
    share buffers, because torch rounds the size of page-locked memory up to a power of two, and
    that of most weights nearly doubles.
    """

    def __init__(self) -> None:
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)  # what is left of the last one

    def take(self, state: State) -> State:
        """Copy `state`, over the previous copy."""
        copies = {kind: self._copies.setdefault(kind, {}) for kind in state.tensors}
        num_missing = 0
        for kind, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                if name not in copies[kind]:
                    num_missing += tensor.nbytes
        for kind, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                if name not in copies[kind]:
                    copies[kind][name] = self._allocate(tensor, num_missing)
                    num_missing -= tensor.nbytes
                copies[kind][name].copy_(tensor.detach())
        return state._replace(tensors=copies)

    def _allocate(self, like: Tensor, num_missing: int) -> Tensor:
        """Return memory for a tensor; `num_missing` bytes remain to be allocated with it."""
        size = like.nbytes
        if not size:
            return torch.empty(like.shape, dtype=like.dtype)
        if size > len(self._buffer):
            useful = min(BUFFER_BYTES, 2 ** (num_missing.bit_length() - 1))
            num_bytes = max(2 ** (size - 1).bit_length(), useful)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=like.is_cuda)
        memory = self._buffer[:size]
        self._buffer = self._buffer[-(-size // ALIGNMENT) * ALIGNMENT :]
        # by NumPy: a storage of this size, for torch's writer of shards copies a tensor of a larger
        # one
        return torch.from_numpy(memory.numpy()).view(like.dtype).view(like.shape)


def write_state(directory: Path, state: State) -> None:
    """Write a state into an existing `directory`. Raises OSError if writing fails."""
    for kind, tensors in state.tensors.items():
        write_tensors(tensors, directory / f"{kind}.safetensors")
    write_counters(directory, state.counters)


def write_counters(directory: Path, counters: Mapping[str, Any]) -> None:
    """Write a state's counters."""
    (directory / COUNTERS_FILE).write_text(json.dumps(counters, indent=2) + "\n", encoding="utf-8")


def read_tensors(directory: Path, kind: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read all tensors of a kind.

    Args:
        directory: the checkpoint.
        kind: such as `weights`.
        like: tensors with the names, shapes and types that the stored ones must have.

    Raises:
        CheckpointError: the tensors cannot be read, or differ from `like`.
    """
    path = stored_at(directory, kind)
    with as_checkpoint_error(path):
        tensors = _read_folder(path) if path.is_dir() else load_file(path)
    require_same(path, tensors, like)
    return tensors


def load_optimizer(
    optimizer: MasterAdamW, directory: Path, read: ReadTensors = read_tensors
) -> None:
    """Restore a state, saved by any number of ranks, bit for bit.

    Args:
        optimizer: gets the state, as does its model.
        directory: the checkpoint.
        read: returns this process's tensors of a kind.

    Raises:
        CheckpointError: files are missing or unreadable, or hold another model or type.
    """
    counters = read_counters(directory)
    saved = counters.get("lora")
    if saved != optimizer.lora:
        raise CheckpointError(
            f"{directory} was saved with model.lora={_format_lora(saved)}, but here model.lora="
            f"{_format_lora(optimizer.lora)}; resume with the saved value"
        )
    weights = read(directory, WEIGHTS, optimizer.master_weights)
    num_updates = counters["num_updates"]
    skipped = counters["skipped_in_a_row"]
    moments = {}
    # before the first update there are none
    if num_updates:
        moments = {kind: read(directory, kind, optimizer.master_weights) for kind in MOMENTS}
    optimizer.restore(weights, moments, num_updates=num_updates, skipped_in_a_row=skipped)


def copy_weights(checkpoint: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write a checkpoint's weights into `folder` in a `dtype`; shards and adapters keep theirs.

    The optimizer's state, the critic and the reference are left out. Raises CheckpointError.
    """
    path = stored_at(checkpoint, WEIGHTS)
    # links, not copies: nothing writes into a finished checkpoint
    if path.is_dir():
        shutil.copytree(path, folder / path.name, copy_function=os.link)
    elif read_counters(checkpoint).get("lora"):
        os.link(path, folder / path.name)
    else:
        with as_checkpoint_error(path):
            tensors = load_file(path)
        rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        write_tensors(rounded, folder / path.name)


class SavedWeights:
    """The trained weights of a saved policy as a `WeightSource`, read one at a time."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        counters = read_counters(self._directory)
        self._tied = counters["tied"]
        self.lora: dict[str, float] | None = counters.get("lora")
        """Rank and alpha if only adapters were trained (see `policy.lora.saved_weights`)."""

    def layout(self) -> WeightLayout:
        return layout_of(dict(self._stored()), self._tied)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every trained weight by its Hugging Face name, tied ones under each name."""
        return with_tied(self._stored(), self._tied)

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        path = stored_at(self._directory, WEIGHTS)
        with as_checkpoint_error(path):
            if path.is_dir():
                for part in _parts_of_folder(path):
                    yield from part.items()
            else:
                with safe_open(path, framework="pt") as file:
                    names = list(file.keys())
                for name in names:
                    # opened for each: what was read of a file stays mapped until it is closed
                    with safe_open(path, framework="pt") as file:
                        tensor = file.get_tensor(name)
                    yield name, tensor
                    del tensor  # before the next is read


def stored_at(directory: Path, kind: str) -> Path:
    """Return the path of the file or folder with the tensors of a kind."""
    folder = directory / kind
    return folder if folder.is_dir() else directory / f"{kind}.safetensors"


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turn an error of reading `path` into a CheckpointError."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, FileNotFoundError) and not path.parent.exists():
            raise CheckpointError(
                f"{path.parent} is gone: a run that trains keeps only its newest checkpoints;"
                " repeat the command, which then reads the newest one"
            ) from error
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def require_same(path: Path, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless names, shapes and types agree."""
    differing = sorted(tensors.keys() ^ like.keys())
    if differing:
        raise CheckpointError(
            f"{path} holds another model: {len(differing)} names differ, the first is"
            f" {differing[0]}"
        )
    for name, expected in like.items():
        tensor = tensors[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise CheckpointError(
                f"{path} holds another model: {name} is {tensor.dtype} {list(tensor.shape)} in the"
                f" checkpoint and {expected.dtype} {list(expected.shape)} here; resume with the"
                " saved model and model.dtype"
            )


def read_counters(directory: Path) -> dict[str, Any]:
    """Return the counters of a saved policy. Raises CheckpointError."""
    path = directory / COUNTERS_FILE
    with as_checkpoint_error(path):
        return json.loads(path.read_text(encoding="utf-8"))


def _read_folder(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for part in _parts_of_folder(path):
        tensors |= part
    return tensors


def _parts_of_folder(path: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors that several ranks wrote, about BUFFER_BYTES at a time."""
    # imports torch.distributed, which few runs need
    from dapo.policy.fsdp.checkpoint import read_shards, stored_like

    part: dict[str, Tensor] = {}
    for name, like in stored_like(path).items():
        part[name] = torch.empty(like.shape, dtype=like.dtype)
        if sum(tensor.nbytes for tensor in part.values()) >= BUFFER_BYTES:
            read_shards(path, part)
            yield part
            part = {}
    if part:
        read_shards(path, part)
        yield part


def _format_lora(lora: Mapping[str, float] | None) -> str:
    if lora is None:
        return "none"
    entries = ", ".join(f"{name}: {value:g}" for name, value in lora.items())
    return f"{{{entries}}}"
