"""What a worker is given by every launcher: the path it imports from, and a log whose end is told when it dies."""

import os
from collections.abc import Mapping
from pathlib import Path

import dapo

LOG_TAIL_LINES = 5
LOG_TAIL_BYTES = 16384


def import_path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH of a worker: this package first, wherever it was installed, then the worker's own and the user's."""
    ours = str(Path(dapo.__file__).parents[1])
    given = [environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    return os.pathsep.join([ours, *filter(None, given)])


def log_tail(log: Path) -> str:
    """`; the last of LOG: ...`, or nothing where there is nothing to read."""
    try:
        with open(log, "rb") as file:
            file.seek(-min(LOG_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return f"; the last of {log}: {' | '.join(lines[-LOG_TAIL_LINES:])}" if lines else ""
