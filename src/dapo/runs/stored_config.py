"""Loads the options of an existing run, and finds its data and modules. Imports no torch."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from dapo.config import Config, build_config, dump_config, load_config
from dapo.config.data_spec import FileSource, parse_spec, paths_in
from dapo.config.load import (
    as_literal,
    override,
    override_values,
    read_options,
    without_repeats,
)
from dapo.config.model_options import MODEL_ALIASES
from dapo.config.option_entries import differing, flatten
from dapo.core.errors import ConfigError, DataError, RewardError
from dapo.core.files import read_json
from dapo.core.loading import add_code_folder
from dapo.core.secrets import mask_options
from dapo.core.terminal import print_text
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import manifest_entry, template_time_of
from dapo.runs.stages import StagesFolder, has_stages

CODE_FOLDER = "code"
"""Folder of a run directory with the modules of a run that was started from Python."""
DATA_FOLDER = "data"
"""Folder of a run directory with the rows of such a run."""
_SETTING = re.compile(r"[a-z_][\w.]*=")
OWN_FOLDERS = (CODE_FOLDER, DATA_FOLDER)


def load_run_config(
    run: RunDirectory, overrides: Sequence[str] = (), *, step: int | None = None
) -> Config:
    """Load the options of a run; relative paths start where the run was started.

    Files missing there, and the paths of `overrides`, are resolved in the current folder. Files in
    the run directory are found after it was moved, as are modules in its `code`.

    Args:
        run: the run directory.
        overrides: options that differ from the run's, as `name=value`.
        step: the step whose options are loaded; None: the newest ones.

    Raises:
        ConfigError: the options are damaged or do not fit together.
    """
    file = run.config
    if step is not None:
        file = run.config_of(step)
    run_config = load_config(file)
    made_in = manifest_entry(run, "run_dir")
    started_in = _started_in(run)
    add_code_folder(run.path / CODE_FOLDER)
    there = []
    for key, path in run_config.data.paths.items():
        location = (started_in or Path.cwd()) / path
        if isinstance(made_in, str) and location.is_relative_to(made_in):
            moved = run.path.absolute() / location.relative_to(made_in)
            if moved.is_file():
                location = moved
        if location.is_file():
            there.append(override(key, str(location)))
    for key, name in _local_models(run_config).items():
        moved_model = _moved_with_stages(run, (started_in or Path.cwd()) / name, made_in)
        if moved_model is not None:
            there.append(override(key, str(moved_model)))
        elif started_in is not None and (started_in / name).is_dir():
            there.append(override(key, str(started_in / name)))
    config = load_config(file, [*there, *without_old_options(overrides)])
    # the chat template reads the time of the run's first start
    time = template_time_of(run)
    if time is None:
        return config
    return config.at_time(time)


def _moved_with_stages(run: RunDirectory, model: Path, made_in: Any) -> Path | None:
    """Return the place of an earlier stage's model after the folder of the stages was moved."""
    folder = run.path.absolute().parent
    if not isinstance(made_in, str) or not has_stages(folder):
        return None
    old_folder = Path(made_in).parent
    if old_folder == folder or not model.is_relative_to(old_folder):
        return None
    moved_model = folder / model.relative_to(old_folder)
    return moved_model if moved_model.is_dir() else None


def stage_config(folder: StagesFolder, name: str, overrides: Sequence[str] = ()) -> Config:
    """Return the options of a stage that begins, with the run whose model it trains.

    Data files and models are found as those of a run: where the training was started, then in the
    current folder. Raises ConfigError for overrides that do not fit.
    """
    stage = folder.stages[name]
    config = stage.config
    started_in = folder.started_in
    there: list[str] = []
    if started_in is not None and started_in != Path.cwd():
        for key, path in config.data.paths.items():
            if (started_in / path).is_file():
                there.append(override(key, str(started_in / path)))
        for key, model in _local_models(config).items():
            if (started_in / model).is_dir():
                there.append(override(key, str(started_in / model)))
    if stage.takes_model_from is not None:
        there.append(override("model.name", str(folder.run_path(stage.takes_model_from))))
    options = as_literal(config.model_dump(mode="json", exclude_unset=True))
    changes = [*there, *without_old_options(overrides)]
    return build_config(options, changes, where=f"stage {name}")


def without_old_options(overrides: Sequence[str]) -> list[str]:
    """Return overrides in which another verifier drops the options of the one before."""
    prefixes = ("reward=", "reward.verifier=", "reward.verifier.")
    # first: options of the new verifier may follow
    if any(item.startswith(prefixes) for item in overrides):
        return ["reward.options={}", *overrides]
    return list(overrides)


