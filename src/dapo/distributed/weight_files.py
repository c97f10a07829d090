"""Weights between processes of one machine: one safetensors file per version in shared memory."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dapo.core.errors import EngineError
from dapo.core.files import reserve
from dapo.engines.engine import WeightSource
from dapo.types import WeightLayout

METADATA = "__metadata__"
TYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""The names of types in a safetensors header."""
_TYPES = {code: dtype for dtype, code in TYPE_CODES.items()}
PIECE_BYTES = 2**26  # the largest copy at a time between a device, main memory and another machine
VERSION_KEY = "version"
TIED_KEY = "tied"
PREFIX = "dapo-weights-"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class WeightsFile:
    """A version's weights in a safetensors file: a WeightSource, and its own handle."""

    path: Path
    version: int

    @contextlib.contextmanager
    def open(self) -> "Iterator[WeightsFile]":
        """Give the file itself. Raises EngineError unless it exists and holds this version."""
        try:
            with safe_open(self.path, framework="pt") as file:
                version = (file.metadata() or {}).get(VERSION_KEY)
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"the weights of version {self.version} cannot be read: {error}"
            ) from error
        if version != str(self.version):
            raise EngineError(
                f"{self.path} holds weights of version {version}, expected {self.version}"
            )
        yield self

    def layout(self) -> WeightLayout:
        """Names, types and shapes, read from the header alone."""
        with safe_open(self.path, framework="pt") as file:
            tensors = {}
            for name in file.offset_keys():
                entry = file.get_slice(name)
                dtype = _TYPES[entry.get_dtype()]
                tensors[name] = str(dtype).removeprefix("torch."), tuple(entry.get_shape())
            pairs = (file.metadata() or {}).get(TIED_KEY, "").split()
            return WeightLayout(tensors, dict(pair.split("=", 1) for pair in pairs))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name, mapped from the file."""
        layout = self.layout()
        with safe_open(self.path, framework="pt") as file:
            for name in layout.tensors:
                yield name, file.get_tensor(name)
            for name, source in layout.tied.items():
                yield name, file.get_tensor(source)


@dataclass(frozen=True)
class RankWeights(WeightsFile):
    """The weights of a trainer group: `send` is called on all ranks, `export` writes a file.

    `export` returns None once an update has been requested, which makes other weights of them.
    """

    send: Callable[..., list[Any]]
    export: Callable[[], Any]


class WeightsFolder:
    """A private folder in shared memory, if there is any, that keeps the last two versions.

    It is made when it is first used, and again if it is used after `close`.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        # with the handle of its lock
        self._folder: tuple[tempfile.TemporaryDirectory[str], int] | None = None
        self._versions: list[Path] = []

    @property
    def path(self) -> Path:
        """Return the folder. A process that sees its random name can read its files."""
        if self._folder is None:
            shared = (
                SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
            )
            parent = self._parent or shared
            _remove_abandoned(parent)
            folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
            self._folder = folder, _locked(Path(folder.name))
        return Path(self._folder[0].name)

    def write(self, weights: WeightSource, version: int) -> WeightsFile:
        """Write a version; weights that are already in shared memory are returned unchanged."""
        if isinstance(weights, WeightsFile):
            return weights
        path = self.path_of(version)
        write_weights(path, weights, version)
        torch.cuda.empty_cache()  # an engine may wake on the GPU of a policy in this process
        return self.keep(path, version)

    def path_of(self, version: int) -> Path:
        """Return the file to which a version is written, by this process or another."""
        return self.path / f"version_{version}.safetensors"

    def keep(self, path: Path, version: int) -> WeightsFile:
        """Register a version that has been written, and remove all but the last two."""
        if path not in self._versions:
            self._versions.append(path)
        for old in self._versions[:-2]:
            old.unlink(missing_ok=True)
        self._versions = self._versions[-2:]
        return WeightsFile(path, version)

    def close(self) -> None:
        if self._folder is not None:
            self._folder[0].cleanup()
            os.close(self._folder[1])
            self._folder = None
            self._versions = []


def write_weights(path: Path, weights: WeightSource, version: int) -> None:
    """Write a complete file under another name, tensor by tensor, then rename it to `path`.

    Raises EngineError.
    """
    layout = weights.layout()
    header, starts = file_header(layout, version)
    size = len(header) + sum(_num_bytes(layout, name) for name in layout.tensors)
    with _new_file(path, size=size) as file:
        file.write(header)
        for start, piece in host_pieces(
            (starts[name], tensor) for name, tensor in stored_tensors(weights, layout)
        ):
            file.seek(start)
            file.write(piece)


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview], *, size: int) -> None:
    """Write a weights file of `size` bytes from chunks. Raises EngineError."""
    with _new_file(path, size=size) as file:
        num_bytes = sum(file.write(chunk) for chunk in chunks)
        if num_bytes != size:
            raise EngineError(f"{path}: received {num_bytes} bytes of weights, expected {size}")


