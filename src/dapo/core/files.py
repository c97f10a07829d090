"""Writes files whole or not at all, and never through a link; checksums; standard JSON."""

import errno
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dapo.core.terminal import to_json

CHUNK_BYTES = 2**25
"""Bytes of one read; large, because a background thread holds the interpreter between two chunks."""


def crc32_of(path: Path) -> str:
    """The CRC-32 of a file in eight hexadecimal digits: it finds accidents at 2.8 GiB/s (SHA-256: 0.3)."""
    crc, chunk = 0, memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(chunk):
            crc = zlib.crc32(chunk[:size], crc)
    return f"{crc:08x}"


def reserve(descriptor: int, size: int) -> None:
    """Give a new file its size and, except on macOS, reserve its disk space."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


PRIVATE, SHARED = 0o600, 0o666
"""Modes of new files: for the user alone, or as the umask says."""


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, with missing ones above it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def atomic_file(path: Path, mode: int = SHARED) -> Iterator[Path]:
    """Yield a temporary path, which is flushed to disk and renamed to `path` when the block ends.

    Creates missing directories. If the block raises, `path` is unchanged. If `path` is a link, the link is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write has no file name
    finally:
        temporary.unlink(missing_ok=True)


def open_no_link(
    path: str | Path, mode: str, *, buffering: int = -1, encoding: str | None = None, permissions: int = SHARED
) -> IO[Any]:
    """Open a file like `open`, but raise OSError for a link; a new file gets these `permissions`."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, permissions)

    try:
        return open(path, mode, buffering=buffering, encoding=encoding, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and dapo does not follow links here", str(path)) from None
        raise


def cache_folder() -> Path:
    """The folder of files that dapo can rebuild, `$DAPO_CACHE` or `~/.cache/dapo`; it may not exist."""
    return Path(os.environ.get("DAPO_CACHE") or Path.home() / ".cache" / "dapo")


def remove(path: Path) -> None:
    """Remove a directory with its content, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Flush a file's content or a directory's names to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Read the value in a JSON file. Raises OSError, or ValueError for invalid JSON."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file and flush it to disk; a crash leaves the old file or the new one."""
    with atomic_file(Path(path)) as temporary:
        # a tokenizer may decode half of a surrogate pair, which UTF-8 cannot encode
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def atomic_write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON like `atomic_write_text`; numbers that are not finite become null."""
    atomic_write_text(path, to_json(value, indent=2) + "\n")
