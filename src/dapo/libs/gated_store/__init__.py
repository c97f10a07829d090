"""torch's store for processes of several machines, reached only with a secret of their group.

torch's store checks no secret: whoever connects may read and write it. So it listens on one
process's loopback interface, and a gate on the network passes connections on to it once both ends
have proved that they know the secret. Other processes go through the gate from their own loopback
interface. Nothing is encrypted, and loopback is open to a machine's users.
"""

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Gate", "GateError", "connect_store", "require_secret", "serve_store"]

LOOPBACK = "127.0.0.1"
# nothing is sent to it: connecting a UDP socket only selects the local address of the default route
UNROUTED_ADDRESS = ("10.255.255.255", 1)
HANDSHAKE_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.1
PROOF_BYTES = 32  # of nonces and of SHA-256


class GateError(ConnectionError):
    """The gate cannot be reached, refuses the secret, or does not know it."""


@dataclass(frozen=True)
class Gate:
    """The network address through which ranks reach the store, and the secret that they must
    know.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)


def serve_store(timeout: timedelta) -> tuple[Any, Gate]:
    """Open the store behind a gate, until the process ends."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        inner = listener.getsockname()
        handle = listener.detach()
    options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": handle}
    store = dist.TCPStore(LOOPBACK, inner[1], timeout=timeout, **options)
    secret = secrets.token_bytes(PROOF_BYTES)
    listener = socket.create_server((_own_address(), 0))

    def admit(outer: socket.socket) -> socket.socket:
        require_secret(outer, secret)
        return socket.create_connection(inner)

    _forward(listener, admit)
    host, port = listener.getsockname()
    return store, Gate(host, port, secret)


def connect_store(gate: Gate, timeout: timedelta) -> Any:
    """Return the store behind the gate.

    Raises GateError if the gate refuses the secret or does not know it.
    """
    _connect(gate).close()  # so that a refusal is an error here, and not a timeout of the store
    listener = socket.create_server((LOOPBACK, 0))
    _forward(listener, lambda inner: _connect(gate))
    return dist.TCPStore(LOOPBACK, listener.getsockname()[1], is_master=False, timeout=timeout)


def require_secret(peer: socket.socket, secret: bytes) -> None:
    """Exchange proofs with a peer that has connected.

    Raises ConnectionError unless it knows the secret.
    """
    peer.settimeout(HANDSHAKE_TIMEOUT_S)
    nonce = os.urandom(PROOF_BYTES)
    peer.sendall(nonce)
    answer = _receive(peer, 2 * PROOF_BYTES)
    nonces = nonce + answer[:PROOF_BYTES]
    if not hmac.compare_digest(answer[PROOF_BYTES:], _proof(secret, b"rank", nonces)):
        raise ConnectionError("the peer does not know the secret")
    peer.sendall(_proof(secret, b"gate", nonces))


def _connect(gate: Gate) -> socket.socket:
    try:
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(
                socket.create_connection((gate.host, gate.port), HANDSHAKE_TIMEOUT_S)
            )
            nonce = os.urandom(PROOF_BYTES)
            nonces = _receive(peer, PROOF_BYTES) + nonce
            peer.sendall(nonce + _proof(gate.secret, b"rank", nonces))
            if not hmac.compare_digest(
                _receive(peer, PROOF_BYTES), _proof(gate.secret, b"gate", nonces)
            ):
                raise ConnectionError("it does not know the secret of this group")
            stack.pop_all()
            return peer
    except OSError as error:
        raise GateError(
            f"the processes cannot meet at {gate.host}, port {gate.port}: {error}"
        ) from error


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")


def _receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := peer.recv(size - len(data))):
            raise ConnectionError("it closed the connection before the handshake was complete")
        data += piece
    return data


def _forward(listener: socket.socket, connect: Callable[[socket.socket], socket.socket]) -> None:
    """Forward every accepted connection to what `connect` returns for it, in background threads."""

    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer, connect(peer) as target:
            for end in (peer, target):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_copy, args=(target, peer), daemon=True)
            back.start()
            _copy(peer, target)
            back.join()

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                # too many open files, perhaps: a rank that waits is served once some are closed
                time.sleep(ACCEPT_PAUSE_S)
                continue
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, name="rendezvous", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _own_address() -> str:
    """Return the address of this machine on its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(UNROUTED_ADDRESS)
        except OSError:  # no route: a machine without a network
            return LOOPBACK
        return str(probe.getsockname()[0])
