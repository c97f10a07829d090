"""The queries of the pages Findings, Options and Log."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dapo.analysis.view.queries import Parameters, ViewedRun
from dapo.config.load import build_config, read_options
from dapo.config.option_entries import flat_options, option_entries
from dapo.core.errors import DataError
from dapo.core.files import open_no_link
from dapo.core.text import quoted
from dapo.runs.directory import RunDirectory
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
    directory = run.files.directory
    config = run.files.config()
    raw_options = read_options(directory.config)
    preset = raw_options["preset"]
    defaults = _defaults(raw_options)
    meanings = {entry.name: entry.meaning for entry in option_entries()}
    written_names = _written_names(directory)
    rows = []
    for name, value in config.items():
        row = {
            "name": name,
            "value": value,
            "meaning": meanings.get(name, ""),
            "default": defaults.get(name),
            "written": None,
        }
        if written_names is not None:
            row["written"] = _is_written(name, written_names)
        rows.append(row)
    return {"preset": preset, "rows": rows, "changes": option_changes(directory)}


def _defaults(raw_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a run's preset by option, without those that a user must set."""
    # the preset with nothing but what every run must set
    least_options = {
        "preset": raw_options["preset"],
        "model": raw_options["model"]["name"],
        "data": {"train": raw_options["data"]["train"]},
    }
    values = flat_options(build_config(least_options))
    return {name: value for name, value in values.items() if not name.startswith(_REQUIRED)}


def _written_names(directory: RunDirectory) -> list[Any] | None:
    """Return the options that the user wrote, and those of a fork; None if nobody recorded them."""
    names = manifest_entry(directory, WRITTEN)
    if not isinstance(names, list):
        return None
    fork = Fork.of(directory)
    if fork is None:
        return names
    return [*names, *fork.changed]


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
    names = _log_names(run.files.directory)
    name = query.get("file")
    if not name and names:
        name = names[0]
    if not name:
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


def _log_names(directory: RunDirectory) -> list[str]:
    """Return the files in `logs`: the console's lines, what the verifier prints, then the others."""
    if not directory.logs.is_dir():
        return []
    entries = [entry.name for entry in os.scandir(directory.logs) if entry.is_file()]
    # a leading dot: a file that is being written
    names = sorted(name for name in entries if not name.startswith("."))
    first_names = (directory.console_log.name, directory.verifier_log.name)
    first = [name for name in first_names if name in names]
    others = [name for name in names if name not in first_names]
    return [*first, *others]