def changed_config(file: Path, overrides: Sequence[str]) -> Config:
    """Return a run's options with overrides.

    The paths of data files and of folders of models that are new, and here, become absolute.
    """
    stored = load_config(file)
    overrides = without_old_options(overrides)
    changed = load_config(file, overrides)
    path_overrides = []
    for name, source in changed.data.sources.items():
        if source == stored.data.sources.get(name):
            continue
        for option, path in paths_in(source, name).items():
            if Path(path).is_file():
                path_overrides.append(override(option, str(Path(path).absolute())))
    stored_models = _local_models(stored)
    for option, model in _local_models(changed).items():
        if model != stored_models.get(option) and Path(model).is_dir():
            path_overrides.append(override(option, str(Path(model).absolute())))
    return load_config(file, [*overrides, *path_overrides])


def _local_models(config: Config) -> dict[str, str]:
    """Return the models that may be folders, by option."""
    names = {"model.name": config.model.name, "loss.reference.model": config.loss.teacher}
    return {
        option: name
        for option, name in names.items()
        if name is not None and name not in MODEL_ALIASES
    }


def keep_overrides(run: RunDirectory, overrides: Sequence[str], *, after: int) -> None:
    """Write the overrides of a resumed run as its options; `configs` keeps the earlier ones."""
    if overrides:
        text = dump_config(changed_config(run.config, overrides))
    else:
        text = run.config.read_text(encoding="utf-8")
    run.replace_config(text, after=after)


def option_changes(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the changes of options by resumes.

    Example: [{"after_step": 10, "options": {"optim.lr": [1e-06, 2e-06]}}]
    """
    earlier = run.earlier_configs()
    tables = []
    for path in [*earlier.values(), run.config]:
        options = mask_options(read_options(path))
        tables.append(dict(flatten(options)))
    changes = zip(earlier, pairwise(tables), strict=True)
    return [{"after_step": step, "options": differing(pair)} for step, pair in changes]


def changed_values(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """Return the options that resumes changed as overrides, by the last step before the change.

    Example: {10: {"optim.lr": 2e-06}}
    """
    earlier = run.earlier_configs()
    files = [*earlier.values(), run.config]
    tables = [override_values(mask_options(read_options(path))) for path in files]
    changes = {}
    for step, (old, new) in zip(earlier, pairwise(tables), strict=True):
        changes[step] = {name: new[name] for name in new if old.get(name) != new[name]}
    return changes


def command_of(run: RunDirectory) -> tuple[list[str], list[str]]:
    """Return the words of the command that makes a run with the newest options, and the resumes.

    Each resume that changed an option is a command with the last step before it.
    """
    words = list(read_json(run.manifest)["command"])
    changes = changed_values(run)
    resumes = []
    newest: dict[str, Any] = {}
    for step, values in changes.items():
        newest |= values
        overrides = [override(name, value) for name, value in values.items()]
        resume = shlex.join(["dapo", "resume", str(run.path), *overrides])
        resumes.append(f"after step {step}: {resume}")
    if newest and words[1:2] == ["train"]:
        words = with_overrides(words, [override(name, value) for name, value in newest.items()])
    return words, resumes


def with_overrides(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the words of a command in which overrides replace those of the same options."""
    settings: list[str] = []
    others: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_setting = _SETTING.match(word) and not before.startswith("-")
        (settings if is_setting else others).append(word)
    # before the flags, which stand at the end
    flags = next((i for i, word in enumerate(others) if word.startswith("-")), len(others))
    return [*others[:flags], *without_repeats([*settings, *overrides]), *others[flags:]]


def trust_module_folders(path: str | Path) -> None:
    """Import modules also from the folders in a run's manifest, and print these folders.

    Someone else's manifest may name any folder, so this is done only on request (`--trust`).
    """
    module_folders = _module_folders(RunDirectory.open(path))
    folders = [str(folder.absolute()) for folder in module_folders if folder.is_dir()]
    named_folders = ", ".join(folders) or "no folder"
    print_text(f"{path} is trusted: modules are imported also from {named_folders}")
    # at the end: they must not shadow installed modules
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def _module_folders(run: RunDirectory) -> list[Path]:
    """Return the folders of modules that a manifest names."""
    entries = manifest_entry(run, "module_folders")
    if not isinstance(entries, list):
        entries = []
    folders = [_as_path(entry) for entry in entries]
    folders.append(_started_in(run))
    return list(dict.fromkeys(folder for folder in folders if folder is not None))


@contextmanager
def with_start_folder(run: RunDirectory) -> Iterator[None]:
    """Add the run's start folder to the block's errors of data files and modules, if it differs."""
    try:
        yield
    except (ConfigError, DataError, RewardError) as error:
        folder = _started_in(run)
        here = Path.cwd()
        modules = [str(module) for module in _module_folders(run) if module != here]
        if not modules:
            raise
        files = []
        for option, path in load_config(run.config).data.paths.items():
            if path in str(error) and isinstance(parse_spec(path), FileSource):
                files.append(f"{option}=PATH")
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
    # the system refuses a path with NUL
    if not isinstance(entry, str) or "\0" in entry:
        return None
    return Path(entry)
