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
from dapo.distributed.engine_worker import engine_worker_spec
from dapo.distributed.protocol import CALL_TIMEOUT_S, Launcher, Worker, WorkerSpec, wait_for_result
from dapo.engines.engine import WeightSource
from dapo.types import Generation, GenerationRequest


class Call(NamedTuple):
    """A call on an engine's process."""

    method: str
    argument: Any


@dataclass(eq=False)
class EngineHandle:
    """One engine of a pool, whichever process it is at present. At most one call at a time waits for its answer."""

    name: str
    spec: WorkerSpec
    worker: Worker
    in_flight: dict[str, GenerationRequest] = field(default_factory=dict)
    """What the caller of the pool still has to get from here."""
    undelivered: list[Generation] = field(default_factory=list)
    """Answers that were not handed on yet."""
    call_log: list[Call] = field(default_factory=list)
    """Every call from the last load_weights on, that one included; refused ones changed nothing and are left out."""
    pending_call: "Future[Any] | None" = None
    """The answer to the last call, while it has not been taken."""
    sent_at: float = 0.0
    timeout_s: float = 0.0

    @property
    def deadline(self) -> float:
        """When an answer is overdue, by `time.monotonic`."""
        return self.sent_at + self.timeout_s

    @property
    def has_work(self) -> bool:
        """Is there anything that a poll could bring?"""
        return len(self.in_flight) > len(self.undelivered)

    def send(self, call: Call, *, timeout_s: float) -> None:
        """Ask the process."""
        self.pending_call = self.worker.call(call.method, call.argument)
        self.sent_at, self.timeout_s = time.monotonic(), timeout_s

    def receive(self) -> Any:
        """The answer, or what the engine raised. Raises WorkerDied where none has come by the deadline."""
        assert self.pending_call is not None, f"{self.name} was asked nothing"
        try:
            return wait_for_result(self.pending_call, timeout_s=self.timeout_s, what=self.name, since=self.sent_at)
        except WorkerFault as error:
            raise EngineError(
                f"{self.name} failed with {len(self.in_flight)} requests in flight: {error} (its log has the traceback)"
            ) from error
        finally:
            if self.pending_call.done():  # it is not where the wait was interrupted
                self.pending_call = None

    def compact_call_log(self) -> None:
        """Replace the log by a shorter one that leads to the same answers up to rounding: what has been answered is
        not sampled again.
        """
        last = self.call_log[-1]
        pending = {request.id for request in last.argument} if last.method == "submit" else set()
        pending |= {generation.request_id for generation in self.undelivered}
        unanswered = [request for name, request in self.in_flight.items() if name not in pending]
        self.call_log = [
            *(call for call in self.call_log[:-1] if call.method == "load_weights"),
            *([Call("submit", unanswered)] if unanswered else []),
            last,
        ]

    def replay(self) -> Generator[Call, Any, Call]:
        """The calls that bring a new process to where the lost one was; takes their answers, drops what was delivered,
        and returns the call that is still to be answered.

        On a device whose rounding varies the same calls may end a response earlier or later than the first time. Then
        what is early is kept, and what was delivered already is stopped: every request is answered once all the same.
        """
        active_ids: dict[str, None] = {}
        known = {generation.request_id for generation in self.undelivered}
        for call in self.call_log[:-1]:
            found = yield _without_finished(call, active_ids)
            if call.method == "submit":
                active_ids.update((request.id, None) for request in call.argument)
            elif call.method != "load_weights":
                for generation in found:
                    active_ids.pop(generation.request_id, None)
                    if generation.request_id in self.in_flight and generation.request_id not in known:
                        self.undelivered.append(generation)
        if delivered := [name for name in active_ids if name not in self.in_flight]:
            yield Call("abort", delivered)
            for name in delivered:
                del active_ids[name]
        return _without_finished(self.call_log[-1], active_ids)


def _without_finished(call: Call, active_ids: Collection[str]) -> Call:
    if call.method != "abort":
        return call
    return Call("abort", [name for name in call.argument if name in active_ids])


CLOSE_S = 2.0


