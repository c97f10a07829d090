"""The queries of the pages Findings, Options and Log."""

import os
from typing import Any

from dapo.analysis.view.queries import Parameters, ViewedRun
from dapo.config.load import build_config, read_options
from dapo.config.option_entries import flat_options, option_entries
from dapo.core.errors import DataError
from dapo.core.files import open_no_link
from dapo.core.text import quoted
from dapo.runs.stored_config import option_changes

MAX_LOG_BYTES = 200_000
_REQUIRED = ("model.name", "data.train")  # options without a default, with those inside them


def findings(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return the findings of `dapo doctor`. Raises DataError for damaged metrics."""
    from dapo.analysis.doctor import diagnose

    return diagnose(run.files.directory.path).to_json()


def options(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return every option with its value, default and meaning, and the changes on resume."""
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
    rows = []
    for name, value in config.items():
        row = {
            "name": name,
            "value": value,
            "meaning": meanings.get(name, ""),
            "default": None if name in required else defaults.get(name),
        }
        rows.append(row)
    return {"preset": raw["preset"], "rows": rows, "changes": option_changes(run.files.directory)}


def log(run: ViewedRun, query: Parameters) -> dict[str, Any]:
    """Return the end of a file in `logs`, by default the verifier's.

    Raises DataError for an unknown name.
    """
    folder = run.files.directory.logs
    verifier = run.files.directory.verifier_log.name
    names = []
    if folder.is_dir():
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    default = next(iter(names), None)
    if verifier in names:
        default = verifier
    name = query.get("file") or default
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
