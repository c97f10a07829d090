"""The manifest of a run: versions, machine, command line, seed, and the parent of a fork. Imports no torch."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dapo
from dapo.core.files import read_json
from dapo.core.processor import cpu_model
from dapo.core.secrets import mask_secrets
from dapo.runs.directory import RunDirectory


@dataclass(frozen=True)
class Fork:
    """Where a run was forked from, as its manifest records it.

    Example: Fork("/runs/x", 40, None, "6e1b0c52", {"optim.lr": (1e-06, 2e-06)})
    """

    parent: str
    """The parent's run directory."""
    step: int
    """The last step that the run shares with its parent."""
    branch: int | None
    """The number of a branch with a seed of its own, from 1; None: the parent's seed."""
    parent_config_crc32: str
    """Checksum of the parent's config.yaml when the fork was made."""
    changed: Mapping[str, tuple[Any, Any]]
    """The changed options, each with the parent's value and the run's own."""

    @classmethod
    def of(cls, run: RunDirectory) -> "Fork | None":
        """Read a run's manifest; None for a run that is no fork, or whose manifest is damaged."""
        return cls.of_record(manifest_entry(run, "fork"))

    @classmethod
    def of_record(cls, found: Any) -> "Fork | None":
        """Restore a fork from `asdict` of it, before or after a trip through JSON; None for anything else."""
        try:
            changed = {str(name): (old, new) for name, (old, new) in found["changed"].items()}
            return cls(
                str(found["parent"]), int(found["step"]), found["branch"], str(found["parent_config_crc32"]), changed
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def describe(self) -> str:
        """Describe the fork: `step 40 of runs/x, branch 2; train.seed 0 -> 7`."""
        branch = "" if self.branch is None else f", branch {self.branch}"
        changes = ", ".join(f"{name} {_show(old)} -> {_show(new)}" for name, (old, new) in self.changed.items())
        return f"step {self.step} of {self.parent}{branch}; {changes or 'no option changed'}"


def make_manifest(
    command: Sequence[str],
    *,
    seed: int,
    started: datetime,
    gpus: Sequence[str] = (),
    run_dir: Path | None = None,
    module_folders: Sequence[str] = (),
    fork: Fork | None = None,
) -> dict[str, Any]:
    """Make the manifest of a new run. Reads no environment variable; secrets in `command` are masked."""
    return {
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "command": mask_secrets(command),
        "folder": os.getcwd(),  # where relative paths and modules of the configuration are
        **({} if run_dir is None else {"run_dir": str(run_dir.absolute())}),  # files of the run move with it
        **({"module_folders": list(module_folders)} if module_folders else {}),  # where else modules are
        "seed": seed,
        "git_commit": _git_commit(),
        "versions": package_versions(),
        "machine": {
            "platform": platform.platform(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "gpus": list(gpus),
        },
        **({} if fork is None else {"fork": asdict(fork)}),
    }


def manifest_entry(run: RunDirectory, name: str) -> Any:
    """An entry of a run's manifest; None where it has no such entry, or is damaged."""
    try:
        return read_json(run.manifest)[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def package_versions() -> dict[str, str | None]:
    """The package versions on which the bytes of a run depend; None for a package that is not installed."""
    return {
        "dapo": dapo.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "numpy")},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the current directory, with `-dirty` where tracked files differ; None outside a repository."""
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false"]  # a repository may name a program as its monitor
    command = ["git", *options, "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _show(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
