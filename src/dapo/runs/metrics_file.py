"""Writes, reads and truncates metrics.jsonl, the records of a run by step. Imports no torch."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo.core.errors import DataError
from dapo.core.files import atomic_file, open_no_link
from dapo.core.terminal import to_json


class JsonlSink:
    """Appends one line `{"step": 12, "reward/mean": 0.5, ...}` per call, readable as soon as it is logged.

    Keys keep their order. Infinity and NaN, which JSON lacks, are written as null.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_no_link(path, "ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, or nothing and raise OSError, for example if the disk is full."""
        line = (to_json({"step": step, **metrics}) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(before)
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        self._file.close()


def metrics_by_step(path: str | Path) -> dict[int, dict[str, Any]]:
    """Read the metrics of each step, merging several lines of a step; empty if there is no file yet."""
    rows: dict[int, dict[str, Any]] = {}
    for record in read_metrics(path) if Path(path).exists() else []:
        rows.setdefault(record["step"], {}).update(record)
    return rows


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read all lines of a metrics file, oldest first, without a last line that is still being written.

    Raises DataError if the file is missing or a line is not an object with a "step".
    """
    return [record for _, record in _records(Path(path))]


def truncate_after(path: str | Path, step: int) -> None:
    """Remove the lines of later steps and an incomplete last line, so that a resumed run writes them again.

    The file is replaced atomically. A missing file stays missing.
    """
    path = Path(path)
    if not path.exists():
        return
    with atomic_file(path) as temporary, open(temporary, "wb") as kept:
        for line, record in _records(path):
            if record["step"] <= step:
                kept.write(line)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.is_file():
        raise DataError(f"no metrics file {path}; expected the metrics.jsonl of a run directory")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # the writer has not finished this line, or was killed
            try:
                record = json.loads(line)
                is_step = isinstance(record, dict) and isinstance(record.get("step"), int)
            except (ValueError, RecursionError):
                is_step = False
            if not is_step:
                raise DataError(
                    f'{path}, line {number}: expected an object with a "step", got {line[:80]!r}; remove the line'
                )
            yield line, record
