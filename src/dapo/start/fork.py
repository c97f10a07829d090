"""A fork: a new run that begins with a checkpoint of another run, and is equal to it up to that
step.

The fork has the parent's files up to the step: metrics, evaluations, judged responses, the
checkpoint. Files that runs replace, and never change, are hard links, which cost no space;
`metrics.jsonl`, to which a run appends, is a copy. So neither run can change a file of the other,
and either may be removed.

All random numbers of a run are keyed (`core/rng.py`). A fork without a change therefore repeats its
parent to the byte, and a fork with another learning rate gets the same problems and the same random
numbers for their responses. A branch (`--times`) has its own seed, and so different random numbers
after the step.
"""

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dapo.config import Config, dump_config, load_config
from dapo.config.option_entries import option_differences
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.files import (
    PRIVATE,
    atomic_write_json,
    atomic_write_text,
    crc32_of,
    open_no_link,
    read_json,
    remove,
)
from dapo.core.loading import add_code_folder
from dapo.core.rng import keyed_seed
from dapo.runs.checkpoints import accuracy_of, numbered, require_optimizer_state, step_of
from dapo.runs.directory import RunDirectory, require_new_run
from dapo.runs.manifest import WRITTEN, Fork, make_manifest, template_time_of
from dapo.runs.metrics_file import truncate_after
from dapo.runs.stored_config import CODE_FOLDER, OWN_FOLDERS, changed_config
from dapo.training.saved_state import (
    MAY_RESTART,
    STATE_FILE,
    is_logged,
    read_state,
    steps_of_epochs,
)

SEEDS = 10**9  # upper bound of the seeds of branches, which people read and type
# entries of a manifest that locate the data and modules of a run, and the options that were written
_INHERITED = ("folder", "run_dir", "module_folders", WRITTEN)
_KEEPS_NEXT_BATCH = (
    "advantage.",
    "loss.",
    "optim.",
    "eval.",
    "log.",
    "profile.",
    "distributed.",
    "launcher",
    "train.",
)
"""Options, and prefixes of options, on which a batch sampled in advance does not depend."""
_CHANGES_PROBLEMS = ("data.", "environment.", "rollout.max_response_tokens", "schedule")
"""Options, and prefixes of options, on which it depends which training problems are left out: those
that are held out, and prompts and demonstrations that are too long.
"""


