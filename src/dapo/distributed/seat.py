"""A place in a pool of engines: what was asked of its process, and how another process catches up with it."""

import time
from collections.abc import Collection, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dapo.distributed.worker import Blueprint, Worker, answer
from dapo.core.errors import EngineError, WorkerFault
from dapo.types import Generation, GenerationRequest


class Call(NamedTuple):
    """A call on an engine's process."""

    method: str
    argument: Any


@dataclass(eq=False)
class Seat:
    """One engine of a pool, whichever process it is at present. At most one call at a time waits for its answer."""

    name: str
    blueprint: Blueprint
    worker: Worker
    in_flight: dict[str, GenerationRequest] = field(default_factory=dict)
    """What the caller of the pool still has to get from here."""
    arrived: list[Generation] = field(default_factory=list)
    """Answers that were not handed on yet."""
    log: list[Call] = field(default_factory=list)
    """Every call from the last load_weights on, that one included; refused ones changed nothing and are left out."""
    asked: "Future[Any] | None" = None
    """The answer to the last call, while it has not been taken."""
    asked_at: float = 0.0
    timeout_s: float = 0.0

    @property
    def deadline(self) -> float:
        """When an answer is overdue, by `time.monotonic`."""
        return self.asked_at + self.timeout_s

    @property
    def has_work(self) -> bool:
        """Is there anything that a poll could bring?"""
        return len(self.in_flight) > len(self.arrived)

    def send(self, call: Call, *, timeout_s: float) -> None:
        """Ask the process."""
        self.asked = self.worker.call(call.method, call.argument)
        self.asked_at, self.timeout_s = time.monotonic(), timeout_s

    def receive(self) -> Any:
        """The answer, or what the engine raised. Raises WorkerDied where none has come by the deadline."""
        assert self.asked is not None, f"{self.name} was asked nothing"
        try:
            return answer(self.asked, timeout_s=self.timeout_s, what=self.name, since=self.asked_at)
        except WorkerFault as error:
            raise EngineError(
                f"{self.name} failed with {len(self.in_flight)} requests in flight: {error} (its log has the traceback)"
            ) from error
        finally:
            if self.asked.done():  # it is not where the wait was interrupted
                self.asked = None

    def start_log_at_unanswered(self) -> None:
        """Replace the log by a shorter one that leads to the same answers up to rounding: what has been answered is
        not sampled again."""
        last = self.log[-1]
        pending = {request.id for request in last.argument} if last.method == "submit" else set()
        pending |= {generation.request_id for generation in self.arrived}
        unanswered = [request for name, request in self.in_flight.items() if name not in pending]
        self.log = [
            *(call for call in self.log[:-1] if call.method == "load_weights"),
            *([Call("submit", unanswered)] if unanswered else []),
            last,
        ]

    def catch_up(self) -> Generator[Call, Any, Call]:
        """The calls that bring a new process to where the lost one was; takes their answers, drops what was delivered,
        and returns the call that is still to be answered.

        On a device whose rounding varies the same calls may end a response earlier or later than the first time. Then
        what is early is kept, and what was delivered already is stopped: every request is answered once all the same.
        """
        held: dict[str, None] = {}
        known = {generation.request_id for generation in self.arrived}
        for call in self.log[:-1]:
            found = yield _without_finished(call, held)
            if call.method == "submit":
                held.update((request.id, None) for request in call.argument)
            elif call.method != "load_weights":
                for generation in found:
                    held.pop(generation.request_id, None)
                    if generation.request_id in self.in_flight and generation.request_id not in known:
                        self.arrived.append(generation)
        if late := [name for name in held if name not in self.in_flight]:
            yield Call("abort", late)
            for name in late:
                del held[name]
        return _without_finished(self.log[-1], held)


def _without_finished(call: Call, held: Collection[str]) -> Call:
    if call.method != "abort":
        return call
    return Call("abort", [name for name in call.argument if name in held])
