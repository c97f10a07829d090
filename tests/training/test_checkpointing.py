"""Checkpoints are written beside training; the best is kept; what fails is told, tried again, in
the end fatal.
"""

import ast
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dapo
from dapo.cli.train import start_run
from dapo.core.errors import TrainerLost
from dapo.runs.directory import RunDirectory
from dapo.training.checkpoint_writer import MAX_FAILED_SAVES, CheckpointWriter, StorageError
from dapo.training.checkpointing import save_after_failure
from dapo.training.state import TrainState
from helpers.tiny_runs import metrics, saved_steps, tiny


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "", {})


def save(run: RunDirectory, step: int, write: Callable[[Path], object]) -> Callable[[], Path]:
    return lambda: run.checkpoints.save(step, write, 2)  # type: ignore[arg-type]


def test_the_caller_goes_on_while_a_checkpoint_is_written_and_the_next_waits_for_it(
    run: RunDirectory,
):
    messages: list[str] = []
    writer = CheckpointWriter(run, log=messages.append)
    may_end = threading.Event()
    writer.start(1, save(run, 1, lambda d: (may_end.wait(10), (d / "w").write_text("1"))))
    writer.poll()
    assert run.checkpoints.newest_step() is None
    may_end.set()
    writer.start(2, save(run, 2, lambda d: (d / "w").write_text("2")))
    assert run.checkpoints.newest_step() in (1, 2)
    writer.join()
    assert saved_steps(run.path) == ["step_000001", "step_000002"]
    assert messages == []


def test_failures_are_logged_counted_tolerated_and_in_the_end_fatal(run: RunDirectory):
    messages: list[str] = []
    writer = CheckpointWriter(run, log=messages.append)

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))

    writer.start(1, save(run, 1, full))
    writer.join()
    assert writer.has_failed
    where = run.checkpoints.folder / ".step_000001.tmp"
    reason = f"could not be written (No space left on device: {where})"
    assert messages == [
        f"the checkpoint of step 1 {reason}; there is no earlier one; training continues, attempt 2"
        " of 5 follows"
    ]
    writer.start(2, save(run, 2, lambda d: (d / "w").write_text("2")))
    writer.join()
    assert not writer.has_failed
    for step in range(3, 2 + MAX_FAILED_SAVES):
        writer.start(step, save(run, step, full))
        writer.join()
    writer.start(7, save(run, 7, full))
    with pytest.raises(
        StorageError, match="the checkpoint of step 2 is kept; that was attempt 5 in a row"
    ) as error:
        writer.join()
    assert error.value.exit_code == 1
    assert saved_steps(run.path) == ["step_000002"]


def test_a_run_that_has_lost_its_trainer_waits_for_the_checkpoint_at_work(run: RunDirectory):
    messages: list[str] = []
    writer = CheckpointWriter(run, log=messages.append)
    may_end = threading.Event()
    writer.start(2, save(run, 2, lambda d: (may_end.wait(10), (d / "w").write_text("2"))))
    training_run: Any = SimpleNamespace(
        config=tiny("train.num_steps=5"),
        state=TrainState(step=3, pending_metrics=None),
        checkpoints=writer,
        directory=run,
        tracker=SimpleNamespace(message=messages.append),
    )
    release = threading.Timer(0.2, may_end.set)
    release.start()
    save_after_failure(training_run, TrainerLost("gone"))
    release.join()
    assert [path.name for path in run.checkpoints.folder.iterdir()] == ["step_000002"]
    assert messages == [f"saved: step 2 of 5; continue with: dapo resume {run.path}"]


def test_what_is_no_fault_of_the_disk_is_raised_as_it_is(run: RunDirectory):
    writer = CheckpointWriter(run, log=print)
    writer.start(1, save(run, 1, lambda d: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        writer.join()


def test_the_best_checkpoint_outlives_the_newest(run: RunDirectory):
    for step, accuracy in enumerate([0.5, 0.75, None, 0.75, 0.25, 0.5, None], start=1):
        run.checkpoints.save(step, lambda d: (d / "w").touch(), 2, accuracy=accuracy)
    assert saved_steps(run.path) == ["step_000004", "step_000006", "step_000007"]
    run.checkpoints.save(8, lambda d: (d / "w").touch(), 2)
    assert saved_steps(run.path) == ["step_000004", "step_000007", "step_000008"]


def test_a_run_keeps_the_checkpoint_of_its_best_evaluation(tmp_path: Path):
    options = (
        "train.save_every=1",
        "train.eval_every=1",
        "train.keep_checkpoints=1",
        "optim.lr=0.01",
    )
    start_run(tiny(*options, "train.num_steps=4"), run_dir=tmp_path / "r", config_name="t")
    accuracy = {row["step"]: row["eval/sums/accuracy"] for row in metrics(tmp_path / "r")[1:]}
    best = max(accuracy, key=lambda step: (accuracy[step], step))
    assert saved_steps(tmp_path / "r") == sorted({f"step_{best:06d}", "step_000004"})


OF_OWN_PROCESSES = {
    # messages between a run and its workers, over a socket that a worker inherits
    "distributed/channel.py": {"pickle"},
    # compiled tests reach the sandbox from the process that compiled them, and are run there anyway
    "libs/code_sandbox/confined/test_runner.py": {"marshal"},
    "libs/code_sandbox/code_tests.py": {"marshal"},
}
"""Modules that exchange such bytes with processes that dapo itself has started."""


def test_no_module_can_unpickle():
    """A pickle runs the code that is in it; a checkpoint may come from anywhere."""
    dangerous = {
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "joblib",
        "shelve",
        "marshal",
        "torch.load",
        "allow_pickle",
    }
    found = []
    package = Path(dapo.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(word.rpartition(".")[2] in text for word in dangerous):
            continue
        for node in ast.walk(ast.parse(text)):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and not all(
                alias.name.endswith("Error") for alias in node.names
            ):
                names.add(node.module or "")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names.add(ast.unparse(node))
            names |= {node.arg or ""} if isinstance(node, ast.keyword) else set()
            name = path.relative_to(package).as_posix()
            found += [
                f"{name}: {each}" for each in names & dangerous - OF_OWN_PROCESSES.get(name, set())
            ]
    assert found == []
