"""The queries of the pages Findings, Options and Log."""

import os
from collections.abc import Sequence
from typing import Any

from dapo.analysis.view.queries import Parameters, ViewedRun
from dapo.config.load import build_config, read_options
from dapo.config.option_entries import flat_options, option_entries
from dapo.core.errors import DataError
from dapo.core.files import open_no_link
from dapo.core.text import quoted
from dapo.runs.manifest import WRITTEN, Fork, manifest_entry
from dapo.runs.stored_config import option_changes

MAX_LOG_BYTES = 200_000
_REQUIRED = ("model.name", "data.train")  # options without a default, with those inside them


def findings(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return the findings of `dapo doctor`. Raises DataError for damaged metrics."""
    from dapo.analysis.doctor import diagnose

    return diagnose(run.files.directory.path).to_json()


def options(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return every option with its value, default and meaning, and the changes on resume.

    `written` is True for those that the user wrote, in a file, a command, a call or a fork; None
    for all in a run that does not record them.
    """
    config = run.files.config()
    raw = read_options(run.files.directory.config)
    required = {name for name in config if name.startswith(_REQUIRED)}
    least = {
        "preset": raw["preset"],
        "model": raw["model"]["name"],
        "data": {"train": raw["data"]["train"]},
    }
    defaults = flat_options(build_config(least))
    meanings = {entry.name: entry.meaning for entry in option_entries()}
    written = manifest_entry(run.files.directory, WRITTEN)
    fork = Fork.of(run.files.directory)
    if isinstance(written, list) and fork is not None:
        written = [*written, *fork.changed]
    rows = []
    for name, value in config.items():
        row = {
            "name": name,
            "value": value,
            "meaning": meanings.get(name, ""),
            "default": None if name in required else defaults.get(name),
            "written": _is_written(name, written) if isinstance(written, list) else None,
        }
        rows.append(row)
    return {"preset": raw["preset"], "rows": rows, "changes": option_changes(run.files.directory)}


def _is_written(name: str, written: Sequence[Any]) -> bool:
    """Return True if an option was written, or the section that it is in, or a part of it."""
    return any(
        name == other or name.startswith(f"{other}.") or str(other).startswith(f"{name}.")
        for other in written
    )


def log(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return the end of a file in `logs`, by default the console's.

    Raises DataError for an unknown name.
    """
    folder = run.files.directory.logs
    first = (run.files.directory.console_log.name, run.files.directory.verifier_log.name)
    names = []
    if folder.is_dir():
        entries = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        # a leading dot: a file that is being written
        names = sorted(name for name in entries if not name.startswith("."))
    # the console's lines, then what the verifier prints, then the other processes
    names.sort(key=lambda name: first.index(name) if name in first else len(first))
    name = query.get("file") or next(iter(names), None)
    if name is None:
        return {"files": [], "file": None, "text": "", "left_out": 0}
    if name not in names:
        listing = ", ".join(names) or "none"
        raise DataError(f"{folder} has no file {quoted(name)}; it has {listing}")
    with open_no_link(folder / name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        left_out = max(0, size - MAX_LOG_BYTES)
        file.seek(left_out)
        text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    return {"files": names, "file": name, "text": text, "left_out": left_out}
