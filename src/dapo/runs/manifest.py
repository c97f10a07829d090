"""The manifest of a run: versions, machine, command line, seed, and the parent of a fork.

Imports no torch.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import dapo
from dapo.config import Config
from dapo.config.load import find_config, merge_options, parse_overrides, read_options
from dapo.config.model_options import DATA_SOURCES
from dapo.config.option_entries import flat_options, flatten
from dapo.core.errors import ConfigError
from dapo.core.files import damage_of, read_json
from dapo.core.processor import cpu_model
from dapo.core.secrets import mask_secrets
from dapo.core.typed_values import with_texts
from dapo.data.sources.rows import other_fields
from dapo.runs.directory import RunDirectory
from dapo.types import Problem

WRITTEN = "written_options"
"""The manifest's entry with the names of the options that the user wrote."""
TEMPLATE_TIME = "template_time"
"""The manifest's entry with the local time that chat templates read as now."""


@dataclass(frozen=True)
class Fork:
    """The origin of a forked run, as its manifest records it.

    Example: Fork("/runs/x", 40, None, "6e1b0c52", {"optim.lr": (1e-06, 2e-06)})
    """

    parent: str  # the parent's run directory
    step: int  # the last step that the run shares with its parent
    # the number of a branch with a seed of its own, from 1; None: the parent's seed
    branch: int | None
    parent_config_crc32: str  # checksum of the parent's config.yaml when the fork was made
    # the changed options, each with the parent's value and the run's own
    changed: Mapping[str, tuple[Any, Any]]

    @classmethod
    def of(cls, run: RunDirectory) -> "Fork | None":
        """Read a run's manifest; None for a run that is not a fork, or whose manifest is damaged."""
        return cls.of_record(manifest_entry(run, "fork"))

    @classmethod
    def of_record(cls, record: Any) -> "Fork | None":
        """Restore a fork from its `asdict`, which may have been JSON; None for anything else."""
        try:
            changed = {str(name): (old, new) for name, (old, new) in record["changed"].items()}
            return cls(
                str(record["parent"]),
                int(record["step"]),
                record["branch"],
                str(record["parent_config_crc32"]),
                changed,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def describe(self) -> str:
        """Describe the fork: `step 40 of runs/x, branch 2; train.seed 0 -> 7`."""
        origin = f"step {self.step} of {self.parent}"
        if self.branch is not None:
            origin += f", branch {self.branch}"
        return f"{origin}; {describe_changes(self.changed) or 'no option changed'}"


def describe_changes(changed: Mapping[str, Sequence[Any]]) -> str:
    """Describe changed options: `train.seed 0 -> 7, optim.lr 1e-06 -> 2e-06`."""
    return ", ".join(f"{name} {_show(old)} -> {_show(new)}" for name, (old, new) in changed.items())


def make_manifest(
    command: Sequence[str],
    *,
    seed: int,
    started: datetime,
    gpus: Sequence[str] = (),
    run_dir: Path | None = None,
    module_folders: Sequence[str] = (),
    fork: Fork | None = None,
    template_time: datetime | None = None,
) -> dict[str, Any]:
    """Make the manifest of a new run.

    Reads no environment variable.

    Args:
        command: The words of the command, of which secrets are masked.
        seed: The run's seed.
        started: The time of the start, with its zone.
        gpus: The names of the GPUs.
        run_dir: The directory of the run as it was made.
        module_folders: Where the user's modules were found.
        fork: The origin of a fork.
        template_time: The local time that chat templates read as now, in this process and all that
            continue the run.
    """
    local_time = template_time or local(started)
    manifest: dict[str, Any] = {
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        TEMPLATE_TIME: local_time.isoformat(timespec="seconds"),
        "command": mask_secrets(command),
        "folder": os.getcwd(),  # of relative paths and modules of the configuration
    }
    if run_dir is not None:
        manifest["run_dir"] = str(run_dir.absolute())  # files of the run move with it
    if module_folders:
        manifest["module_folders"] = list(module_folders)
    manifest |= {
        "seed": seed,
        "git_commit": _git_commit(),
        "versions": package_versions(),
        "machine": {
            "platform": platform.platform(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "gpus": list(gpus),
        },
    }
    if fork is not None:
        manifest["fork"] = asdict(fork)
    return manifest


def written_options(command: Sequence[str], set_to_fit: Collection[str] = ()) -> list[str]:
    """Return the names of the options in `train CONFIG NAME=VALUE ...` and in its file.

    Without those `set_to_fit`. A value of several options counts by the name of each.
    """
    words = list(command)
    words = words[words.index("train") + 1 :] if "train" in words else []
    names: dict[str, None] = {}
    for previous, word in pairwise(["", *words]):
        if word.startswith("-") or previous == "--run-dir":
            continue
        # a word that is neither a file nor an option is answered where the command is read
        with suppress(ConfigError):
            is_file = "=" not in word or os.path.lexists(word)
            options = read_options(find_config(word)) if is_file else parse_overrides([word])
            names |= dict.fromkeys(name for name, _ in flatten(merge_options(options, {})))
    return [name for name in names if name not in set_to_fit]


def read_manifest(run: RunDirectory) -> dict[str, Any]:
    """Read a run's manifest. Raises DataError if it is damaged."""
    with damage_of(run.manifest):
        manifest = read_json(run.manifest)
        if not isinstance(manifest, dict):
            raise ValueError(f"it holds a {type(manifest).__name__}")
        return manifest


def manifest_entry(run: RunDirectory, name: str) -> Any:
    """Read an entry of a run's manifest; None if it is missing, or the manifest is damaged."""
    try:
        return read_json(run.manifest)[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def local(time: datetime) -> datetime:
    """Return a time as this machine's clock shows it, without a zone and without microseconds."""
    return time.astimezone().replace(tzinfo=None, microsecond=0)


def template_time_of(run: RunDirectory) -> datetime | None:
    """Return the time that chat templates read as now: the recorded one, or the run's start.

    None if the manifest is damaged.
    """
    recorded = manifest_entry(run, TEMPLATE_TIME)
    started = manifest_entry(run, "started")
    try:
        if recorded is not None:
            return datetime.fromisoformat(recorded)
        return local(datetime.fromisoformat(started))
    except (TypeError, ValueError):
        return None


def package_versions() -> dict[str, str | None]:
    """Read the package versions on which a run's bytes depend; None if not installed."""
    return {
        "dapo": dapo.__version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "numpy": _version("numpy"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Read the commit of the current directory, with `-dirty` if files differ; None without git."""
    # a repository may name a program as its monitor
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false"]
    command = ["git", *options, "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


PROVENANCE_FILE = "provenance.json"

FREE_OPTIONS = (
    "train.num_steps",
    "train.token_budget",
    "train.save_every",
    "train.eval_every",
    "train.keep_checkpoints",
    "log.",
    "profile.",
)
"""Options, and prefixes of options, that change no step."""
_PATHS = re.compile(rf"data\.({'|'.join(DATA_SOURCES)})(\.mix\.[^.]+)?(\.path)?")
"""Options that locate the data; the problems themselves are compared instead."""
_MODELS = ("model.name", "loss.reference.model")
"""Options that may name a folder, which is found from where the run was started."""
_ROUNDING_OPTIONS = ("train.microbatch_tokens", "train.recompute", "rollout.native.kernels")
"""Options, and prefixes of options, that only change how the same sums are split."""
_END_OF_DECAY = "train.num_steps"
"""The step at which a decaying learning rate reaches its floor, and of which a warm-up may be a
share; with a constant rate and a warm-up in steps it changes no step.
"""


def provenance(
    config: Config, train: Sequence[Problem], held_out: Sequence[Problem]
) -> dict[str, dict[str, Any]]:
    """Collect options, versions, processor and data of this process, as JSON values."""
    # a process that trains has imported both already; `dapo status` does not need them
    import torch

    from dapo.libs import cpu_kernels

    options = flat_options(config)
    layers = "compiled" if cpu_kernels.is_compiled() else "not compiled"
    fixed_options = {
        name: value for name, value in options.items() if not name.startswith(FREE_OPTIONS)
    }
    if config.decays_lr or config.optim.warmup_ratio is not None:
        fixed_options[_END_OF_DECAY] = config.train.num_steps
    return {
        "options": fixed_options,
        "versions": package_versions(),
        "machine": {
            "processor": cpu_model(),
            "number of threads": torch.get_num_threads(),
            "layers": layers,
        },
        "data": {
            "training problems": _fingerprint(train),
            "evaluation problems": _fingerprint(held_out),
        },
    }


def provenance_diff(
    checkpoint: Path,
    now: Mapping[str, Mapping[str, Any]],
    *,
    step: int,
    expected: Collection[str] = (),
) -> list[str]:
    """Describe each difference from the provenance of a step's checkpoint in one line.

    Args:
        checkpoint: the checkpoint.
        now: the provenance of this process.
        step: the step of the checkpoint.
        expected: options that a fork changes, which are left out.
    """
    try:
        recorded = read_json(checkpoint / PROVENANCE_FILE)
    except FileNotFoundError:
        return []
    lines = []
    for kind, values in now.items():
        for name in sorted(values.keys() | recorded[kind].keys()):
            old = recorded[kind].get(name)
            new = values.get(name)
            is_expected = kind == "options" and name in expected
            # paths say where data lies; its content has a fingerprint
            if old == new or is_expected or _PATHS.fullmatch(name):
                continue
            if name in _MODELS and _is_same_model(Path(str(old)), Path(str(new))):
                continue
            # a constant rate, then or now: optim.schedule differs
            if name == _END_OF_DECAY and (old is None or new is None):
                continue
            effect = "from here on, results may differ by rounding"
            if kind in ("options", "data") and not name.startswith(_ROUNDING_OPTIONS):
                effect = "from here on, results belong to a different run"
            if name == _END_OF_DECAY:
                schedule = values["optim.schedule"]
                effect = (
                    f"from here on, the learning rate (optim.schedule={schedule}) falls until there"
                )
                if schedule == "constant":
                    effect = "the warm-up (optim.warmup_ratio) is a share of it"
            lines.append(f"warning: {name} was {old} up to step {step} and is {new} now; {effect}")
    return lines


def _is_same_model(old: Path, new: Path) -> bool:
    """Return True if two paths name one model: from the root, or in a folder that was moved.

    The name of an exported checkpoint has a checksum of its counts.
    """
    if str(new).endswith(f"/{old}"):
        return True
    is_exported = old.parent.name == RunDirectory(old).exported_folder.name
    return is_exported and old.parts[-3:] == new.parts[-3:]


def _fingerprint(problems: Sequence[Problem]) -> str:
    """Summarize problems by their number, and a checksum of all of them in their order."""
    crc = 0
    for problem in problems:
        fields = with_texts(other_fields(problem))
        text = json.dumps([problem.id, problem.prompt, problem.answer, fields], default=str)
        crc = zlib.crc32(text.encode(), crc)
    return f"{len(problems)} with checksum {crc:08x}"
