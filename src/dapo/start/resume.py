"""What `dapo resume` checks before torch is imported: the run, its options and its data, and
whether anything is left to train.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dapo.config import Config
from dapo.config.option_entries import option_differences
from dapo.core.errors import ConfigError
from dapo.runs.checkpoints import has_weights_only, require_optimizer_state, step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config, with_start_folder
from dapo.start.check import Checked, check, read_data
from dapo.start.fork import require_same_preset
from dapo.start.rows import RunData
from dapo.training.checkpoint_writer import os_errors_as_dapo_errors
from dapo.training.saved_state import read_state, steps_of_epochs


@dataclass(frozen=True)
class CheckedRun:
    """A run that continues, locked, with its options checked and its problems read."""

    checked: Checked
    data: RunData
    directory: RunDirectory
    overrides: Sequence[str]
    """Changes of the options, not written yet."""


@dataclass(frozen=True)
class Ended:
    """A run that has nothing left to train: it has reached its last step, or its problems are
    solved.
    """

    config: Config
    directory: RunDirectory
    checkpoint: Path
    is_solved: bool = False

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)

    @property
    def extension(self) -> str:
        """The option that lets the run train on."""
        train = self.config.train
        if self.is_solved:
            return "data.train=HARDER.jsonl"
        if self.step < train.num_steps:  # it ended by its tokens
            return f"train.token_budget={2 * (train.token_budget or 0)}"
        return f"train.num_steps={2 * self.step}"

    @property
    def advice(self) -> str:
        """What the run has reached, and the command that trains on."""
        run = shlex.quote(str(self.directory.path))
        at = f"{self.step} of {self.config.train.num_steps}"
        if self.is_solved:
            state = f"already solved at step {at}: all responses of its last search were correct"
            command = "dapo fork"  # a resumed run keeps its problems
        else:
            at += ", with train.token_budget spent" if "token" in self.extension else ""
            state = f"already at step {at}"
            command = "dapo resume"
        if has_weights_only(self.checkpoint):
            return (
                f"{state}; it holds only weights, from which a new run can begin: dapo train"
                f" CONFIG.yaml model={run}"
            )
        return f"{state}; to train on: {command} {run} {self.extension}"

    @property
    def is_complete(self) -> bool:
        """Whether the curves are drawn and older checkpoints reduced, which a kill may prevent."""
        kept = self.config.train.keep_checkpoints
        checkpoints = self.directory.checkpoints
        if checkpoints.with_optimizer_state(but_newest=1 if kept is None else kept):
            return False
        curves = self.directory.curves
        if not curves.exists():
            return False
        return curves.stat().st_mtime_ns >= self.directory.summary.stat().st_mtime_ns


@contextmanager
def checked_run(path: Path, overrides: Sequence[str]) -> Iterator[CheckedRun | Ended]:
    """Lock the directory of a run in the block, check its options and read its data.

    `overrides` change options of the run, from its checkpoint on. Raises DapoError if it cannot
    continue, or if no step is left for the change.
    """
    directory = RunDirectory.open(path)
    stored_config = load_run_config(directory)
    config = load_run_config(directory, overrides)
    if config.train.epochs is not None:
        newest = directory.checkpoints.latest(warn=lambda line: None)
        overrides = [*overrides, *steps_of_epochs(config, newest)]
        config = load_run_config(directory, overrides)
    require_same_preset(stored_config, config, "a resumed run")
    with ExitStack() as stack, os_errors_as_dapo_errors(), directory.lock(config.train.num_steps):
        damage: list[str] = []
        checkpoint = directory.checkpoints.latest(warn=damage.append)
        if checkpoint is not None:
            ended = _end_of(directory, checkpoint, stored_config, config)
            if ended is not None and not _is_changed(stored_config, config):
                yield ended
                return
            require_optimizer_state(checkpoint, damage)
            steps = config.train.num_steps
            if steps < (step := step_of(checkpoint)):
                raise ConfigError(
                    f"the run is at step {step}; train.num_steps={steps} is behind it: expected"
                    f" more than {step}"
                )
            if ended is not None and not ended.is_solved:
                raise ConfigError(
                    f"{path} has no step left for a change of its options; add {ended.extension}"
                )
        with with_start_folder(directory):
            checked = stack.enter_context(check(config))
            data = read_data(checked)
        yield CheckedRun(checked, data, directory, overrides)


def _end_of(
    directory: RunDirectory, checkpoint: Path, stored_config: Config, config: Config
) -> Ended | None:
    """Return the end of a run whose problems are solved, or that has no step left with `config`."""
    reason = directory.exit_reason()
    if reason == "solved":
        return Ended(stored_config, directory, checkpoint, is_solved=True)
    train = config.train
    if reason != "finished":
        return None
    is_last = step_of(checkpoint) >= train.num_steps
    if not is_last and train.token_budget is not None:
        tokens = read_state(checkpoint)["train_state"]["tokens_generated"]
        is_last = train.is_budget_spent(tokens)
    return Ended(stored_config, directory, checkpoint) if is_last else None


def _is_changed(stored_config: Config, config: Config) -> bool:
    """Return True if options differ on this machine, where `auto` may mean the stored value."""
    pairs = option_differences(stored_config, config).values()
    if not any(value in ("auto", None) for pair in pairs for value in pair):
        return bool(pairs)
    from dapo.start.resolve import resolve_auto  # imports torch

    return resolve_auto(config) != resolve_auto(stored_config)
