"""Laws of processes on this machine: calls in order, errors with their cause, nothing left behind."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dapo.distributed.local import LocalLauncher, LocalWorker
from dapo.distributed.weights import WeightsFolder
from dapo.distributed.worker import Blueprint, answer
from dapo.errors import ConfigError, EngineError, LaunchError, WorkerDied, WorkerFault


class Recorder:
    """What the workers of this file hold."""

    def __init__(self, start: int = 0) -> None:
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def refuse(self) -> None:
        raise ConfigError("no such thing")

    def break_down(self) -> None:
        print("before the fall", flush=True)
        raise ZeroDivisionError("by zero")

    def end(self, code: int) -> None:
        print("last words", flush=True)
        os._exit(code)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def read(self, handle, name: str) -> list[float]:
        return dict(handle.open().named_tensors())[name].tolist()


def failing(**_: object) -> None:
    raise ConfigError("cannot be made")


def slow() -> Recorder:
    time.sleep(60)
    return Recorder()


BLUEPRINT = Blueprint("test_local_workers:Recorder", environment={"PYTHONPATH": str(Path(__file__).parent)})


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(tmp_path / "logs", timeout_s=60)
    yield launcher
    launcher.close()


def start(launcher: LocalLauncher, **options: object) -> LocalWorker:
    return launcher.start(["one"], [Blueprint(BLUEPRINT.factory, options, BLUEPRINT.environment)])[0]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_calls_are_carried_out_in_their_order(launcher: LocalLauncher) -> None:
    worker = start(launcher, start=5)
    futures = [worker.call("add", n) for n in (1, 2, 3)]
    assert [answer(f, timeout_s=30, what="one") for f in futures] == [6, 8, 11]


def test_an_error_for_people_comes_as_itself_and_the_worker_goes_on(launcher: LocalLauncher) -> None:
    worker = start(launcher)
    with pytest.raises(ConfigError, match="no such thing"):
        worker.call("refuse").result(30)
    with pytest.raises(WorkerFault, match="ZeroDivisionError: by zero"):
        worker.call("break_down").result(30)
    assert worker.call("add", 1).result(30) == 1
    assert "before the fall" in worker.log.read_text()


def test_a_worker_that_dies_fails_all_its_calls_with_its_last_words(launcher: LocalLauncher) -> None:
    worker = start(launcher)
    futures = [worker.call("end", 7), worker.call("add", 1)]
    for future in futures:
        with pytest.raises(WorkerDied, match=r"one exited with code 7; the last of .*last words"):
            future.result(30)
    with pytest.raises(WorkerDied):
        worker.call("add", 1).result(30)


def test_a_killed_worker_is_named_with_its_signal(launcher: LocalLauncher) -> None:
    worker = start(launcher)
    future = worker.call("sleep", 60)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="ended by SIGKILL"):
        future.result(30)


def test_no_answer_in_time_is_an_error_that_names_the_option(launcher: LocalLauncher) -> None:
    worker = start(launcher)
    with pytest.raises(WorkerDied, match=r"no answer within 0\.1 s.*call_timeout_s"):
        answer(worker.call("sleep", 60), timeout_s=0.1, what="one")
    worker.kill()


def test_an_object_that_cannot_be_made_is_told_and_all_of_its_start_end(launcher: LocalLauncher) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        launcher.start(["good", "bad"], [BLUEPRINT, Blueprint("test_local_workers:failing", {}, BLUEPRINT.environment)])


def test_a_slow_start_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, timeout_s=0.5)
    with pytest.raises(LaunchError, match=r"0\.5 s \(distributed\.start_timeout_s\)"):
        launcher.start(["slow"], [Blueprint("test_local_workers:slow", {}, BLUEPRINT.environment)])


def test_variables_are_set_before_the_interpreter_starts(launcher: LocalLauncher) -> None:
    blueprint = Blueprint(BLUEPRINT.factory, {}, {**BLUEPRINT.environment, "OMP_NUM_THREADS": "1"})
    assert launcher.start(["x"], [blueprint])[0].call("variable", "OMP_NUM_THREADS").result(30) == "1"


def test_close_leaves_no_process_and_no_weights(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path, timeout_s=60)
    worker = start(launcher)
    handle = launcher.share(Weights({"a": torch.ones(2)}), 1)
    launcher.close()
    assert not is_alive(worker.pid)
    assert not handle.path.exists()


def test_a_worker_does_not_outlive_its_controller(tmp_path: Path) -> None:
    import subprocess

    program = (
        "import sys, pathlib, time; from dapo.distributed.local import LocalLauncher; import test_local_workers as t;"
        f"w = t.start(LocalLauncher(pathlib.Path({str(tmp_path)!r}), timeout_s=60));"
        "w.call('sleep', 60); print(w.pid, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


class Weights:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def test_weights_reach_a_worker_with_both_names_of_a_tied_one(launcher: LocalLauncher) -> None:
    shared = torch.tensor([1.0, 2.0])
    handle = launcher.share(Weights({"embed": shared, "head": shared, "other": torch.tensor([3.0])}), 4)
    worker = start(launcher)
    assert [worker.call("read", handle, name).result(30) for name in ("embed", "head", "other")] == [
        [1, 2],
        [1, 2],
        [3],
    ]
    assert handle.path.stat().st_size < 1000


def test_weights_that_are_made_one_by_one_in_the_same_memory_are_not_taken_for_tied() -> None:
    class InOneBuffer:
        def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(2, 3)
            for value, name in enumerate("abc"):
                yield name, buffer.fill_(value).t()  # not contiguous, so what is kept is a copy

    folder = WeightsFolder()
    found = dict(folder.write(InOneBuffer(), 1).open().named_tensors())
    assert {name: tensor.unique().tolist() for name, tensor in found.items()} == {"a": [0], "b": [1], "c": [2]}
    folder.close()


def test_the_last_two_versions_of_the_weights_can_be_read() -> None:
    folder = WeightsFolder()
    handles = [folder.write(Weights({"a": torch.full((2,), float(v))}), v) for v in range(3)]
    assert [dict(h.open().named_tensors())["a"][0].item() for h in handles[1:]] == [1.0, 2.0]
    with pytest.raises(EngineError, match="version 0 cannot be read"):
        handles[0].open()
    os.replace(handles[1].path, handles[2].path)
    with pytest.raises(EngineError, match="holds weights of version 1, expected 2"):
        handles[2].open()
    folder.close()
