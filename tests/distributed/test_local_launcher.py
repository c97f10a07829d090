"""Laws of processes on this machine, and that nothing of them is left behind."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from contracts.launcher_contract import SECRETS, LauncherContract, Weights, start
from dapo.core.errors import EngineError, WorkerDied
from dapo.distributed.local import LocalLauncher
from dapo.distributed.weight_files import WeightsFolder
from dapo.types import WeightLayout
from helpers.fork_server import ForkServer
from helpers.processes import is_alive, wait_until_ended


@pytest.fixture
def start_in(tmp_path: Path) -> Iterator[Callable[[float], LocalLauncher]]:
    made: list[LocalLauncher] = []

    def make(timeout_s: float) -> LocalLauncher:
        made.append(LocalLauncher(tmp_path / "logs", timeout_s=timeout_s))
        return made[-1]

    yield make
    for launcher in made:
        launcher.close()


@pytest.fixture
def launcher(
    start_in: Callable[[float], LocalLauncher], monkeypatch: pytest.MonkeyPatch
) -> LocalLauncher:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return start_in(60)


class TestLocalLauncherContract(LauncherContract):
    """All of them."""


def test_the_exit_reason_of_a_process_names_its_code_or_signal(launcher: LocalLauncher) -> None:
    worker = start(launcher)
    with pytest.raises(WorkerDied, match="one exited with code 7"):
        worker.call("end", 7).result(120)
    worker = start(launcher)
    future = worker.call("sleep", 60)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="ended by SIGKILL"):
        future.result(120)


def test_close_leaves_no_process_and_no_weights(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, timeout_s=60)
    worker = start(launcher)
    handle = launcher.publish_weights(Weights({"a": torch.ones(2)}), 1)
    launcher.close()
    assert not is_alive(worker.pid)
    assert not handle.path.exists()


def test_a_worker_does_not_outlive_its_controller(fork_server: ForkServer, tmp_path: Path) -> None:
    program = (
        "import pathlib, time; from dapo.distributed.local import LocalLauncher;"
        "from contracts.launcher_contract import start;"
        f"w = start(LocalLauncher(pathlib.Path({str(tmp_path)!r}), timeout_s=60));"
        "w.call('sleep', 60); print(w.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    ended, _ = fork_server.run(
        program,
        program="helpers.commands:run_code",
        output=log,
        file=str(log),
        lines=1,
        signals=[(0, signal.SIGKILL)],
    )
    assert ended == -signal.SIGKILL
    wait_until_ended(int(log.read_text()))


def test_tied_weights_are_written_once(launcher: LocalLauncher) -> None:
    shared = torch.ones(1000)
    handle = launcher.publish_weights(Weights({"embed": shared, "head": shared}), 4)
    assert 4000 < handle.path.stat().st_size < 5000


def test_weights_that_are_made_one_by_one_in_the_same_memory_are_not_taken_for_tied() -> None:
    class InOneBuffer:
        def layout(self) -> WeightLayout:
            return WeightLayout(dict.fromkeys("abc", ("float32", (3, 2))))

        def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(2, 3)
            for value, name in enumerate("abc"):
                yield name, buffer.fill_(value).t()  # not contiguous, so what is kept is a copy

    folder = WeightsFolder()
    found = dict(folder.write(InOneBuffer(), 1).named_tensors())
    assert {name: tensor.unique().tolist() for name, tensor in found.items()} == {
        "a": [0],
        "b": [1],
        "c": [2],
    }
    folder.close()


def test_the_last_two_versions_of_the_weights_can_be_read() -> None:
    folder = WeightsFolder()
    handles = [folder.write(Weights({"a": torch.full((2,), float(v))}), v) for v in range(3)]
    assert [dict(h.named_tensors())["a"][0].item() for h in handles[1:]] == [1.0, 2.0]
    with pytest.raises(EngineError, match="version 0 cannot be read"), handles[0].open():
        pass
    os.replace(handles[1].path, handles[2].path)
    with (
        pytest.raises(EngineError, match="holds weights of version 1, expected 2"),
        handles[2].open(),
    ):
        pass
    folder.close()


def test_weights_that_a_killed_controller_left_in_shared_memory_are_removed(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    program = (
        "import os, pathlib, signal; from dapo.distributed.weight_files import WeightsFolder;kept"
        f" = WeightsFolder(pathlib.Path({str(folder)!r})); kept.path; os.kill(os.getpid(),"
        " signal.SIGKILL)"
    )
    code, _ = fork_server.run(program, program="helpers.commands:run_code", output=tmp_path / "log")
    assert code == -signal.SIGKILL
    (left,) = folder.iterdir()
    mine = WeightsFolder(folder)
    another = WeightsFolder(folder)
    assert mine.path.is_dir()
    assert not left.exists()
    assert another.path != mine.path
    assert mine.path.is_dir()  # its owner lives
    mine.close()
    another.close()
    assert not list(folder.iterdir())
