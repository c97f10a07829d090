"""The options of an existing run, with its data and modules where it was started. Imports no torch."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dapo.config import Config, load_config
from dapo.core.errors import ConfigError, DataError, RewardError
from dapo.training.run_directory import RunDirectory


def load_run_config(run: RunDirectory, overrides: Sequence[str] = ()) -> Config:
    """The options of a run, whose relative paths and modules are those of the folder that it was started in.

    What is not there is looked for in the current folder, as are the paths of `overrides`. Raises ConfigError.
    """
    folder = _started_in(run)
    if folder is None or not folder.is_dir():
        return load_config(run.config, overrides)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    own = load_config(run.config)
    there = []
    for name, spec in (("data.train", own.data.train), ("data.eval", own.data.eval)):
        key, path = (f"{name}.path", spec.get("path")) if isinstance(spec, dict) else (name, spec)
        if isinstance(path, str) and (folder / path).is_file():
            there.append(f"{key}={json.dumps(str(folder / path))}")
    if (folder / own.model.name).is_dir():
        there.append(f"model.name={json.dumps(str(folder / own.model.name))}")
    return load_config(run.config, [*there, *overrides])


@contextmanager
def naming_start_folder(run: RunDirectory) -> Iterator[None]:
    """Add to an error of data, rewards or options in the block where the run was started, if that is elsewhere."""
    try:
        yield
    except (ConfigError, DataError, RewardError) as error:
        folder = _started_in(run)
        if folder is None or folder == Path.cwd():
            raise
        advice = "its data and modules are looked for there, then here; data.train=PATH and the like override"
        raise type(error)(f"{error} (the run was started in {folder}: {advice})") from error


def _started_in(run: RunDirectory) -> Path | None:
    """The folder that a run was started in; None where its manifest does not say."""
    try:
        folder = json.loads(run.manifest.read_text(encoding="utf-8"))["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(folder) if isinstance(folder, str) else None
