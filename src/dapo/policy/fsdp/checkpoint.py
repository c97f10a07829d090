"""Sharded tensors on disk: torch's distributed checkpoints in safetensors files, without pickle.

Any number of ranks, or one process, reads the files of any other number of ranks, and plain
safetensors files.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem

from dapo.core.files import DiskRefused


def write_shards(tensors: Mapping[str, Tensor], folder: Path, group: ProcessGroup) -> None:
    """Write this rank's part of `tensors` (DTensors in main memory) into `folder`.

    Every rank of `group` calls it.

    Raises OSError on every rank if one of them cannot write.
    """
    with _as_os_error(folder):
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        writer.fs = _StableFiles()
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def read_shards(path: Path, into: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Fill `into` from a file or a folder, with full tensors or, in a `group`, with DTensors.

    All ranks of a group call it.

    Raises OSError if the files cannot be read.
    """
    with _as_os_error(path), warnings.catch_warnings():
        # intended without a group
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(
            dict(into), storage_reader=_reader(path), process_group=group, no_dist=group is None
        )


def stored_like(path: Path) -> dict[str, Tensor]:
    """Return the stored names, shapes and types as tensors on the `meta` device."""
    metadata: Any = _reader(path).read_metadata().state_dict_metadata
    tensors = {}
    for name, entry in metadata.items():
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    return tensors


class _StableFiles(FileSystem):
    """Writes safetensors files whose bytes depend only on their tensors."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield stream
        if mode == "wb":
            sort_metadata(Path(path))


def sort_metadata(path: Path) -> None:
    """Sort a safetensors file's metadata by name: the library writes it in a random order."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > size:  # a shorter header can be padded with spaces
            raise DiskRefused(
                f"{path}: the header of {size} bytes grew to {len(text)} bytes when it was sorted"
            )
        file.seek(8)
        file.write(text.ljust(size))


class _OneFile(FileSystem):
    """Lists a single file as the content of a folder."""

    def ls(self, path: Any) -> list[str]:
        return [str(path)]


def _reader(path: Path) -> Any:
    reader = dcp.HuggingFaceStorageReader(str(path))
    if path.is_file():
        reader.fs = _OneFile()
    return reader


@contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Raise the first rank's error, which torch wraps in one that is not an Exception."""
    try:
        yield
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError | SafetensorError):
            raise DiskRefused(f"{path}: {cause}") from error
        raise RuntimeError(f"{path}: {type(cause).__name__}: {cause}") from error