@dataclass(frozen=True)
class ForkPlan:
    """A fork whose options and checkpoint were checked, before anything is written."""

    parent: RunDirectory
    checkpoint: Path
    config: Config
    fork: Fork

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the random numbers after the step."""
        changed = self.fork.changed
        if _moves_stream(changed):
            return [
                f"the training data changed: after step {self.fork.step} the stream starts at its"
                " first problem"
            ]
        if "train.seed" in changed:
            return [
                f"the seed changed: after step {self.fork.step} the order of the problems and all"
                " random numbers differ, and problems may repeat within the epoch"
            ]
        if any(name.startswith("data.") for name in changed):
            return [
                "prompts or problems changed: the same random numbers give different responses; if"
                " the number of training problems changes, the stream starts at its first problem"
            ]
        return []


def plan_fork(
    parent: RunDirectory, step: int, overrides: Sequence[str] = (), *, branch: int | None = None
) -> ForkPlan:
    """Plan a fork of a run, which may be training, at the step of one of its checkpoints.

    `overrides` change options after the step, as `key=value`. The seed of a `branch` is a function
    of the run's seed and this number.

    Raises ConfigError if an option is wrong or cannot change within a run, and CheckpointError,
    which names the whole checkpoints of the parent, if it has none of the step.
    """
    checkpoint = parent.checkpoints.find(step)
    require_optimizer_state(checkpoint)
    add_code_folder(parent.path / CODE_FOLDER)
    file = parent.config_of(step + 1)
    parent_config = load_config(file)
    config = changed_config(file, overrides)
    if config.train.epochs is not None and config.data != parent_config.data:
        raise ConfigError(
            "train.epochs counts the rows of the parent, and other options of data may change them;"
            " set train.num_steps"
        )
    steps = steps_of_epochs(config, checkpoint)
    if steps:
        config = changed_config(file, [*overrides, *steps])
    if branch is not None:
        seed = keyed_seed(config.train.seed, "branch", branch) % SEEDS
        config = config.changed("train", seed=seed)
    changed = {
        name: (old, new) for name, (old, new) in option_differences(parent_config, config).items()
    }
    require_same_preset(parent_config, config, "a fork")
    _require_possible(config, changed, step)
    origin = Fork(str(parent.path.resolve()), step, branch, crc32_of(file), changed)
    return ForkPlan(parent, checkpoint, config, origin)


def create_fork(plan: ForkPlan, path: Path, command: Sequence[str]) -> RunDirectory:
    """Make the run directory of a fork, which `dapo resume` continues.

    `path` must be new or empty, and the manifest records `command`. The directory gets its name
    when it is complete, so a killed process leaves no run. Raises CheckpointError if `path` has a
    run or cannot be written, or the parent has removed its checkpoint.
    """
    require_new_run(path)
    fork = RunDirectory(path.with_name(f".{path.name}.fork.tmp"))
    try:
        fork.path.mkdir(parents=True, exist_ok=True)
        with fork.lock():
            for leftover in fork.path.iterdir():
                if leftover.name != "lock":
                    remove(leftover)
            _fill(fork, plan, command)
            os.rename(fork.path, path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{error.filename} has just been removed: {plan.parent.path} is training and removes"
            " old checkpoints; fork a newer one, or raise train.keep_checkpoints"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot create the run directory {path}: {error.strerror}") from None
    return RunDirectory(path)


def default_fork_path(parent: RunDirectory, step: int, now: datetime) -> Path:
    """Return the default run directory, `RUN-step4-<YYYYmmdd-HHMMSS>`, next to the parent."""
    path = parent.path.resolve() if parent.path.name in ("", "..") else parent.path
    return path.with_name(f"{path.name}-step{step}-{now:%Y%m%d-%H%M%S}")


def require_same_preset(old_config: Config, new_config: Config, where: str) -> None:
    """Raise ConfigError for another preset, whose options would not come with its name."""
    if new_config.preset != old_config.preset:
        why = (
            "a run has a value for each option; change those that differ, or start a new run with"
            " model=RUN"
        )
        raise ConfigError(f"preset cannot change in {where}: {why}")


def _require_possible(config: Config, changed: Mapping[str, Any], step: int) -> None:
    """Raise ConfigError for a change that a checkpoint forbids, or if no step is left to train."""
    for name in changed:
        reason = None
        if name == "model.name":
            reason = "this model's weights and its tokenizer's ids"
        elif name.startswith("model.lora"):
            reason = "what was trained with the parent's adapters, or without any"
        elif name == "model.dtype" and "float64" in changed[name]:
            reason = "master weights in float64 with model.dtype=float64, and else in float32"
        if reason is not None:
            raise ConfigError(
                f"{name} cannot change in a fork: the checkpoint holds {reason}; start a new run"
                " with dapo train"
            )
    if config.train.num_steps <= step:
        raise ConfigError(
            f"the fork starts after step {step}, and train.num_steps={config.train.num_steps}"
            f" leaves nothing to train; set for example train.num_steps={2 * step}"
        )


def _fill(fork: RunDirectory, plan: ForkPlan, command: Sequence[str]) -> None:
    """Write the files of a fork; `config.yaml`, which makes the directory a run, comes last."""
    parent = plan.parent
    step = plan.fork.step
    logged = step if is_logged(plan.checkpoint) else step - 1
    if parent.metrics.exists():
        shutil.copyfile(parent.metrics, fork.metrics)
        truncate_after(fork.metrics, logged)
    for folder in ("rollouts", "eval", "configs"):
        for path in numbered(parent.path / folder):
            if not path.is_symlink() and step_of(path) <= step:
                _link(path, fork.path / folder / path.name)
    for name in (*OWN_FOLDERS, parent.tokenizer.name):
        for path in sorted((parent.path / name).rglob("*")):
            if path.is_symlink() or not path.is_dir():
                _copy(path, fork.path / path.relative_to(parent.path))
    fork.checkpoints.save(
        step,
        lambda folder: _fill_checkpoint(folder, plan),
        1,
        accuracy=accuracy_of(plan.checkpoint),
    )
    shutil.copyfile(plan.checkpoint / fork.problem_stats.name, fork.problem_stats)
    atomic_write_json(fork.manifest, _manifest(plan, command))
    atomic_write_text(fork.config, dump_config(plan.config))


def _fill_checkpoint(folder: Path, plan: ForkPlan) -> None:
    """Link the parent's checkpoint, except groups that the fork would sample differently."""
    from dapo.sampling.saved_groups import SAVED_FILES, read_sampling_start  # imports torch

    changed = plan.fork.changed
    start = read_sampling_start(plan.checkpoint)
    keeps_batch = all(
        name.startswith(_KEEPS_NEXT_BATCH) and name != "train.seed" for name in changed
    )
    drops_batch = start is not None and not keeps_batch
    omitted = {plan.parent.manifest.name}
    if drops_batch:
        omitted |= SAVED_FILES
    for path in sorted(plan.checkpoint.rglob("*")):
        name = path.relative_to(plan.checkpoint).as_posix()
        if path.is_file() and name not in omitted:
            _link(path, folder / name)
    may_restart = any(name.startswith(_CHANGES_PROBLEMS) for name in changed)
    if not drops_batch and not may_restart:
        return
    state = read_state(plan.checkpoint)
    # its problems and the keep rate return to the state before it
    if start is not None and drops_batch:
        epoch, offset = divmod(start.position, state["stream"]["size"])
        state |= {"stream": state["stream"] | {"epoch": epoch, "offset": offset}}
        state |= {"sampler": dict(start.sampler or state["sampler"])}
    if _moves_stream(changed):
        state["stream"] = {"epoch": 0, "offset": 0}
    elif may_restart:
        # the number of problems is known when their prompts are encoded, at the start
        state["stream"] |= {MAY_RESTART: True}
    atomic_write_json(folder / STATE_FILE, state)


def _moves_stream(changed: Mapping[str, Any]) -> bool:
    """Return True if problems or their order are other ones, so that old positions mean nothing."""
    return any(
        name in ("data.train", "data.order") or name.startswith("data.train.") for name in changed
    )


def _link(source: Path, target: Path) -> None:
    """Hard-link a file that no run writes to; copy it to another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # EPERM: the file system has no links, or the system forbids links to another user's files
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a regular file. Raises CheckpointError for a link, a pipe and the like."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            open_no_link(source, "rb") as file,
            open_no_link(target, "xb", permissions=PRIVATE) as copy,
        ):
            shutil.copyfileobj(file, copy)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be copied: {error.strerror}") from None


def _manifest(plan: ForkPlan, command: Sequence[str]) -> dict[str, Any]:
    """Make the manifest of the fork, with the parent's locations of data and modules."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    time = template_time_of(plan.parent)
    started = datetime.now(UTC)
    seed = plan.config.train.seed
    manifest = make_manifest(
        command, seed=seed, started=started, gpus=gpus, fork=plan.fork, template_time=time
    )
    parent_manifest = read_json(plan.parent.manifest)
    return manifest | {
        name: parent_manifest[name] for name in _INHERITED if name in parent_manifest
    }
