"""Files of a run, written by the functions with which the package writes them, for tests that need
no training.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dapo.config import load_config
from dapo.config.load import dump_config
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import JsonlSink
from helpers.paths import TINY


def new_run(path: Path) -> RunDirectory:
    """A run of configs/tiny.yaml that has written nothing but its options and its manifest."""
    return RunDirectory.create(path, dump_config(load_config(TINY)), {})


def log_metrics(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records, each with its `step`, to a file of metrics."""
    sink = JsonlSink(path)
    for record in records:
        sink.log(record["step"], {name: value for name, value in record.items() if name != "step"})
    sink.close()


def append_bytes(path: Path, damage: bytes) -> None:
    """Append to a file of metrics: a part of a line, as a killed process leaves it, or nonsense."""
    with open(path, "ab") as file:
        file.write(damage)


def edit_options(run: Path, old: str, new: str) -> None:
    """Replace text in the options of a run, as a user may."""
    config = run / "config.yaml"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
