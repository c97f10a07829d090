"""Laws of every launcher: calls in order, errors with their cause.

A test file has its launcher take them over.
"""

import os
from array import array
from collections.abc import Iterator
from zlib import crc32

import pytest
import torch

from dapo.core.errors import ConfigError, EngineError, LaunchError, WorkerDied, WorkerFault
from dapo.distributed.channel import Buffers
from dapo.distributed.protocol import Launcher, WorkerSpec
from dapo.policy.hf_io import layout_of
from dapo.types import WeightLayout
from helpers.paths import ROOT, TESTS
from helpers.processes import wait_until_ended

WORKER_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)])}
PROGRAM_ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([*WORKER_ENVIRONMENT.values(), os.environ.get("PYTHONPATH", "")])
}
"""The environment of a program that imports this file."""
SECRETS = {"WANDB_API_KEY": "a-key", "HF_TOKEN": "a-token"}
"""Variables of the environment in which a launcher's workers are started."""
COUNTING_WORKER = WorkerSpec("helpers.fake_workers:CountingWorker", environment=WORKER_ENVIRONMENT)


class Weights:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def layout(self) -> WeightLayout:
        """Tensors that are the same object are tied."""
        first = {id(tensor): name for name, tensor in reversed(self.tensors.items())}
        stored = {
            name: tensor for name, tensor in self.tensors.items() if first[id(tensor)] == name
        }
        return layout_of(
            stored, {n: first[id(t)] for n, t in self.tensors.items() if n not in stored}
        )

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def start(launcher: Launcher, **options: object):
    return launcher.start(
        ["one"], [WorkerSpec(COUNTING_WORKER.factory, options, WORKER_ENVIRONMENT)]
    )[0]


class LauncherContract:
    """`launcher` is a fixture, and `start_in` makes one with another timeout for starts."""

    def test_calls_are_carried_out_in_their_order_and_errors_come_with_their_cause(
        self, launcher: Launcher
    ) -> None:
        worker = start(launcher, start=5)
        futures = [worker.call("add", n) for n in (1, 2, 3)]
        assert [future.result(30) for future in futures] == [6, 8, 11]
        with pytest.raises(ConfigError, match="no such thing"):
            worker.call("refuse").result(120)
        with pytest.raises(WorkerFault, match="ZeroDivisionError: by zero"):
            worker.call("break_down").result(120)
        with pytest.raises(WorkerFault, match="cannot be sent"):
            worker.call("unsendable").result(120)
        with pytest.raises(WorkerFault, match=r"AttributeError.*nonsense"):
            worker.call("nonsense").result(120)
        assert worker.call("add", 1).result(120) == 12
        log = worker.log.read_text()
        assert "before the fall" in log
        assert "Traceback" in log

    def test_buffers_reach_a_worker_byte_by_byte(self, launcher: Launcher) -> None:
        rows = [array("f", [0.5, -1.25]), array("i"), array("q", range(10**6))]
        worker = start(launcher)
        found = worker.call("checksums", Buffers.of(rows)).result(120)
        assert found == [(row.itemsize * len(row), crc32(row)) for row in rows]

    def test_a_worker_that_dies_fails_all_its_calls_with_its_log_tail(
        self, launcher: Launcher
    ) -> None:
        worker = start(launcher)
        futures = [worker.call("end", 7), worker.call("add", 1)]
        for future in futures:
            with pytest.raises(WorkerDied, match=r"one .*; log tail of .*last words"):
                future.result(120)
        with pytest.raises(WorkerDied, match="last words"):
            worker.call("add", 1).result(120)

    def test_a_worker_that_is_ended_fails_its_calls_and_its_process_is_gone(
        self, launcher: Launcher
    ) -> None:
        worker = start(launcher)
        future = worker.call("sleep", 60)
        with pytest.raises(TimeoutError):
            future.result(0.1)
        worker.kill()
        with pytest.raises(WorkerDied, match="one "):
            future.result(120)
        wait_until_ended(worker.pid, timeout_s=30)
        worker.kill()

    def test_an_object_that_cannot_be_made_is_an_error_and_all_of_its_start_end(
        self, launcher: Launcher
    ) -> None:
        with pytest.raises(ConfigError, match="cannot be made"):
            launcher.start(
                ["good", "bad"],
                [
                    COUNTING_WORKER,
                    WorkerSpec("helpers.fake_workers:failing", {}, WORKER_ENVIRONMENT),
                ],
            )

    def test_a_slow_start_is_an_error_that_names_the_time(self, start_in) -> None:
        with pytest.raises(LaunchError, match=r"within [\d.]+ s"):
            start_in(1).start(
                ["slow"], [WorkerSpec("helpers.fake_workers:slow", {}, WORKER_ENVIRONMENT)]
            )

    def test_weights_and_variables_reach_a_worker(self, launcher: Launcher) -> None:
        spec = WorkerSpec(
            COUNTING_WORKER.factory, {}, {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": "3"}
        )
        worker = launcher.start(["x"], [spec])[0]
        assert worker.call("variable", "OMP_NUM_THREADS").result(120) == "3"
        read_weights(launcher, worker)

    def test_a_worker_gets_only_the_secrets_that_its_spec_names(self, launcher: Launcher) -> None:
        spec = WorkerSpec(COUNTING_WORKER.factory, {}, WORKER_ENVIRONMENT, secrets=("HF_TOKEN",))
        for workers, token in (
            (launcher.start(["x"], [spec]), "a-token"),
            ([start(launcher)], None),
        ):
            found = {
                name: workers[0].call("variable", name).result(120) for name in (*SECRETS, "HOME")
            }
            assert found == {"WANDB_API_KEY": None, "HF_TOKEN": token, "HOME": os.environ["HOME"]}


def read_weights(launcher: Launcher, worker) -> None:
    """Two versions can be read, the one before no longer; tied weights have both names."""
    shared = torch.tensor([1.0, 2.0])
    tensors = {
        "embed": shared,
        "head": shared,
        "other": torch.tensor([[3.0]], dtype=torch.bfloat16),
    }
    gone, *handles = [
        launcher.publish_weights(Weights(tensors | {"v": torch.tensor(float(v))}), v)
        for v in (1, 2, 3)
    ]
    assert [handle.version for handle in handles] == [2, 3]
    assert [worker.call("read", handles[1], name).result(120) for name in tensors] == [
        [1, 2],
        [1, 2],
        [[3]],
    ]
    assert [worker.call("read", handle, "v").result(120) for handle in handles] == [2, 3]
    with pytest.raises(EngineError, match="version 1"):
        worker.call("read", gone, "v").result(120)
