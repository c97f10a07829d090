"""Laws of weights that go from GPU to GPU: they arrive, and one failure, whoever survives it, costs
one line.
"""

import os
import signal
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo.config import Config, GpuShares
from dapo.distributed.engine_pool import EnginePool
from dapo.distributed.local import LocalLauncher
from dapo.distributed.protocol import WorkerSpec
from dapo.distributed.trainer_group import TrainerGroup
from dapo.libs.vllm_weights import WeightSender, WeightTransfer, chunks
from dapo.libs.vllm_weights.sender import plain_segments
from dapo.policy.hf_io import layout_of
from dapo.types import GenerationRequest
from helpers.file_group import FileGroup
from helpers.launchers import ENVIRONMENT
from helpers.tiny_policies import groups_of
from helpers.tiny_runs import tiny

pytestmark = pytest.mark.usefixtures("forked_workers")


class Weights:
    """Of three tensors, in three chunks."""

    def __init__(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        self.tensors = {name: torch.randn(3, 50, generator=generator).bfloat16() for name in "abc"}

    def layout(self) -> Any:
        return layout_of(self.tensors, {})

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    @property
    def token(self) -> int:
        return token_of(self.tensors.items())


def token_of(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """The answer of an engine that has these weights."""
    checksum = 0
    for name, tensor in weights:
        checksum = zlib.crc32(name.encode() + tensor.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum % 197


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(tmp_path / "logs", timeout_s=60)
    yield launcher
    launcher.close()


def pool_of(
    launcher: LocalLauncher,
    folder: Path,
    *,
    engines: int = 2,
    fault: str | None = None,
    **options: Any,
) -> tuple[EnginePool, list[str]]:
    """The last engine has the fault."""
    messages: list[str] = []
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    specs = [
        WorkerSpec(
            "helpers.file_group:ReceivingEngine",
            {"folder": str(folder), "processes": 2, "fault": fault if i == engines - 1 else None},
            environment,
        )
        for i in range(engines)
    ]
    sender = WeightSender(group=lambda: FileGroup(folder), device="cpu", timeout_s=3)
    transfer = WeightTransfer("nccl", sender, processes_per_engine=2, timeout_s=3)
    return EnginePool(launcher, specs, log=messages.append, transfer=transfer, **options), messages


def tokens_of(pool: EnginePool, version: int) -> list[list[int]]:
    """Of every engine: a function of its weights, and whether they came from GPU to GPU."""
    size = len(pool._engines)
    pool.submit(
        [GenerationRequest(f"{version}/{i}", (i,), 2, 1.0, 1.0, 0, ()) for i in range(size)]
    )
    done: list[Any] = []
    while len(done) < size:
        done += pool.poll()
    return [list(one.token_ids) for one in sorted(done, key=lambda one: one.request_id)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 400)


def test_after_the_first_weights_all_come_from_gpu_to_gpu(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    pool, messages = pool_of(launcher, tmp_path)
    for version in range(3):
        weights = Weights(version)
        pool.load_weights(weights, version)
        assert tokens_of(pool, version) == [[weights.token, int(version > 0)]] * 2
    # engines of two processes each, after the trainer's; connected once
    assert sorted((tmp_path / "connected").read_text().splitlines()) == ["1 of 5", "3 of 5"]
    assert messages == []


@pytest.mark.parametrize(
    ("fault", "restarts"), [("connect", 0), ("raise", 1), ("die", 1), ("hang", 1)]
)
def test_after_a_failed_transfer_the_run_continues_with_files_and_one_line(
    launcher: LocalLauncher, tmp_path: Path, fault: str, restarts: int
) -> None:
    pool, messages = pool_of(launcher, tmp_path, fault=fault, max_restarts=0)
    sender = pool._transfer._sender
    for version in range(4):
        weights = Weights(version)
        pool.load_weights(weights, version)
        assert tokens_of(pool, version) == [[weights.token, 0]] * 2
    lines = [message for message in messages if "through files from now on" in message]
    assert len(lines) == 1
    assert pool.restarts == restarts
    assert len(messages) == 1 + restarts
    # the trainer's GPU is as before: no buffer, no group of NCCL
    assert sender._buffer is None
    assert sender._group is None


def test_an_engine_lost_between_transfers_gets_a_file_and_is_connected_again(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    pool, messages = pool_of(launcher, tmp_path)
    for version in range(2):
        pool.load_weights(Weights(version), version)
    pool._engines[0].worker.kill()
    assert tokens_of(pool, 1) == [[Weights(1).token, 0], [Weights(1).token, 1]]
    assert len(messages) == 1
    assert "is replaced" in messages[0]
    pool.load_weights(Weights(2), 2)
    assert tokens_of(pool, 2) == [[Weights(2).token, 1]] * 2
    assert len((tmp_path / "connected").read_text().splitlines()) == 4


@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_lost_while_the_policy_updates_waits_for_the_next_weights(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    pool, messages = pool_of(launcher, tmp_path, reproducible=False)
    for version in range(2):
        pool.load_weights(Weights(version), version)
    requests = [GenerationRequest(f"{i}", (i,), 2, 1.0, 1.0, 0, ()) for i in range(4)]
    pool.submit(requests[:2])
    worker: Any = pool._engines[0].worker
    if hangs:
        pool._engines[0].timeout_s = 3.0
        os.kill(worker.pid, signal.SIGSTOP)
    else:
        worker.kill()
    with monkeypatch.context() as while_updating:
        # as of weights that the trainer ranks have updated since they sent them
        while_updating.setattr(pool, "_load_call", lambda: None)
        done: list[Any] = []
        while len(done) < 1 or pool.restarts < 1:
            done += pool.poll()
    pool.submit(requests[2:])  # go to the engine that has weights
    while len(done) < 3:
        done += pool.poll()
    assert sorted(one.request_id for one in done) == ["1", "2", "3"]
    assert {tuple(one.token_ids) for one in done} == {(Weights(1).token, 1)}
    assert pool.poll() == []
    assert [(one.request_id, list(one.token_ids)) for one in pool.abort(["0"])] == [("0", [])]
    assert len(messages) == 2
    assert "engine-0 waits for the next weights" in messages[1]
    pool.load_weights(Weights(2), 2)
    assert tokens_of(pool, 2) == [[Weights(2).token, 1]] * 2


def test_an_engine_that_has_waited_and_cannot_receive_weights_is_replaced_and_gets_a_file(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    mark.touch()  # no fault yet
    pool, messages = pool_of(launcher, tmp_path, fault="raise", reproducible=False)
    for version in range(2):
        pool.load_weights(Weights(version), version)
    pool.submit([GenerationRequest(f"{i}", (i,), 2, 1.0, 1.0, 0, ()) for i in range(2)])
    pool._engines[1].worker.kill()
    with monkeypatch.context() as while_updating:
        while_updating.setattr(pool, "_load_call", lambda: None)
        while pool.restarts < 1:
            pool.poll()
    pool.abort(list(pool.in_flight))
    mark.unlink()
    pool.load_weights(Weights(2), 2)
    assert tokens_of(pool, 2) == [[Weights(2).token, 0]] * 2
    assert pool.restarts == 2
    assert sum("through files from now on" in message for message in messages) == 1


def test_a_rank_without_an_engine_on_its_gpu_shares_no_buffer() -> None:
    """Torch would keep one that is never read, in each step another."""
    sender = WeightSender(rank=1, device="cpu")
    sender.call("open", False)
    sender.call("connect", 2)  # with one process of an engine, which is on the GPU of rank 0
    layout, handle = sender.call("begin", False, Weights(0))
    assert handle == {}
    for index in range(len(chunks.chunks_of(layout.tensors))):
        sender.call("send", index)
    assert sender._buffer is None
    sender.call("end")


def test_ranks_write_no_file_of_weights_that_they_have_updated_since(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.device=cpu", "distributed.trainer_ranks=2")
    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(Config, "gpu_shares", lambda self, gpus: GpuShares(transfer="nccl"))
        group = TrainerGroup(config, launcher)
    before: Any = group.weights(version=0)
    assert before.export().version == 0
    samples = [
        replace(one, prompt_ids=(1, 2, 3), response_ids=(4, 5, 6, 7))
        for one in groups_of([(3, (4, 4))])
    ]
    group.update(samples, step=1)
    after: Any = group.weights(version=1)
    assert before.export() is None
    assert after.export().version == 1
    group.close()


@pytest.mark.parametrize(
    ("options", "transfer"),
    [
        (["schedule=sync"], "nccl"),
        (["schedule=async", "rollout.clock=load"], "nccl"),
        (["schedule=async", "rollout.clock=history"], None),
        (["schedule=async", "rollout.clock=load", "distributed.trainer_ranks=1"], None),
    ],
)
def test_weights_are_sent_where_a_lost_engine_can_get_its_own_or_may_wait(
    options: list[str], transfer: str | None
) -> None:
    layout = ["rollout.engine=vllm", "rollout.engines=4", "distributed.trainer_ranks=4"]
    config = tiny("train.device=cuda", *layout, *options)
    assert config.gpu_shares(8).transfer == transfer


def test_a_trainer_whose_end_fails_continues_with_files(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    pool, messages = pool_of(launcher, tmp_path, engines=1)
    pool.load_weights(Weights(0), 0)

    class Broken(FileGroup):
        def broadcast(self, buffer: Any) -> None:
            raise RuntimeError("unhandled cuda error")

    groups: list[Broken] = []
    pool._transfer._sender._make_group = lambda: groups.append(Broken(tmp_path)) or groups[-1]
    pool.load_weights(Weights(1), 1)
    assert tokens_of(pool, 1) == [[Weights(1).token, 0]]
    assert "unhandled cuda error" in messages[0]
    assert groups[0].is_aborted


def test_trainer_ranks_that_could_send_their_weights_write_a_file_wherever_one_is_needed(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.device=cpu", "distributed.trainer_ranks=2")
    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(Config, "gpu_shares", lambda self, gpus: GpuShares(transfer="nccl"))
        group = TrainerGroup(config, launcher)
    pool, messages = pool_of(launcher, tmp_path, engines=1)
    # the first, one that a rank without NCCL cannot send, and all after that
    for version in range(3):
        weights: Any = group.weights(version=version)
        pool.load_weights(weights, version)
        assert tokens_of(pool, version) == [[token_of(weights.export().named_tensors()), 0]]
        assert sum("through files from now on" in message for message in messages) == min(
            version, 1
        )
    group.close()


@pytest.mark.parametrize(
    "settings", ["", "max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64"]
)
def test_a_buffer_has_plain_segments_and_what_comes_after_it_those_of_before(
    monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    """By the settings in force, from the environment or from the process itself."""
    in_force = [settings]
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: in_force[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", in_force.append)
    within = "expandable_segments:False" if "expandable" in settings else settings
    for error in (None, torch.OutOfMemoryError("no room for the buffer")):
        try:
            with plain_segments():
                assert in_force[-1] == within
                if error is not None:
                    raise error
        except torch.OutOfMemoryError:
            pass
        assert in_force[-1] == settings
