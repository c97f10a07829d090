"""Finished runs of the tiny model, each made when the first test asks for it.

Many tests read them: a test that changes a run, or continues it, copies it first.
"""

import shutil
from pathlib import Path

import pytest

from helpers.forked_workers import WorkerForks

SAVES = ("train.num_steps=4", "train.save_every=1", "train.keep_checkpoints=9")
"""Four steps with a checkpoint after each."""
LORA = ("model.lora={rank: 2}", "dynamic_sampling.predict=true")


@pytest.fixture(scope="session")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all finished runs."""
    return tmp_path_factory.mktemp("finished")


def make_finished(path: Path, forks: WorkerForks, *overrides: str) -> Path:
    """Train a run of configs/tiny.yaml with these options, with forked workers."""
    from dapo.cli.train import start_run  # imports torch
    from helpers.tiny_runs import tiny

    with forks.stand_in():
        start_run(tiny(*overrides), run_dir=path, config_name="tiny")
    return path


@pytest.fixture(scope="session")
def sync_run(finished_folder: Path, _worker_forks: WorkerForks) -> Path:
    """A run of EVENTFUL and SAVES, evaluated after steps 0, 3 and 4 with two responses to each
    problem.
    """
    from helpers.tiny_runs import EVENTFUL

    options = (*EVENTFUL, *SAVES, "eval.samples_per_problem=2")
    return make_finished(finished_folder / "sync", _worker_forks, *options)


@pytest.fixture(scope="session")
def async_run(finished_folder: Path) -> Path:
    """A run of EVENTFUL and SAVES, one step off, whose engine samples in a thread."""
    from helpers.async_runs import async_config, run_or_resume
    from helpers.tiny_runs import EVENTFUL

    path = finished_folder / "async"
    run_or_resume(path, async_config(*EVENTFUL, *SAVES))
    return path


@pytest.fixture(scope="session")
def lora_run(finished_folder: Path, _worker_forks: WorkerForks) -> Path:
    """A run of EVENTFUL and SAVES that trains adapters and predicts problems."""
    from helpers.tiny_runs import EVENTFUL

    return make_finished(finished_folder / "lora", _worker_forks, *EVENTFUL, *SAVES, *LORA)


@pytest.fixture(scope="session")
def episode_run(finished_folder: Path, _worker_forks: WorkerForks) -> Path:
    """A run of one step of episodes."""
    from helpers.view_runs import EPISODES, make_run

    with _worker_forks.stand_in():
        return make_run(finished_folder / "episodes", *EPISODES)


def cut_copy(run: Path, path: Path, *, step: int) -> Path:
    """Copy a run without its checkpoints after `step`, as a crash after that step leaves it."""
    shutil.copytree(run, path)
    for checkpoint in (path / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    return path
