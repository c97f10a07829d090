"""Writes, reads and truncates metrics.jsonl, the records of a run by step. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from dapo.core.errors import DataError
from dapo.core.files import append_line, atomic_file, open_no_link, open_regular
from dapo.core.terminal import to_json
from dapo.core.text import quoted

MAX_STEP = 10**9 - 1
"""The largest number of a step in a file or a file's name."""
_MAX_LINE_BYTES = 2**22


class JsonlSink:
    """Appends one readable line `{"step": 12, "reward/mean": 0.5, ...}` per call.

    Keys keep their order. Infinity and NaN, which JSON lacks, are written as null.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_no_link(path, "ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, or nothing and raise OSError, for example if the disk is full."""
        append_line(self._file, to_json({"step": step, **metrics}))

    def close(self) -> None:
        self._file.close()


def metrics_by_step(path: str | Path) -> dict[int, dict[str, Any]]:
    """Read the metrics of each step, merging the lines of a step; empty without a file."""
    rows: dict[int, dict[str, Any]] = {}
    if not Path(path).exists():
        return rows
    for record in read_metrics(path):
        rows.setdefault(record["step"], {}).update(record)
    return rows


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, oldest first, except a last one that is being written.

    Raises DataError if the file is missing or a line is not an object with a "step".
    """
    return [record for _, record in _records(Path(path))]


def truncate_after(path: str | Path, step: int) -> None:
    """Remove the lines of later steps and a torn last line, which a resumed run writes again.

    The file is replaced atomically. A missing file stays missing.
    """
    path = Path(path)
    if not path.exists():
        return
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        for line, record in _records(path):
            if record["step"] <= step:
                file.write(line)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines of a metrics file, each with its record."""
    try:
        lines = open_regular(path)
    except FileNotFoundError:
        raise DataError(
            f"no metrics file {path}; expected the metrics.jsonl of a run directory"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    with lines:
        # read in parts: a foreign file may be one line of gigabytes
        parts = iter(lambda: lines.readline(_MAX_LINE_BYTES), b"")
        for number, line in enumerate(parts, start=1):
            if len(line) == _MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number}: expected at most {_MAX_LINE_BYTES:,} bytes; remove the"
                    " line"
                )
            if not line.endswith(b"\n"):
                return  # the writer has not finished this line, or was killed
            yield line, _record(line, f"{path}, line {number}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line; numbers that are not finite become None.

    Raises DataError for anything that no run writes.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    is_step = False
    if isinstance(record, dict):
        step = record.get("step")
        is_step = type(step) is int and 0 <= step <= MAX_STEP
    if not isinstance(record, dict) or not is_step:
        raise DataError(
            f'{where}: expected an object with a "step", got {line[:80]!r}; remove the line'
        )
    for name, value in record.items():
        if isinstance(value, float) and not isfinite(value):
            record[name] = None
        elif not (
            value is None
            or isinstance(value, float)
            or (isinstance(value, int) and abs(value) < 2**63)
        ):
            raise DataError(
                f"{where}: {quoted(name)} must be a number, got {quoted(value)}; remove the line"
            )
    return record