@contextlib.contextmanager
def _new_file(path: Path, *, size: int) -> Iterator[IO[bytes]]:
    """Give a file with reserved memory, which gets its name at the end of the block."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            reserve(file.fileno(), size)
            yield file
        os.replace(temporary, path)
    except OSError as error:
        gib = size / 2**30
        raise EngineError(
            f"the weights ({gib:.2f} GiB) cannot be published: {path.parent}: {error}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def file_header(layout: WeightLayout, version: int) -> tuple[bytes, dict[str, int]]:
    """Return a weights file's header, and each weight's position, aligned: wide types first."""
    tied = " ".join(f"{name}={source}" for name, source in layout.tied.items())
    entries: dict[str, Any] = {METADATA: {VERSION_KEY: str(version), TIED_KEY: tied}}
    end = 0
    starts = dict[str, int]()
    for name in sorted(layout.tensors, key=lambda name: -_dtype(layout, name).itemsize):
        start = end
        end = end + _num_bytes(layout, name)
        code = TYPE_CODES[_dtype(layout, name)]
        shape = layout.tensors[name][1]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
        starts[name] = start
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def stored_tensors(weights: WeightSource, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield each stored weight once, in the layout's order.

    Raises EngineError where a source differs from its layout.
    """
    expected = iter(layout.tensors.items())
    for name, tensor in weights.named_tensors():
        if name in layout.tied:
            continue
        entry = name, (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        expected_entry = next(expected, None)
        if entry != expected_entry:
            raise EngineError(
                f"the weights differ from their layout: expected {expected_entry}, got {entry}"
            )
        yield name, tensor.detach()
    absent_entry = next(expected, None)
    if absent_entry is not None:
        raise EngineError(f"the weights differ from their layout: {absent_entry} is missing")


def host_pieces(
    tensors: Iterable[tuple[int, Tensor]], *, staging: Sequence[Tensor] | None = None
) -> Iterator[tuple[int, memoryview]]:
    """Return the bytes of tensors, with each first byte's position, in pieces in main memory.

    A tensor in main memory is not copied. A tensor on a device is copied in pieces through two
    pinned buffers: one piece is used while the next is copied. A piece is valid until the next one
    is requested, and a tensor may be freed then. With `staging`, two byte buffers, all pieces are
    copied, and have at most their size instead of `PIECE_BYTES`.
    """
    waiting: tuple[int, Tensor, Callable[[], None]] | None = None
    index = 0
    for start, tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        if staging is None and flat.device.type != "cpu":
            staging = [
                torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
        size = PIECE_BYTES if staging is None else len(staging[0])
        for offset in range(0, len(flat), size):
            piece = flat[offset : offset + size]
            following = start + offset, *_host_copy(piece, staging, index)
            index += 1
            if waiting is not None:
                yield _finished(*waiting)
            waiting = following
    if waiting is not None:
        yield _finished(*waiting)


def _host_copy(
    piece: Tensor, staging: Sequence[Tensor] | None, index: int
) -> tuple[Tensor, Callable[[], None]]:
    """Return the piece in main memory, and a function that waits for it."""
    if staging is None:
        return piece, lambda: None
    target = staging[index % 2][: len(piece)].copy_(piece, non_blocking=True)
    if piece.device.type == "cpu":
        return target, lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(piece.device))
    return target, event.synchronize


def _finished(start: int, piece: Tensor, wait: Callable[[], None]) -> tuple[int, memoryview]:
    wait()
    return start, piece.numpy().data


def _dtype(layout: WeightLayout, name: str) -> torch.dtype:
    dtype = getattr(torch, layout.tensors[name][0])
    if dtype not in TYPE_CODES:
        type_names = ", ".join(str(type_).removeprefix("torch.") for type_ in TYPE_CODES)
        raise EngineError(
            f"{name} is of type {layout.tensors[name][0]}, which engines do not take"
            f" ({type_names} are)"
        )
    return dtype


def _num_bytes(layout: WeightLayout, name: str) -> int:
    return math.prod(layout.tensors[name][1]) * _dtype(layout, name).itemsize


def _locked(folder: Path) -> int:
    """Lock the folder while its owner lives: the system frees the lock when the process ends."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_abandoned(parent: Path) -> None:
    """Remove folders whose owner was killed: they would fill the shared memory."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or being created or removed
            handle = os.open(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
