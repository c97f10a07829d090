"""Engines in processes of their own as one rollout engine; a process that is lost is replaced, and nobody notices.

A group goes whole to the engine with the fewest requests in flight. With `reproducible` all engines that have work
advance by one poll at a time, so which engine samples what, and beside what, is a function of the calls alone. Without
it a poll returns as soon as any engine has advanced, and a slow one holds nobody up.

A process that dies, or gives no answer in time, is replaced by a new one, which is given the weights and then every
call that the lost one had answered; what was delivered before is dropped. An engine is a function of its weights and of
the calls on it, so the new one ends up where the lost one was. Where equality to the last bit is not asked for
(`reproducible` is off) only what has not been answered is sampled again.
"""

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from dapo.core.errors import DapoError, EngineError, WorkerDied, WorkerFault
from dapo.distributed.engine_worker import hosted
from dapo.distributed.protocol import Blueprint, Launcher, Worker, answer
from dapo.engines.engine import WeightSource
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


CLOSE_S = 2.0


class EnginePool:
    """A `RolloutEngine` over one process for each blueprint of an engine. Raises what starting them raises.

    A call without an answer for `call_timeout_s` counts as the loss of its process. At most `max_restarts` losses are
    made good, each one told to `tell`; the next is an EngineError. What an engine itself raises is raised here too.
    """

    def __init__(
        self,
        launcher: Launcher,
        blueprints: Sequence[Blueprint],
        *,
        tell: Callable[[str], None],
        reproducible: bool = True,
        poll_tokens: int = 1,
        call_timeout_s: float = 1800.0,
        max_restarts: int = 10,
    ) -> None:
        """The launcher stays the caller's, who closes it after the pool. `poll_tokens`: tokens that a poll gives every
        live sequence: several save calls, which matters where there are dozens of engines."""
        self._launcher = launcher
        self._tell = tell
        self._reproducible = reproducible
        self._poll = Call("poll", poll_tokens)
        self._call_timeout_s = call_timeout_s
        self._max_restarts = max_restarts
        self._restarts = 0
        self._owner: dict[str, Seat] = {}
        self._weights_are_whole = True
        self._is_closed = False
        names = [f"engine-{i}" for i in range(len(blueprints))]
        made = [hosted(blueprint) for blueprint in blueprints]
        workers = launcher.start(names, made)
        self._seats = [Seat(*parts) for parts in zip(names, made, workers, strict=True)]

    @property
    def restarts(self) -> int:
        """Processes replaced so far."""
        return self._restarts

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Hand the weights over once, and have all engines read them at the same time."""
        self._require_open()
        if self._owner:
            raise EngineError(
                f"load_weights while {len(self._owner)} requests are in flight: poll until they have finished, or "
                "abort them"
            )
        handle = self._launcher.share(weights, version)
        self._weights_are_whole = False
        for seat in self._seats:
            seat.log.clear()
        for seat, loaded in self._call({seat: Call("load_weights", handle) for seat in self._seats}).items():
            if loaded != version:
                raise EngineError(f"{seat.name} has loaded weights of version {loaded}, expected {version}")
        self._weights_are_whole = True

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, adjacent ones with the same prompt at one engine. Raises EngineError, queueing none."""
        self._require_open()
        if not self._weights_are_whole:
            raise EngineError("the last load_weights failed, so the weights are incomplete: load a complete set first")
        self._require_new(requests)
        shares = self._distribute(requests)
        for seat, share in shares.items():
            seat.in_flight.update((request.id, request) for request in share)
            self._owner.update((request.id, seat) for request in share)
        try:
            self._call({seat: Call("submit", share) for seat, share in shares.items()})
        except DapoError:
            self._take_back(shares)
            raise

    def poll(self) -> list[Generation]:
        """Advance every engine, and return what has finished; not reproducible: of those that are ready first."""
        self._require_open()
        if not any(seat.arrived for seat in self._seats):
            busy = [seat for seat in self._seats if seat.has_work]
            for seat in busy:
                if seat.asked is None:
                    self._ask(seat, self._poll)
            self._take_polls(busy if self._reproducible else ready(busy))
        return [generation for seat in self._seats for generation in self._deliver(seat)]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these, wherever they are, and return what they have, in the order given."""
        self._require_open()
        if unknown := [name for name in request_ids if name not in self._owner]:
            raise EngineError(f"abort: request {unknown[0]!r} is not in flight ({len(unknown)} unknown in all)")
        names: dict[Seat, list[str]] = {}
        for name in dict.fromkeys(request_ids):
            names.setdefault(self._owner[name], []).append(name)
        self._take_polls([seat for seat in names if seat.asked is not None])
        calls = {}
        for seat, wanted in names.items():
            finished = {generation.request_id for generation in seat.arrived}
            calls[seat] = Call("abort", [name for name in wanted if name not in finished])
        stopped = {one.request_id: one for found in self._call(calls).values() for one in found}
        for seat, wanted in names.items():
            # what had finished unseen, here or while its process was replaced
            stopped |= {one.request_id: replace(one, finish="aborted") for one in seat.arrived}
            seat.arrived = [one for one in seat.arrived if one.request_id not in wanted]
            for name in wanted:
                del self._owner[name], seat.in_flight[name]
        return [stopped[name] for name in dict.fromkeys(request_ids) if name in stopped]

    def close(self) -> None:
        """End the processes. Afterwards every other call raises EngineError."""
        if self._is_closed:
            return
        self._is_closed = True
        wait([seat.worker.call("close") for seat in self._seats if seat.asked is None], timeout=CLOSE_S)
        for seat in self._seats:
            seat.worker.close()

    def _distribute(self, requests: Sequence[GenerationRequest]) -> dict[Seat, list[GenerationRequest]]:
        """Each group to the engine with the fewest requests in flight, the first of equals."""
        shares: dict[Seat, list[GenerationRequest]] = {}
        for _, group in groupby(requests, key=lambda request: request.prompt_ids):
            seat = min(self._seats, key=lambda s: len(s.in_flight) + len(shares.get(s, ())))
            shares.setdefault(seat, []).extend(group)
        return shares

    def _require_new(self, requests: Sequence[GenerationRequest]) -> None:
        """An engine knows its own requests only."""
        new: set[str] = set()
        for request in requests:
            if request.id in self._owner or request.id in new:
                raise EngineError(f"request id {request.id!r} is in flight already; ids must be unique")
            new.add(request.id)

    def _take_back(self, shares: Mapping[Seat, Sequence[GenerationRequest]]) -> None:
        """Undo a submit that one of several engines has refused."""
        for seat, share in shares.items():
            for request in share:
                del seat.in_flight[request.id], self._owner[request.id]
        accepted = [seat for seat in shares if seat.log and seat.log[-1].argument is shares[seat]]
        self._call({seat: Call("abort", [request.id for request in shares[seat]]) for seat in accepted})

    def _take_polls(self, seats: Sequence[Seat]) -> None:
        """Take in what the polls of these engines bring. Raises the first error of one."""
        answers = self._receive(seats)
        for seat, found in answers.items():
            if not isinstance(found, DapoError):
                seat.arrived += found
        _raise_first(answers)

    def _deliver(self, seat: Seat) -> list[Generation]:
        found, seat.arrived = seat.arrived, []
        for generation in found:
            self._owner.pop(generation.request_id, None)
            seat.in_flight.pop(generation.request_id, None)
        return found

    def _call(self, calls: Mapping[Seat, Call]) -> dict[Seat, Any]:
        """One call on each of several engines at the same time. Raises the first error of one, when all are through."""
        self._take_polls([seat for seat in calls if seat.asked is not None])
        for seat, call in calls.items():
            self._ask(seat, call)
        answers = self._receive(list(calls))
        _raise_first(answers)
        return answers

    def _ask(self, seat: Seat, call: Call) -> None:
        seat.log.append(call)
        seat.send(call, timeout_s=self._call_timeout_s)

    def _receive(self, seats: Sequence[Seat]) -> dict[Seat, Any]:
        """The answers that these engines owe, or the errors that they raised, however often a process is lost."""
        answers: dict[Seat, Any] = dict.fromkeys(seats)
        waiting = list(seats)
        while waiting:
            lost: dict[Seat, WorkerDied] = {}
            for seat in waiting:
                try:
                    answers[seat] = seat.receive()
                except WorkerDied as error:
                    lost[seat] = error
                except DapoError as error:
                    seat.log.pop()
                    answers[seat] = error
            waiting = list(lost)
            self._replace(lost)
        return answers

    def _replace(self, lost: dict[Seat, WorkerDied]) -> None:
        """New processes in place of lost ones, each brought to the call that the lost one owes an answer to."""
        while lost:
            for seat, error in lost.items():
                self._count_loss(seat, error)
                if not self._reproducible:
                    seat.start_log_at_unanswered()
            try:
                workers = self._launcher.start([seat.name for seat in lost], [seat.blueprint for seat in lost])
            except WorkerDied as error:
                lost = dict.fromkeys(lost, error)
                continue
            for seat, worker in zip(lost, workers, strict=True):
                seat.worker = worker
            lost = self._catch_up(list(lost))

    def _count_loss(self, seat: Seat, error: WorkerDied) -> None:
        seat.worker.kill()
        if self._restarts >= self._max_restarts:
            raise EngineError(
                f"{error}. It is not replaced: distributed.engine_restarts={self._max_restarts}, and {self._restarts} "
                "engines have been replaced in this run"
            ) from error
        self._restarts += 1
        self._tell(f"{error}; {seat.name} is replaced ({self._restarts} of at most {self._max_restarts} times)")

    def _catch_up(self, seats: Sequence[Seat]) -> dict[Seat, WorkerDied]:
        """Have new processes repeat the calls of the lost ones, side by side, and ask each the last; returns those
        that are lost meanwhile."""
        repeating = {seat: seat.catch_up() for seat in seats}
        answers: dict[Seat, Any] = dict.fromkeys(seats)
        lost: dict[Seat, WorkerDied] = {}
        while repeating:
            for seat, calls in list(repeating.items()):
                try:
                    seat.send(calls.send(answers[seat]), timeout_s=self._call_timeout_s)
                except StopIteration as end:
                    del repeating[seat]
                    seat.send(end.value, timeout_s=self._call_timeout_s)
            for seat in list(repeating):
                try:
                    answers[seat] = seat.receive()
                except WorkerDied as error:
                    del repeating[seat]
                    lost[seat] = error
        return lost

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")


def ready(busy: Sequence[Seat]) -> list[Seat]:
    """Wait for the first of these engines to answer; those that are overdue count as well."""
    asked = {seat.asked: seat for seat in busy if seat.asked is not None}
    left = min((seat.deadline for seat in busy), default=0.0) - time.monotonic()
    done, _ = wait(asked, timeout=max(0.0, left), return_when=FIRST_COMPLETED)
    now = time.monotonic()
    return [seat for future, seat in asked.items() if future in done or now >= seat.deadline]


def _raise_first(answers: Mapping[Seat, Any]) -> None:
    for found in answers.values():
        if isinstance(found, DapoError):
            raise found