class EnginePool:
    """A `RolloutEngine` over one process for each blueprint of an engine. Raises what starting them raises.

    A call without an answer for `call_timeout_s` counts as the loss of its process. At most `max_restarts` losses are
    made good, each one told to `log`; the next is an EngineError. What an engine itself raises is raised here too.
    """

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[WorkerSpec],
        *,
        log: Callable[[str], None],
        reproducible: bool = True,
        poll_tokens: int = 1,
        call_timeout_s: float = CALL_TIMEOUT_S,
        max_restarts: int = 10,
    ) -> None:
        """The launcher stays the caller's, who closes it after the pool. `poll_tokens`: tokens that a poll gives every
        live sequence: several save calls, which matters where there are dozens of engines.
        """
        self._launcher = launcher
        self._log = log
        self._reproducible = reproducible
        self._poll = Call("poll", poll_tokens)
        self._call_timeout_s = call_timeout_s
        self._max_restarts = max_restarts
        self._restarts = 0
        self._owner: dict[str, EngineHandle] = {}
        self._weights_are_complete = True
        self._is_closed = False
        names = [f"engine-{i}" for i in range(len(specs))]
        made = [engine_worker_spec(spec) for spec in specs]
        workers = launcher.start(names, made)
        self._engines = [EngineHandle(*parts) for parts in zip(names, made, workers, strict=True)]

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
        handle = self._launcher.publish_weights(weights, version)
        self._weights_are_complete = False
        for engine in self._engines:
            engine.call_log.clear()
        for engine, loaded in self._call({engine: Call("load_weights", handle) for engine in self._engines}).items():
            if loaded != version:
                raise EngineError(f"{engine.name} has loaded weights of version {loaded}, expected {version}")
        self._weights_are_complete = True

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, adjacent ones with the same prompt at one engine. Raises EngineError, queueing none."""
        self._require_open()
        if not self._weights_are_complete:
            raise EngineError("the last load_weights failed, so the weights are incomplete: load a complete set first")
        self._require_new(requests)
        assignments = self._distribute(requests)
        for engine, assigned in assignments.items():
            engine.in_flight.update((request.id, request) for request in assigned)
            self._owner.update((request.id, engine) for request in assigned)
        try:
            self._call({engine: Call("submit", assigned) for engine, assigned in assignments.items()})
        except DapoError:
            self._roll_back(assignments)
            raise

    def poll(self) -> list[Generation]:
        """Advance every engine, and return what has finished; not reproducible: of those that are ready first."""
        self._require_open()
        if not any(engine.undelivered for engine in self._engines):
            busy = [engine for engine in self._engines if engine.has_work]
            for engine in busy:
                if engine.pending_call is None:
                    self._send(engine, self._poll)
            self._receive_polls(busy if self._reproducible else ready(busy))
        return [generation for engine in self._engines for generation in self._deliver(engine)]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these, wherever they are, and return what they have, in the order given."""
        self._require_open()
        if unknown := [name for name in request_ids if name not in self._owner]:
            raise EngineError(f"abort: request {unknown[0]!r} is not in flight ({len(unknown)} unknown in all)")
        names: dict[EngineHandle, list[str]] = {}
        for name in dict.fromkeys(request_ids):
            names.setdefault(self._owner[name], []).append(name)
        self._receive_polls([engine for engine in names if engine.pending_call is not None])
        calls = {}
        for engine, wanted in names.items():
            finished = {generation.request_id for generation in engine.undelivered}
            calls[engine] = Call("abort", [name for name in wanted if name not in finished])
        stopped = {generation.request_id: generation for found in self._call(calls).values() for generation in found}
        for engine, wanted in names.items():
            # what had finished unseen, here or while its process was replaced
            stopped |= {
                generation.request_id: replace(generation, finish="aborted") for generation in engine.undelivered
            }
            engine.undelivered = [
                generation for generation in engine.undelivered if generation.request_id not in wanted
            ]
            for name in wanted:
                del self._owner[name], engine.in_flight[name]
        return [stopped[name] for name in dict.fromkeys(request_ids) if name in stopped]

    def close(self) -> None:
        """End the processes. Afterwards every other call raises EngineError."""
        if self._is_closed:
            return
        self._is_closed = True
        wait([engine.worker.call("close") for engine in self._engines if engine.pending_call is None], timeout=CLOSE_S)
        for engine in self._engines:
            engine.worker.close()

    def _distribute(self, requests: Sequence[GenerationRequest]) -> dict[EngineHandle, list[GenerationRequest]]:
        """Each group to the engine with the fewest requests in flight, the first of equals."""
        assignments: dict[EngineHandle, list[GenerationRequest]] = {}
        for _, group in groupby(requests, key=lambda request: request.prompt_ids):
            engine = min(self._engines, key=lambda s: len(s.in_flight) + len(assignments.get(s, ())))
            assignments.setdefault(engine, []).extend(group)
        return assignments

    def _require_new(self, requests: Sequence[GenerationRequest]) -> None:
        """An engine knows its own requests only."""
        new: set[str] = set()
        for request in requests:
            if request.id in self._owner or request.id in new:
                raise EngineError(f"request id {request.id!r} is in flight already; ids must be unique")
            new.add(request.id)

    def _roll_back(self, assignments: Mapping[EngineHandle, Sequence[GenerationRequest]]) -> None:
        """Undo a submit that one of several engines has refused."""
        for engine, assigned in assignments.items():
            for request in assigned:
                del engine.in_flight[request.id], self._owner[request.id]
        accepted = [
            engine for engine in assignments if engine.call_log and engine.call_log[-1].argument is assignments[engine]
        ]
        self._call({engine: Call("abort", [request.id for request in assignments[engine]]) for engine in accepted})

    def _receive_polls(self, engines: Sequence[EngineHandle]) -> None:
        """Take in what the polls of these engines bring. Raises the first error of one."""
        answers = self._receive(engines)
        for engine, found in answers.items():
            if not isinstance(found, DapoError):
                engine.undelivered += found
        _raise_first(answers)

    def _deliver(self, engine: EngineHandle) -> list[Generation]:
        found, engine.undelivered = engine.undelivered, []
        for generation in found:
            self._owner.pop(generation.request_id, None)
            engine.in_flight.pop(generation.request_id, None)
        return found

    def _call(self, calls: Mapping[EngineHandle, Call]) -> dict[EngineHandle, Any]:
        """One call on each of several engines at the same time. Raises the first error of one, when all are through."""
        self._receive_polls([engine for engine in calls if engine.pending_call is not None])
        for engine, call in calls.items():
            self._send(engine, call)
        answers = self._receive(list(calls))
        _raise_first(answers)
        return answers

    def _send(self, engine: EngineHandle, call: Call) -> None:
        engine.call_log.append(call)
        engine.send(call, timeout_s=self._call_timeout_s)

    def _receive(self, engines: Sequence[EngineHandle]) -> dict[EngineHandle, Any]:
        """The answers that these engines owe, or the errors that they raised, however often a process is lost."""
        answers: dict[EngineHandle, Any] = dict.fromkeys(engines)
        waiting = list(engines)
        while waiting:
            lost: dict[EngineHandle, WorkerDied] = {}
            for engine in waiting:
                try:
                    answers[engine] = engine.receive()
                except WorkerDied as error:
                    lost[engine] = error
                except DapoError as error:
                    engine.call_log.pop()
                    answers[engine] = error
            waiting = list(lost)
            self._replace(lost)
        return answers

    def _replace(self, lost: dict[EngineHandle, WorkerDied]) -> None:
        """New processes in place of lost ones, each brought to the call that the lost one owes an answer to."""
        while lost:
            for engine, error in lost.items():
                self._count_restart(engine, error)
                if not self._reproducible:
                    engine.compact_call_log()
            try:
                workers = self._launcher.start([engine.name for engine in lost], [engine.spec for engine in lost])
            except WorkerDied as error:
                lost = dict.fromkeys(lost, error)
                continue
            for engine, worker in zip(lost, workers, strict=True):
                engine.worker = worker
            lost = self._replay(list(lost))

    def _count_restart(self, engine: EngineHandle, error: WorkerDied) -> None:
        engine.worker.kill()
        if self._restarts >= self._max_restarts:
            raise EngineError(
                f"{error}. It is not replaced: {self._restarts} engines have been replaced in this run, of at most "
                f"{self._max_restarts}"
            ) from error
        self._restarts += 1
        self._log(f"{error}; {engine.name} is replaced ({self._restarts} of at most {self._max_restarts} times)")

    def _replay(self, engines: Sequence[EngineHandle]) -> dict[EngineHandle, WorkerDied]:
        """Have new processes repeat the calls of the lost ones, side by side, and ask each the last; returns those
        that are lost meanwhile.
        """
        replaying = {engine: engine.replay() for engine in engines}
        answers: dict[EngineHandle, Any] = dict.fromkeys(engines)
        lost: dict[EngineHandle, WorkerDied] = {}
        while replaying:
            for engine, calls in list(replaying.items()):
                try:
                    engine.send(calls.send(answers[engine]), timeout_s=self._call_timeout_s)
                except StopIteration as end:
                    del replaying[engine]
                    engine.send(end.value, timeout_s=self._call_timeout_s)
            for engine in list(replaying):
                try:
                    answers[engine] = engine.receive()
                except WorkerDied as error:
                    del replaying[engine]
                    lost[engine] = error
        return lost

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")


def ready(busy: Sequence[EngineHandle]) -> list[EngineHandle]:
    """Wait for the first of these engines to answer; those that are overdue count as well."""
    pending_call = {engine.pending_call: engine for engine in busy if engine.pending_call is not None}
    left = min((engine.deadline for engine in busy), default=0.0) - time.monotonic()
    done, _ = wait(pending_call, timeout=max(0.0, left), return_when=FIRST_COMPLETED)
    now = time.monotonic()
    return [engine for future, engine in pending_call.items() if future in done or now >= engine.deadline]


def _raise_first(answers: Mapping[EngineHandle, Any]) -> None:
    for found in answers.values():
        if isinstance(found, DapoError):
            raise found
