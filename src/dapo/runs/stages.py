"""The folder of a training in stages: `stages.json` with their options, and a run of each.

A stage trains the model of the one before. Each is an ordinary run, in a folder of its name.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import build_config
from dapo.config.load import as_literal
from dapo.config.stages import Stage
from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_json

STAGES_FILE = "stages.json"


@dataclass(frozen=True)
class StagesFolder:
    """The runs of a training in stages."""

    path: Path
    stages: Mapping[str, Stage]
    """By their names, in their order."""
    started_in: Path | None = None
    """The folder in which the training was started; None: an older version has made the file."""

    @classmethod
    def create(cls, path: Path, stages: Mapping[str, Stage]) -> "StagesFolder":
        """Write the options of all stages, before the first one begins."""
        folder = cls(path, stages, Path.cwd())
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._write()
        except OSError as error:
            raise CheckpointError(f"cannot create the folder {path}: {error.strerror}") from None
        return folder

    def changed(self, name: str, overrides: Sequence[str]) -> "StagesFolder":
        """Write other options of a stage that has not begun. Raises ConfigError if they are wrong."""
        stage = self.stages[name]
        config = build_config(
            _options_of(stage),
            overrides,
            where=f"stage {name}",
            command_line=f"command line, stage {name}",
        )
        takes_model_from = stage.takes_model_from
        if config.model.name != stage.config.model.name:
            takes_model_from = None
        stages = {**self.stages, name: Stage(config, takes_model_from)}
        folder = StagesFolder(self.path, stages, self.started_in)
        try:
            folder._write()
        except OSError as error:
            raise CheckpointError(f"{self.path / STAGES_FILE}: {error.strerror}") from None
        return folder

    def _write(self) -> None:
        stored = {
            name: {"options": _options_of(stage), "takes_model_from": stage.takes_model_from}
            for name, stage in self.stages.items()
        }
        content: dict[str, Any] = {"stages": stored}
        if self.started_in is not None:
            content = {"folder": str(self.started_in), **content}
        atomic_write_json(self.path / STAGES_FILE, content)

    @classmethod
    def open(cls, path: Path) -> "StagesFolder":
        """Open a folder of stages. Raises CheckpointError if its file is damaged."""
        file = path / STAGES_FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            stages = {
                name: Stage(
                    build_config(stage["options"], where=f"{file}, stage {name}"),
                    stage["takes_model_from"],
                )
                for name, stage in content["stages"].items()
            }
            folder = content.get("folder")
            started_in = None if folder is None else Path(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); train again") from None
        return cls(path, stages, started_in)

    def run_path(self, name: str) -> Path:
        return self.path / name

    @property
    def unbegun(self) -> str | None:
        """The first stage that has not begun; None: all have."""
        begun = self.begun_paths
        return next((name for name in self.stages if self.run_path(name) not in begun), None)

    @property
    def begun_paths(self) -> list[Path]:
        """The runs of the stages that have begun, in their order."""
        paths = [self.run_path(name) for name in self.stages]
        return [path for path in paths if os.path.lexists(path / "config.yaml")]

    @property
    def run_paths(self) -> list[Path]:
        """The runs in the folder: the stages that have begun, in their order, and their forks."""
        begun = self.begun_paths
        others = sorted(file.parent for file in self.path.glob("*/config.yaml"))
        return [*begun, *(path for path in others if path not in begun)]

    @property
    def newest_path(self) -> Path:
        """The run of the last stage that has begun; that of the first one if none has."""
        first = self.run_path(next(iter(self.stages)))
        return [first, *self.begun_paths][-1]


def _options_of(stage: Stage) -> Any:
    """Return the options that are set in a stage, as a configuration reads them.

    What is not set stays so, or each option would count as one that the user has set.
    """
    return as_literal(stage.config.model_dump(mode="json", exclude_unset=True))


def has_stages(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is the folder of a training in stages."""
    return os.path.isfile(Path(path) / STAGES_FILE)


def stages_around(path: Path) -> StagesFolder | None:
    """Return the stages in a folder, or those of which it is one; None: a run of its own."""
    if has_stages(path):
        return StagesFolder.open(path)
    # as it was typed, if that is possible: messages name it
    for parent in (path.parent, path.resolve().parent):
        if has_stages(parent):
            stages = StagesFolder.open(parent)
            return stages if path.resolve().name in stages.stages else None
    return None


def unbegun_advice(path: Path) -> str:
    """Return which stage of a training has not begun, and the command that begins it.

    `path` is the folder of the stages or of one of them. Empty if all have begun, and for a run of
    its own.
    """
    folder = stages_around(path)
    if folder is None or folder.unbegun is None:
        return ""
    command = f"dapo resume {shlex.quote(str(folder.path))}"
    return f"stage {folder.unbegun} has not begun; begin it with: {command}"


def run_path_of(path: str | os.PathLike[str]) -> Path:
    """Return the path of a run; of a folder of stages, that of the newest one."""
    if has_stages(path):
        return StagesFolder.open(Path(path)).newest_path
    return Path(path)
