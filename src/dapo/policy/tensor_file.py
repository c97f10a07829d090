"""Writes tensors in the safetensors format past the page cache, with their checksum, for little processor time.

A checkpoint is written beside training, on the processors that train. The library's writer leaves the bytes to the
page cache, from where the kernel copies them once more, and they have to be read again for a checksum: for 1.6 GB that
is 4 seconds of processor time, and here it is 1. What is written is read with the library.
"""

import errno
import fcntl
import json
import mmap
import os
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dapo.core.files import write_checksum_sidecar

_BLOCK_BYTES = 4096
_CHUNK_BYTES = 1 << 23
_HEADER_ALIGNMENT = 8
_MAX_THROTTLE_S = 0.25
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, throttle: float = 0.0) -> None:
    """Write a safetensors file, on disk when this returns, with a note of its checksum. Raises OSError.

    `throttle`: pauses after every piece, as a multiple of the time that it took, for whoever writes beside other work.
    """
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with _DirectFile(path, throttle) as file:
        file.write(np.frombuffer(_header(dense), dtype=np.uint8))
        for tensor in dense.values():
            file.write(tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8))
    write_checksum_sidecar(path, file.crc32)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Eight bytes of length, then what lies where as JSON, filled up with spaces."""
    entries, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class _DirectFile:
    """Collects bytes into whole blocks and hands them to the disk, where it takes them so; counts their checksum."""

    def __init__(self, path: Path, throttle: float) -> None:
        self._path, self._throttle = path, throttle
        self._memory = mmap.mmap(-1, _CHUNK_BYTES)  # begins with a page, as the disk wants it
        self._chunk = np.frombuffer(self._memory, dtype=np.uint8)
        self._filled = self._written = 0
        self.crc32 = 0
        self._handle = _open_direct(path)

    def write(self, content: np.ndarray) -> None:
        """Append bytes. Copying and checksums leave Python to other threads."""
        start = 0
        while start < len(content):
            count = min(_CHUNK_BYTES - self._filled, len(content) - start)
            np.copyto(self._chunk[self._filled : self._filled + count], content[start : start + count])
            self._filled += count
            start += count
            if self._filled == _CHUNK_BYTES:
                self._flush()

    def __enter__(self) -> "_DirectFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                os.ftruncate(self._handle, self._written)
                os.fsync(self._handle)
        except OSError as error:
            raise self._named(error) from error
        finally:
            os.close(self._handle)

    def _flush(self) -> None:
        """Write what there is, in whole blocks: the last one's end is cut off afterwards."""
        started = time.monotonic()
        view = memoryview(self._memory)
        self.crc32 = zlib.crc32(view[: self._filled], self.crc32)
        end, done = self._filled + -self._filled % _BLOCK_BYTES, 0
        try:
            while done < end:
                done += self._write(view[done:end])
        except OSError as error:
            raise self._named(error) from error
        self._written += self._filled
        self._filled = 0
        time.sleep(min(self._throttle * (time.monotonic() - started), _MAX_THROTTLE_S))

    def _write(self, content: memoryview) -> int:
        try:
            return os.write(self._handle, content)
        except OSError as error:
            # a limit in the middle of a block is not told as such before the page cache comes in
            if error.errno != errno.EINVAL or not _leave_direct(self._handle):
                raise
            return os.write(self._handle, content)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if sys.platform == "linux":
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system with nothing but the page cache
                raise
    return os.open(path, flags, 0o644)


def _leave_direct(handle: int) -> bool:
    """Through the page cache from now on; False where that was so already."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    if sys.platform != "linux" or not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
