"""Writes files whole or not at all, and never through a link; checksums; standard JSON."""

import errno
import json
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dapo.core.errors import DataError
from dapo.core.terminal import to_json
from dapo.core.text import one_line, shorten

CHUNK_BYTES = 2**25
"""Bytes of one read; large, because a background thread holds the interpreter between two chunks.
"""
FAULTS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""The errors that a damaged file may cause while its values are read and used."""
MAX_BYTES = 2**28
"""The largest file that `read_regular` takes into memory by default."""


class DiskRefused(OSError):
    """A disk refused a file, in words of another process or library without an error number."""


def crc32_of(path: Path) -> str:
    """Return a file's CRC-32 as eight hexadecimal digits, which finds accidents at 2.8 GiB/s."""
    crc = 0
    chunk = memoryview(bytearray(min(CHUNK_BYTES, path.stat().st_size + 1)))
    with open(path, "rb", buffering=0, opener=_open_regular) as file:
        while size := file.readinto(chunk):
            crc = zlib.crc32(chunk[:size], crc)
    return f"{crc:08x}"


def reserve(descriptor: int, size: int) -> None:
    """Give a new file its size and, except on macOS, reserve its disk space."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


PRIVATE = 0o600
SHARED = 0o666
"""Modes of new files: for the user alone, or as the umask says."""


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, with missing ones above it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def atomic_file(path: Path, mode: int = SHARED) -> Iterator[Path]:
    """Yield a temporary path, which is flushed to disk and renamed to `path` when the block ends.

    Creates missing directories. If the block raises, `path` is unchanged. If `path` is a link, the
    link is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # beside the file: a rename is atomic within a file system
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)  # the new name is in the folder
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        # a failed write has no file name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def open_no_link(
    path: str | Path,
    mode: str,
    *,
    buffering: int = -1,
    encoding: str | None = None,
    permissions: int = SHARED,
) -> IO[Any]:
    """Open a regular file like `open`.

    Args:
        path: the file.
        mode: as for `open`, like the two after it.
        buffering: the size of the buffer.
        encoding: the encoding of a text file.
        permissions: those of a new file.

    Raises:
        OSError: it is a link or a pipe, or cannot be opened.
    """

    def opener(path: str, flags: int) -> int:
        return _open_regular(path, flags | os.O_NOFOLLOW, permissions)

    try:
        return open(path, mode, buffering=buffering, encoding=encoding, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise OSError(
                errno.ELOOP, "it is a link, and dapo does not follow links here", str(path)
            ) from None
        raise


def append_line(file: IO[bytes], line: str) -> None:
    """Append a line to an unbuffered file, or nothing and raise OSError, as on a full disk."""
    size = os.fstat(file.fileno()).st_size
    remaining = (line + "\n").encode()
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        file.truncate(size)
        raise OSError(error.errno, error.strerror, file.name) from error


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a file, or the one that a link leads to, for reading.

    Raises OSError if that is not a regular file.
    """
    return open(path, "rb", opener=_open_regular)


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES, follow: bool = True) -> bytes:
    """Read a regular file.

    Raises OSError for anything else, for a larger file, and with `follow=False` for a link.
    """
    with open_regular(path) if follow else open_no_link(path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= max_bytes:
            # one more than allowed: the file may grow meanwhile, and some of /proc have size 0
            content = file.read(max_bytes + 1)
            if len(content) <= max_bytes:
                return bytes(content)
    raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))


@contextmanager
def damage_of(path: str | Path, *further_faults: type[Exception]) -> Iterator[None]:
    """Turn FAULTS and `further_faults` in the block into a DataError about a damaged or missing
    file.
    """
    try:
        yield
    except BrokenPipeError:  # of the output
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except FAULTS + further_faults as error:
        # without the path, which the message begins with
        strerror = error.strerror if isinstance(error, OSError) else None
        reason = strerror or one_line(str(error)) or type(error).__name__
        raise DataError(f"{path} is damaged: {shorten(reason, 200)}") from error


def _open_regular(path: str, flags: int, permissions: int = SHARED) -> int:
    # without O_NONBLOCK, opening a pipe waits for its other end
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, permissions)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def cache_folder() -> Path:
    """Return the folder of rebuildable files: `$DAPO_CACHE` or `~/.cache/dapo`, maybe absent."""
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


def read_json(path: Path, *, follow: bool = True) -> Any:
    """Read the value in a JSON file with `read_regular`.

    Raises OSError, or ValueError for invalid JSON.
    """
    try:
        return json.loads(read_regular(path, follow=follow))
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
