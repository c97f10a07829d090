"""Captures the output of worker processes and moves it into a file of the run; ends of logs."""

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

from dapo.core.files import PRIVATE, make_private_folder, open_no_link
from dapo.core.terminal import print_text

MAX_LOG_BYTES = 10 * 2**20
LOG_TAIL_LINES = 5
LOG_TAIL_BYTES = 16384
_CHUNK = 1 << 20
_DROPPED = b"\n[%015d bytes more are not kept]\n"
_COUNT = re.compile(rb"\n\[(\d{15}) bytes more are not kept\]\n")


class WorkerOutput:
    """A temporary file to which all processes of a pool append, limited by their supervisors."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  close() closes it
        self._moved = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def move_to(self, path: Path) -> bytes:
        """Append new output to the file at `path`, which counts what it drops, and return it.

        Raises OSError if the file cannot be written.
        """
        new = self._read()
        if not new:
            return b""
        make_private_folder(path.parent)
        open_no_link(path, "ab", permissions=PRIVATE).close()
        with open_no_link(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_DROPPED % 0)))
            counted = _COUNT.fullmatch(file.read())
            end = size - len(counted[0]) if counted else size
            new_part = b"" if counted else new[: max(0, MAX_LOG_BYTES - end)]
            dropped = int(counted[1] if counted else 0) + len(new) - len(new_part)
            file.seek(end)
            file.write(new_part + (_DROPPED % dropped if dropped else b""))
        return new

    def close(self) -> None:
        """Print the output that was not moved to the standard error."""
        if self._file.closed:
            return
        if remainder := self._read():
            with contextlib.suppress(OSError):
                print_text(remainder.decode(errors="replace"), file=sys.stderr, end="")
        self._file.close()

    def _read(self) -> bytes:
        """Return the output since the last call, by pread, as processes share the position."""
        parts = []
        while part := os.pread(self._file.fileno(), _CHUNK, self._moved):
            self._moved += len(part)
            parts.append(part)
        return b"".join(parts)


def log_tail(log: Path) -> str:
    """Return `; log tail of LOG: LINE | LINE`, or nothing if there is no log to read."""
    try:
        with open(log, "rb") as file:
            file.seek(-min(LOG_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return f"; log tail of {log}: {' | '.join(lines[-LOG_TAIL_LINES:])}" if lines else ""
