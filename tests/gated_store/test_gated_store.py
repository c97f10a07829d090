"""Laws of the meeting of trainer ranks on several machines: a secret first, with real processes and
sockets.
"""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dapo.distributed.local import LocalLauncher
from dapo.distributed.protocol import Worker
from dapo.distributed.trainer_group import trainer_specs
from dapo.libs import gated_store
from dapo.libs.gated_store import PROOF_BYTES, Gate, GateError, connect_store
from helpers.sockets import listeners
from helpers.tiny_runs import tiny

TIMEOUT = timedelta(seconds=5)


def rest_of(peer: socket.socket) -> bytes:
    """The next byte; none where the gate closes the connection."""
    peer.settimeout(5)
    try:
        return peer.recv(1)
    except ConnectionResetError:
        return b""


def answer_one(impostor: socket.socket) -> None:
    """Take part in one handshake without the secret."""
    with impostor.accept()[0] as peer:
        peer.sendall(os.urandom(PROOF_BYTES))
        peer.recv(2 * PROOF_BYTES)
        peer.sendall(os.urandom(PROOF_BYTES))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Two ranks in processes of their own, which have not met yet."""
    specs = trainer_specs(tiny("distributed.trainer_ranks=2"), ())
    launcher = LocalLauncher(tmp_path_factory.mktemp("logs"), timeout_s=60)
    yield list(launcher.start(["trainer-0", "trainer-1"], specs))
    launcher.close()


@pytest.fixture(scope="module")
def gate(ranks: list[Worker]) -> Gate:
    gate: Gate = ranks[0].call("open_gate").result(60)
    return gate


def test_the_store_listens_on_loopback_and_only_its_gate_on_the_network(
    ranks: list[Any], gate: Gate
) -> None:
    ports = {found.port: found.address for found in listeners({ranks[0].pid}) if found.port}
    assert ports.pop(gate.port) == gate.host
    assert set(ports.values()) == {"127.0.0.1"}
    assert repr(gate.secret) not in repr(gate)


def test_a_stranger_reads_and_writes_nothing_through_the_gate(gate: Gate) -> None:
    with pytest.raises(dist.DistError):
        dist.TCPStore(gate.host, gate.port, is_master=False, timeout=timedelta(seconds=1))
    for guess in (b"\0" * 2 * PROOF_BYTES, os.urandom(2 * PROOF_BYTES)):
        with socket.create_connection((gate.host, gate.port), 5) as peer:
            assert len(peer.recv(PROOF_BYTES)) == PROOF_BYTES
            peer.sendall(guess)
            assert rest_of(peer) == b""


def test_a_rank_of_another_group_is_refused_with_the_address(gate: Gate) -> None:
    with pytest.raises(
        GateError, match=rf"cannot meet at {gate.host}, port {gate.port}: .*before the handshake"
    ):
        connect_store(replace(gate, secret=b"another" * 5), TIMEOUT)


def test_a_gate_that_does_not_know_the_secret_gets_no_connection(gate: Gate) -> None:
    """It may have taken the address of a rank that died."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        found = replace(gate, host="127.0.0.1", port=impostor.getsockname()[1])
        threading.Thread(target=answer_one, args=(impostor,), daemon=True).start()
        with pytest.raises(GateError, match="does not know the secret"):
            connect_store(found, TIMEOUT)


def test_an_answer_of_one_connection_is_refused_in_the_next(gate: Gate) -> None:
    """Replayed and reflected proofs are worth nothing, because each side has a nonce and a role."""
    with socket.create_connection((gate.host, gate.port), 5) as first:
        nonce = first.recv(PROOF_BYTES)
        valid = gated_store._proof(gate.secret, b"rank", nonce + nonce)
        first.sendall(nonce + valid)
        reply = first.recv(PROOF_BYTES)
        assert reply == gated_store._proof(gate.secret, b"gate", nonce + nonce)
    for replayed in (valid, reply):
        with socket.create_connection((gate.host, gate.port), 5) as second:
            second.recv(PROOF_BYTES)
            second.sendall(nonce + replayed)
            assert rest_of(second) == b""


class FullAtFirst:
    """A listener of a process whose files are all open when the first two connections come."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.num_refused = 0

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> Any:
        if self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()


def test_a_gate_that_may_open_no_more_files_serves_the_rank_later() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as outer,
        socket.create_server(("127.0.0.1", 0)) as store,
    ):
        listener: Any = FullAtFirst(outer)
        gated_store._forward(listener, lambda peer: socket.create_connection(store.getsockname()))
        store.settimeout(5)
        with socket.create_connection(outer.getsockname(), 5) as rank:
            rank.sendall(b"x")
            with store.accept()[0] as served:
                served.settimeout(5)
                assert served.recv(1) == b"x"
        assert listener.num_refused == 2


def test_silent_strangers_do_not_keep_ranks_from_meeting(
    ranks: list[Worker], gate: Gate, tmp_path: Path
) -> None:
    """The last test of this group: the two ranks meet through the gate and gather their weights."""
    strangers = [socket.create_connection((gate.host, gate.port), 5) for _ in range(20)]
    met = [rank.call("init_process_group", gate, timeout_s=60.0) for rank in ranks]
    for future in met:
        future.result(60)
    exported = [rank.call("export_weights", tmp_path / "weights.safetensors", 1) for rank in ranks]
    assert [future.result(60) for future in exported] == [
        (tmp_path / "weights.safetensors").stat().st_size,
        0,
    ]
    for stranger in strangers:
        stranger.close()
