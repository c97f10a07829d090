"""Whole runs of `schedule: one_step_off` whose engine samples in a thread of the process that
trains.

An engine in a process of its own gives the same responses and takes seconds to start.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dapo.config import Config, dump_config, load_config
from dapo.core.errors import DapoError
from dapo.runs.checkpoints import step_of
from dapo.runs.console import ProgressDisplay
from dapo.runs.directory import RunDirectory
from dapo.start.build import build
from dapo.start.check import open_audit, open_environment
from dapo.start.read import Inputs
from dapo.training.checkpointing import restore
from dapo.training.saved_state import is_logged
from dapo.training.signals import signals_as_requests
from dapo.training.state import Run, TrainState
from dapo.training.train import train
from helpers.finished_runs import cut_copy
from helpers.tiny_runs import inputs_of, tiny

ONE_STEP_OFF = ("schedule=one_step_off", "rollout.engines=1")


def async_config(*overrides: str) -> Config:
    return tiny(*ONE_STEP_OFF, *overrides)


def run_or_resume(
    path: Path, config: Config, *, change: Callable[[Run], None] = lambda training_run: None
) -> TrainState:
    """What `dapo train` and `dapo resume` do; `change` may replace parts of the run."""
    with open_audit(config) as audit, open_environment(config) as environment:
        inputs = inputs_of(config.changed("rollout", engines=0), audit, environment)
        return _run_or_resume(path, inputs, config.rollout.engines, change)


def _run_or_resume(
    path: Path, inputs: Inputs, engines: int, change: Callable[[Run], None]
) -> TrainState:
    config = inputs.config.changed("rollout", engines=engines)
    run = (
        RunDirectory(path) if path.exists() else RunDirectory.create(path, dump_config(config), {})
    )
    display = ProgressDisplay(config.train.num_steps)
    with run.lock():
        run.checkpoints.clear_leftovers()
        checkpoint = run.checkpoints.latest(warn=print)
        if checkpoint is None:
            run.truncate_after(-1)
        else:
            run.truncate_after(step_of(checkpoint), is_logged=is_logged(checkpoint))
            run.checkpoints.drop_old(step_of(checkpoint), config.train.keep_checkpoints)
        with (
            signals_as_requests() as request,
            build(inputs, run, display, first_step=1) as training_run,
        ):
            training_run.stop = request
            training_run.config = config
            change(training_run)
            if checkpoint:
                restore(training_run, checkpoint)
            try:
                train(training_run)
            finally:
                training_run.tracker.close()
    return training_run.state


def main(arguments: Sequence[str]) -> None:
    """A program for the fork server: RUN_DIR [key=value ...]; continues what is there."""
    path = Path(arguments[0])
    config = (
        load_config(path / "config.yaml")
        if (path / "config.yaml").exists()
        else async_config(*arguments[1:])
    )
    try:
        run_or_resume(path, config)
    except DapoError as error:
        print(error)
        sys.exit(error.exit_code)


def resumed_from(whole: Path, run: Path, *, step: int) -> None:
    """Make `run` a copy of the run `whole` as it was when step `step` was saved, and resume it."""
    cut_copy(whole, run, step=step)
    run_or_resume(run, load_config(run / "config.yaml"))
