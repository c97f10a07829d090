"""Loads the options of an existing run, and finds its data and modules. Imports no torch."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dapo.config import Config, load_config
from dapo.core.errors import ConfigError, DataError, RewardError
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import manifest_entry

CODE_FOLDER = "code"
"""Folder of a run directory with the modules of a run that was started from Python."""
DATA_FOLDER = "data"
"""Folder of a run directory with the rows of such a run."""
OWN_FOLDERS = (CODE_FOLDER, DATA_FOLDER)


def load_run_config(run: RunDirectory, overrides: Sequence[str] = ()) -> Config:
    """Load the options of a run; relative paths and modules are resolved in the folder where it was started.

    Files missing there, and the paths of `overrides`, are resolved in the current folder. Files and modules in the run
    directory are found after it was moved. Raises ConfigError.
    """
    own, made_in = load_config(run.config), manifest_entry(run, "run_dir")
    started_in = _started_in(run)
    folder = started_in if started_in is not None and started_in.is_dir() else None
    extend_import_path(run)
    there = []
    for key, path in own.data.paths.items():
        found = (started_in or Path.cwd()) / path
        if isinstance(made_in, str) and found.is_relative_to(made_in):
            moved = run.path.absolute() / found.relative_to(made_in)
            found = moved if moved.is_file() else found
        if found.is_file():
            there.append(f"{key}={json.dumps(str(found))}")
    if folder is not None and (folder / own.model.name).is_dir():
        there.append(f"model.name={json.dumps(str(folder / own.model.name))}")
    return load_config(run.config, [*there, *overrides])


def extend_import_path(run: RunDirectory) -> None:
    """Let this process and its verifier processes import the modules of a run.

    They are in the run directory, in the folder where it was started, and in the recorded module folders.
    """
    more = manifest_entry(run, "module_folders")
    folders = [run.path / CODE_FOLDER, *(map(Path, more) if isinstance(more, list) else []), _started_in(run)]
    for folder in folders:
        if folder is not None and folder.is_dir() and str(folder.absolute()) not in sys.path:
            sys.path.append(str(folder.absolute()))


@contextmanager
def with_start_folder(run: RunDirectory) -> Iterator[None]:
    """Name the start folder in the block's errors of data, rewards or options, if it is not the current folder."""
    try:
        yield
    except (ConfigError, DataError, RewardError) as error:
        folder = _started_in(run)
        if folder is None or folder == Path.cwd():
            raise
        advice = "its data and modules are searched there, then here; override them by options such as data.train=PATH"
        raise type(error)(f"{error} (the run was started in {folder}: {advice})") from error


def _started_in(run: RunDirectory) -> Path | None:
    """Return the folder where a run was started; None if its manifest names none."""
    folder = manifest_entry(run, "folder")
    return Path(folder) if isinstance(folder, str) else None
