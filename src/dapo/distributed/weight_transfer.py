"""Weights straight from a trainer's memory into the engines': who sends to whom, and what happens where that fails."""

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from dapo.core.errors import EngineError, WorkerDied
from dapo.distributed.protocol import Worker
from dapo.distributed.weight_files import WeightsFile
from dapo.distributed.weight_session import (
    TRANSFER_TIMEOUT_S,
    IncomingWeights,
    Kind,
    Location,
    Session,
    own_location,
    serve_store,
)
from dapo.engines.engine import WeightSource
from dapo.types import WeightLayout


def choose_kind(wanted: str, senders: Sequence[Location], receivers: Sequence[Location]) -> Kind:
    """How weights travel from `senders[0]`, or, over the memory of a GPU, from the sender that shares it.

    `auto` is `file` unless all of them hold weights on GPUs; `ipc` where each receiver's GPU is a sender's too;
    `broadcast` where no GPU has two processes, which NCCL refuses; else `file`.
    """
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if not all(one.gpus for one in (*senders, *receivers)):
        return "file"
    if all(receiver in senders for receiver in receivers):
        return "ipc"
    used = [one.gpus for one in (*senders, *receivers)]
    return "broadcast" if len(set(used)) == len(used) else "file"


class WeightSender(Protocol):
    """A version of the weights in the memory of one or several processes, each of which can send all of it."""

    @property
    def locations(self) -> Sequence[Location]:
        """Of the processes that can send."""

    def layout(self) -> WeightLayout:
        """Names, types and shapes of the weights."""

    def file(self) -> WeightSource:
        """The weights for those who get them by file. Raises EngineError where the version is gone."""

    def address(self) -> tuple[str, int]:
        """Host and port of a store of the first process, through which processes of several machines meet."""

    def send(self, sessions: "Sequence[Session | None]") -> list[str]:
        """Have each process carry out its session; returns what failed."""


class LocalSender:
    """Weights of this process, which is the only one that sends."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        _, first = next(iter(weights.named_tensors()))
        self.locations: Sequence[Location] = [own_location(first.device.type)]
        self._store: Any = None

    def layout(self) -> WeightLayout:
        """Names, types and shapes of the weights."""
        return self._weights.layout()

    def file(self) -> WeightSource:
        """The weights themselves, as they are at present."""
        return self._weights

    def address(self) -> tuple[str, int]:
        """Host and port of a new store of this process."""
        self._store, address = serve_store(timedelta(seconds=TRANSFER_TIMEOUT_S))
        return address

    def send(self, sessions: "Sequence[Session | None]") -> list[str]:
        """Carry out the session; returns what failed."""
        (session,) = sessions
        try:
            if session is not None:
                session.send(self._weights)
        except EngineError as error:
            return [str(error)]
        return []


def sender_of(weights: Any, wanted: str) -> WeightSender | None:
    """What can send these weights straight to engines; None where they go by file in any case."""
    if isinstance(weights, WeightsFile):
        return None
    if hasattr(weights, "send"):
        sender: WeightSender = weights
        return sender
    return None if wanted == "auto" and not torch.cuda.is_available() else LocalSender(weights)


def transfer(
    sender: WeightSender, version: int, receivers: Sequence[Worker], *, wanted: str, timeout_s: float
) -> tuple[list[bool], list[str]]:
    """Send weights straight to engines, where their locations allow it; whoever does not get them needs the file.

    Args:
        sender: Holds the weights.
        version: Of the weights.
        receivers: Workers with the methods `location` and `receive_weights`.
        wanted: `auto` or the kind of transfer, as of `choose_kind`.
        timeout_s: For all of it.

    Returns:
        Which receivers have loaded the weights; and what failed although every process lives.
    """
    asked = [worker.call("location") for worker in receivers]
    wait(asked, timeout_s)
    found = {i: f.result() for i, f in enumerate(asked) if f.done() and f.exception() is None}
    on_gpu = bool(sender.locations[0].gpus)
    locations = {i: one for i, one in found.items() if one is not None and bool(one.gpus) == on_gpu}
    has_loaded = [False] * len(receivers)
    kind = choose_kind(wanted, sender.locations, list(locations.values()))
    if kind == "file" or not locations:
        return has_loaded, []
    with TemporaryDirectory(prefix="dapo-transfer-") as folder:
        sessions, incoming = _sessions(kind, sender, version, locations, Path(folder))
        loading = {i: receivers[i].call("receive_weights", handle) for i, handle in incoming.items()}
        failures = sender.send(sessions)
        wait(loading.values(), timeout_s)
    has_died = False
    for i, answer in loading.items():
        error = answer.exception() if answer.done() else None
        has_loaded[i] = answer.done() and error is None
        has_died = has_died or not answer.done() or isinstance(error, WorkerDied)
        failures += [] if error is None else [str(error)]
    return has_loaded, [] if has_died else failures


def _sessions(
    kind: Kind, sender: WeightSender, version: int, locations: Mapping[int, Location], folder: Path
) -> "tuple[list[Session | None], dict[int, IncomingWeights]]":
    """The session of each sending process, and what each receiver is given, by its number."""
    layout, incoming = sender.layout(), dict[int, IncomingWeights]()
    sessions: list[Session | None] = [None] * len(sender.locations)
    machines = {one.machine for one in (own_location("cpu"), *sender.locations, *locations.values())}
    address = None if len(machines) == 1 else sender.address()
    members: dict[int, list[int]] = {}  # by the number of the sending process
    for i, location in locations.items():
        if kind == "broadcast":
            members.setdefault(0, []).append(i)
        elif location in sender.locations:
            members.setdefault(sender.locations.index(location), []).append(i)
    for rank, own in members.items():
        name, device_type = f"{version}-{rank}", "cuda" if sender.locations[rank].gpus else "cpu"
        session = Session(kind, address or folder / name, name, len(own), layout, version, device_type)
        sessions[rank] = session
        incoming |= {i: IncomingWeights(session, index) for index, i in enumerate(own, start=1)}
    return sessions, incoming
