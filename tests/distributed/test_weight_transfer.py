"""Laws of weights that travel without a file: the same bytes as by file, and a lost receiver costs nothing but time."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.launcher_contract import Weights
from dapo.core.errors import ConfigError, EngineError
from dapo.distributed.engine_pool import EnginePool, WeightSettings
from dapo.distributed.launch import weight_transfer
from dapo.distributed.protocol import WeightsHandle, WorkerSpec
from dapo.distributed.weight_session import (
    IncomingWeights,
    Location,
    Session,
    decode_handle,
    encode_handle,
    serve_store,
)
from dapo.distributed.weight_transfer import choose_kind
from dapo.engines.engine import WeightSource
from dapo.types import GenerationRequest
from helpers.launchers import SHARED_WORKERS, BorrowedWorker, engine_spec

KINDS = ("broadcast", "ipc")


def weights(version: int = 0) -> Weights:
    """Several types, an empty tensor, one without dimensions, a tied one; 1.1 kB and more."""
    generator = torch.Generator().manual_seed(version)
    made = {
        "large": torch.randn(25, 11, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5 + version, dtype=torch.float64),
        "transposed": torch.randn(5, 3, generator=generator).t(),
    }
    return Weights(made | {"head": made["large"]})


# --- one session


def carry_out(session: Session) -> list[dict[str, Tensor]]:
    """What each receiver gets; every process of the session is a thread."""
    with ThreadPoolExecutor(session.receivers + 1) as threads:
        incoming = [IncomingWeights(session, index) for index in range(1, session.receivers + 1)]
        received = [threads.submit(lambda one=one: dict(one.named_tensors())) for one in incoming]
        session.send(weights())
        return [one.result(60) for one in received]


def session_at(rendezvous: Path | tuple[str, int], kind: Any, **options: Any) -> Session:
    settings: dict[str, Any] = {"receivers": 1, "version": 3, "device_type": "cpu", "timeout_s": 30.0} | options
    return Session(kind, rendezvous, "one", layout=weights().layout(), **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [7, 400, 2**20])
def test_every_receiver_gets_every_bit_whatever_the_size_of_the_buckets(
    kind: str, bucket_bytes: int, tmp_path: Path
) -> None:
    """Tensors are cut by buckets, and several share one."""
    expected = dict(weights().named_tensors())
    for found in carry_out(session_at(tmp_path / "store", kind, receivers=2, bucket_bytes=bucket_bytes)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name], tensor)
        assert found["head"] is found["large"]


def test_processes_of_several_machines_meet_at_a_store() -> None:
    store, address = serve_store(timedelta(seconds=30))
    (found,) = carry_out(session_at(address, "broadcast"))
    assert torch.equal(found["large"], weights().tensors["large"])
    del store


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_does_not_come_is_an_error_within_the_timeout(kind: str, tmp_path: Path) -> None:
    session = session_at(tmp_path / "store", kind, timeout_s=0.5)
    with pytest.raises(EngineError, match=rf"the {kind} of the weights of version 3 failed"):
        dict(IncomingWeights(session, 1).named_tensors())


# --- which way


def test_the_way_follows_from_the_gpus_of_the_processes() -> None:
    cpu, a, b, c = Location("m", ()), Location("m", ("a",)), Location("m", ("b",)), Location("n", ("c",))
    table: list[tuple[Sequence[Location], Sequence[Location], str]] = [
        ([cpu], [cpu], "file"),
        ([a], [cpu], "file"),
        ([a], [a], "ipc"),
        ([a, b], [b, a], "ipc"),
        ([a], [b], "broadcast"),
        ([a, b], [c], "broadcast"),
        ([a, b], [b, c], "file"),  # NCCL refuses two processes on one GPU
        ([a], [c, c], "file"),
    ]
    for senders, receivers, kind in table:
        assert choose_kind("auto", senders, receivers) == kind
        assert choose_kind("file", senders, receivers) == "file"
        assert choose_kind("broadcast", senders, receivers) == "broadcast"


def test_a_way_that_does_not_exist_is_an_error_that_names_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAPO_WEIGHT_TRANSFER", raising=False)
    assert weight_transfer() == "auto"
    monkeypatch.setenv("DAPO_WEIGHT_TRANSFER", "nccl")
    with pytest.raises(ConfigError, match="DAPO_WEIGHT_TRANSFER=nccl: expected auto, file, broadcast, ipc"):
        weight_transfer()


# --- engines in processes


class PublishingLauncher:
    """Hands out warm processes, and notes which versions went by file."""

    def __init__(self) -> None:
        self.published: list[int] = []

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[BorrowedWorker]:
        return SHARED_WORKERS.start(names, specs, together=together)

    def publish_weights(self, source: WeightSource, version: int) -> WeightsHandle:
        self.published.append(version)
        return SHARED_WORKERS.publish_weights(source, version)


@pytest.fixture
def pool_of() -> Iterator[Callable[..., tuple[EnginePool, PublishingLauncher]]]:
    """Makes pools of engines whose answers show which weights they hold."""
    pools: list[EnginePool] = []

    def make(*options: dict[str, Any], **settings: Any) -> tuple[EnginePool, PublishingLauncher]:
        SHARED_WORKERS.release_all()
        launcher: Any = PublishingLauncher()
        specs = [engine_spec("DigestEngine", **each) for each in options]
        pools.append(EnginePool(launcher, specs, **{"log": [].append, **settings}))
        return pools[-1], launcher

    yield make
    for pool in pools:
        pool.close()


def digests(pool: EnginePool, engines: int = 2) -> set[tuple[tuple[int, ...], int]]:
    """What the engines hold, and as which version: one answer of each."""
    pool.submit([GenerationRequest(f"{i}", (i,), 64, 1.0, 1.0, i, (), 0) for i in range(engines)])
    found: list[Any] = []
    while len(found) < engines:
        found += pool.poll()
    return {(tuple(one.token_ids), one.version) for one in found}


@pytest.mark.parametrize("kind", KINDS)
def test_engines_hold_the_same_bits_as_by_file_and_nothing_is_published(pool_of: Any, kind: str) -> None:
    by_file, _ = pool_of({}, {})
    expected = []
    for version in (1, 2):
        by_file.load_weights(weights(version), version)
        expected.append(digests(by_file))
        assert len(expected[-1]) == 1
    directly, launcher = pool_of({}, {}, weights=WeightSettings(kind))
    for version in (1, 2):
        directly.load_weights(weights(version), version)
        assert digests(directly) == expected[version - 1]
    assert launcher.published == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_lost_in_the_middle_of_a_transfer_is_replaced_and_loads_from_a_file(
    pool_of: Any, kind: str, tmp_path: Path
) -> None:
    messages: list[str] = []
    dying = {"ends_at": 2, "mark": str(tmp_path / "mark")}
    pool, launcher = pool_of({}, dying, weights=WeightSettings(kind), log=messages.append)
    held = []
    for version in (1, 2, 3):
        pool.load_weights(weights(version), version)
        held.append(digests(pool))
    by_file, _ = pool_of({}, {})
    for version in (1, 2, 3):
        by_file.load_weights(weights(version), version)
        assert held[version - 1] == digests(by_file)
    assert launcher.published == [2]  # version 3 went to both directly
    assert [message.partition(";")[2] for message in messages] == [" engine-1 is replaced (1 of at most 10 times)"]


def test_an_engine_lost_while_it_samples_gets_the_weights_from_a_file(pool_of: Any) -> None:
    pool, launcher = pool_of({}, {}, weights=WeightSettings("broadcast"))
    pool.load_weights(weights(1), 1)
    expected = digests(pool)
    os.kill(SHARED_WORKERS.running["engine-0"].pid, signal.SIGKILL)
    assert digests(pool) == expected
    assert (launcher.published, pool.restarts) == ([1], 1)


def test_weights_that_the_policy_goes_on_to_change_are_kept_in_a_file(pool_of: Any) -> None:
    pool, launcher = pool_of({}, {}, weights=WeightSettings("broadcast", overlaps_updates=True))
    pool.load_weights(weights(1), 1)
    assert launcher.published == [1]


def test_a_transfer_that_fails_though_all_live_is_not_tried_again(pool_of: Any) -> None:
    class Wrong(Weights):
        """What is sent ends before its layout does; by file it is complete."""

        reads = 0

        def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
            self.reads += 1
            tensors = list(self.tensors.items())
            yield from tensors[:1] if self.reads == 2 else tensors  # the first read looks at the device

    messages: list[str] = []
    pool, launcher = pool_of({}, {}, weights=WeightSettings("broadcast"), log=messages.append)
    pool.load_weights(Wrong(weights(1).tensors), 1)
    held = digests(pool)
    pool.load_weights(weights(1), 2)
    assert {digest for digest, _ in digests(pool)} == {digest for digest, _ in held}
    assert launcher.published == [1, 2]
    assert len(messages) == 1
    assert "('half'" in messages[0]
    assert messages[0].endswith("from now on the engines get their weights by file")


def test_what_names_memory_of_a_gpu_to_another_process_arrives_as_it_was_sent() -> None:
    parts = [1, bytes(range(66)), 2**33, 512, b"/torch_1", 0, b"", True]
    assert decode_handle(encode_handle(parts)) == parts
