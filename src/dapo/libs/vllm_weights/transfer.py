"""Orders the calls of a transfer, where trainer and engines are controlled."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias

from .chunks import CHUNK_BYTES, Source, chunks_of
from .sender import WeightSender

TIMEOUT_S = 120.0  # of an engine's call: for connecting, and for each chunk
Ranks: TypeAlias = Callable[..., list[Any]]
"""Calls a method of every trainer rank's WeightSender, at the same time, and returns the answers.
"""


class Engine(Protocol):
    """An engine, whose process answers one call at a time.

    `connect_weights(init_info)` calls vLLM's `init_weight_transfer_engine` on all workers.
    `receive_weights(update, layout, version)` calls `update_weights`. With the first chunk comes
    the layout of all weights, for `start_weight_update` before it; with the last the version, for
    `finish_weight_update` after it.
    """

    @property
    def worker(self) -> Any:
        """The present process."""

    def request(self, method: str, *arguments: Any, timeout_s: float) -> None: ...

    def answer(self) -> Exception | None:
        """Wait for the pending answer, if any; returns its error.

        A process that does not answer in time is ended.
        """


class WeightTransfer:
    """Connects engines to the trainer, again after a process was replaced, and sends them
    weights.
    """

    def __init__(
        self,
        kind: Literal["nccl", "ipc"],
        sender: WeightSender,
        *,
        processes_per_engine: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`nccl`: engines have GPUs of their own. `ipc`: each of their GPUs has a trainer's rank.

        `sender` sends from this process.
        """
        self._sender = sender
        self._uses_nccl = kind == "nccl"
        self._processes = processes_per_engine
        self._timeout_s = timeout_s
        self._connected: list[Any] = []

    def run(
        self,
        source: Source | None,
        engines: Sequence[Engine],
        version: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Send weights to all engines, which may hold a part of them after a failure.

        The source is in this process, unless there are `ranks`, each of which begins with its own.
        """
        ranks = ranks or (lambda *call: [self._sender.call(*call)])
        workers = [engine.worker for engine in engines]
        try:
            if self._connected != workers:
                self._connected = []
                self._connect(ranks, engines)
                self._connected = workers
            self._send(source, ranks, engines, version)
        except BaseException:
            _wait_for_answers(engines)
            # Where an engine has failed, the ranks still hold a buffer each. A rank that is lost
            # cannot answer, and the first error is the one that counts
            with suppress(Exception):
                ranks("close")
            raise
        _wait_for_answers(engines)
        ranks("end")

    def _connect(self, ranks: Ranks, engines: Sequence[Engine]) -> None:
        size = 1 + self._processes * len(engines)
        info = ranks("open", self._uses_nccl)[0] | {"packed": True}
        for number, engine in enumerate(engines):
            if self._uses_nccl:
                info |= {"world_size": size, "rank_offset": 1 + number * self._processes}
                info["packed_buffer_size_bytes"] = CHUNK_BYTES
            engine.request("connect_weights", dict(info), timeout_s=self._timeout_s)
        ranks("connect", size)
        _require_answers(engines)

    def _send(
        self, source: Source | None, ranks: Ranks, engines: Sequence[Engine], version: int
    ) -> None:
        began = ranks("begin", self._uses_nccl, source)
        layout = began[0][0]
        handles = {gpu: handle for _, own in began for gpu, handle in own.items()}
        chunks = chunks_of(layout.tensors)
        for index, chunk in enumerate(chunks):
            update: dict[str, Any] = chunk | {"ipc_handles": handles}
            if self._uses_nccl:
                update = {name: chunk[name] for name in ("names", "dtype_names", "shapes")}
            else:
                ranks("send", index)
            last = version if index + 1 == len(chunks) else None
            for engine in engines:
                arguments = update, None if index else layout, last
                engine.request("receive_weights", *arguments, timeout_s=self._timeout_s)
            if self._uses_nccl:
                ranks("send", index)  # while the engines receive
            _require_answers(engines)


def _wait_for_answers(engines: Sequence[Engine]) -> None:
    """Until no engine is busy; their errors are known or come too late."""
    for engine in engines:
        engine.answer()


def _require_answers(engines: Sequence[Engine]) -> None:
    if errors := [error for engine in engines if (error := engine.answer()) is not None]:
        raise errors[0]
