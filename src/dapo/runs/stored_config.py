"""Loads the options of an existing run, and finds its data and modules. Imports no torch."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from dapo.config import Config, dump_config, load_config
from dapo.config.data_spec import FileSource, parse_spec, paths_in
from dapo.config.load import override, read_options
from dapo.config.option_entries import differing, flatten
from dapo.core.errors import ConfigError, DataError, RewardError
from dapo.core.loading import add_code_folder
from dapo.core.secrets import mask_options
from dapo.core.terminal import print_text
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import manifest_entry, template_time_of

CODE_FOLDER = "code"
"""Folder of a run directory with the modules of a run that was started from Python."""
DATA_FOLDER = "data"
"""Folder of a run directory with the rows of such a run."""
OWN_FOLDERS = (CODE_FOLDER, DATA_FOLDER)


def load_run_config(
    run: RunDirectory, overrides: Sequence[str] = (), *, step: int | None = None
) -> Config:
    """Load the options of a run, or of one `step`; relative paths start where the run was started.

    Files missing there, and the paths of `overrides`, are resolved in the current folder. Files in
    the run directory are found after it was moved, as are modules in its `code`. Raises
    ConfigError.
    """
    file = run.config if step is None else run.config_of(step)
    run_config = load_config(file)
    made_in = manifest_entry(run, "run_dir")
    started_in = _started_in(run)
    add_code_folder(run.path / CODE_FOLDER)
    there = []
    for key, path in run_config.data.paths.items():
        location = (started_in or Path.cwd()) / path
        if isinstance(made_in, str) and location.is_relative_to(made_in):
            moved = run.path.absolute() / location.relative_to(made_in)
            location = moved if moved.is_file() else location
        if location.is_file():
            there.append(override(key, str(location)))
    if started_in is not None and (started_in / run_config.model.name).is_dir():
        there.append(override("model.name", str(started_in / run_config.model.name)))
    config = load_config(file, [*there, *without_old_options(overrides)])
    time = template_time_of(run)
    return config if time is None else config.at_time(time)


def without_old_options(overrides: Sequence[str]) -> list[str]:
    """Overrides in which another verifier drops the options of the one before."""
    is_replaced = any(
        item.startswith(("reward=", "reward.verifier=", "reward.verifier.")) for item in overrides
    )
    return [*["reward.options={}"] * is_replaced, *overrides]


def changed_config(file: Path, overrides: Sequence[str]) -> Config:
    """Return a run's options with overrides; the path of a new data file here becomes absolute."""
    stored_data = load_config(file).data
    overrides = without_old_options(overrides)
    changed_data = load_config(file, overrides).data
    path_overrides = []
    for name, now in changed_data.sources.items():
        for option, path in (
            paths_in(now, name).items() if now != stored_data.sources.get(name) else ()
        ):
            if Path(path).is_file():
                path_overrides.append(override(option, str(Path(path).absolute())))
    return load_config(file, [*overrides, *path_overrides])


def keep_overrides(run: RunDirectory, overrides: Sequence[str], *, after: int) -> None:
    """Write the overrides of a resumed run as its options; `configs` keeps the earlier ones."""
    changed = dump_config(changed_config(run.config, overrides)) if overrides else None
    run.replace_config(changed or run.config.read_text(encoding="utf-8"), after=after)


def option_changes(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the changes of options by resumes.

    Example: [{"after_step": 10, "options": {"optim.lr": [1e-06, 2e-06]}}]
    """
    earlier = run.earlier_configs()
    tables = [
        dict(flatten(mask_options(read_options(path)))) for path in [*earlier.values(), run.config]
    ]
    changes = zip(earlier, pairwise(tables), strict=True)
    return [{"after_step": step, "options": differing(both)} for step, both in changes]


def trust_module_folders(path: str | Path) -> None:
    """Import modules also from the folders in a run's manifest, and print these folders.

    Someone else's manifest may name any folder, so this is done only on request (`--trust`).
    """
    folders = [
        str(folder.absolute())
        for folder in _module_folders(RunDirectory.open(path))
        if folder.is_dir()
    ]
    print_text(
        f"{path} is trusted: modules are imported also from {', '.join(folders) or 'no folder'}"
    )
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def _module_folders(run: RunDirectory) -> list[Path]:
    """Return the folders of modules that a manifest names."""
    folders = manifest_entry(run, "module_folders")
    started_in = _started_in(run)
    module_folders = map(_as_path, folders if isinstance(folders, list) else [])
    return list(
        dict.fromkeys(folder for folder in (*module_folders, started_in) if folder is not None)
    )


@contextmanager
def with_start_folder(run: RunDirectory) -> Iterator[None]:
    """Add the run's start folder to the block's errors of data files and modules, if it differs."""
    try:
        yield
    except (ConfigError, DataError, RewardError) as error:
        folder = _started_in(run)
        modules = [
            str(module_folder)
            for module_folder in _module_folders(run)
            if module_folder != Path.cwd()
        ]
        if not modules:
            raise
        paths = {
            option: path
            for option, path in load_config(run.config).data.paths.items()
            if path in str(error)
        }
        files = [
            f"{option}=PATH"
            for option, path in paths.items()
            if isinstance(parse_spec(path), FileSource)
        ]
        if files:
            advice = f"its data is searched there, then here; override it by {' or '.join(files)}"
        elif "module" in str(error):
            advice = f"its modules are searched here, with --trust also in {', '.join(modules)}"
        else:
            raise
        raise type(error)(f"{error} (the run was started in {folder}: {advice})") from None


def _started_in(run: RunDirectory) -> Path | None:
    """Return the folder where a run was started; None if its manifest names none."""
    return _as_path(manifest_entry(run, "folder"))


def _as_path(entry: Any) -> Path | None:
    return Path(entry) if isinstance(entry, str) and "\0" not in entry else None
