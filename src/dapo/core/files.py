"""Checksums of files: counted by reading, or noted by the one who wrote and counted along."""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK_BYTES = 2**25
"""Large, because between two chunks a writer of low priority holds the interpreter, and training waits for it."""
_SIDECAR_SUFFIX = ".crc32"


def crc32_of(path: Path) -> str:
    """Against accidents, which is what there is to guard against; 2.8 GiB/s where SHA-256 makes 0.3."""
    crc, chunk = 0, memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(chunk):
            crc = zlib.crc32(chunk[:size], crc)
    return f"{crc:08x}"


def write_checksum_sidecar(path: Path, crc: int) -> None:
    """Leave the checksum of a file that is whole and on the disk beside it, for whoever seals the checkpoint."""
    _sidecar(path).write_text(f"{crc:08x}", encoding="ascii")


def pop_checksum_sidecar(path: Path) -> str | None:
    """The checksum that was noted for a file, if one was; the note is removed."""
    sidecar = _sidecar(path)
    if not sidecar.exists():
        return None
    crc = sidecar.read_text(encoding="ascii")
    sidecar.unlink()
    return crc


def is_checksum_sidecar(path: Path) -> bool:
    """Is this a note and no file of its own?"""
    return path.suffix == _SIDECAR_SUFFIX


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + _SIDECAR_SUFFIX)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path; once the block ends its content is on disk and takes the name `path`, all or nothing.

    Missing directories are made. If the block raises, `path` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a write that fails does not say where
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that every reader takes: numbers that are not finite become null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a whole UTF-8 file, on disk when this returns; a crash leaves the old file or the new one."""
    with atomic_file(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def atomic_write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON like `atomic_write_text`; numbers that are not finite become null."""
    atomic_write_text(path, to_json(value, indent=2) + "\n")
