"""Engine processes as one rollout engine; lost processes are replaced, logged and counted.

A group goes as a whole to the engine with the fewest requests in flight; a request with `previous`
goes to the engine that answered that one, if the weights are still the same. With `reproducible`
all engines with work advance in lockstep, one token per poll, so which engine samples what, and in
which batch, depends on the calls alone. Without it an engine decodes for POLL_S or until a request
is finished before it answers, so that the controller's time does not grow with the steps; a poll
returns as soon as any engine has answered, and a slow engine delays no other.

A process that dies or does not answer in time is replaced. The new one gets the weights and then
every call that the lost one had answered (replay); what was delivered before is dropped. An engine
is a function of its weights and of the calls on it, so the new one reaches the state of the lost
one. Without `reproducible` only unanswered requests are sampled again. Where the lost weights exist
nowhere any more, because they went from GPU to GPU and the policy has been updated since, the new
one waits for the next ones: its requests stay unanswered until they are aborted, without a token.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from dapo.core.errors import (
    DapoError,
    EngineError,
    NumericsError,
    TrainerLost,
    WorkerDied,
    WorkerFault,
)
from dapo.distributed.engine_worker import EngineWorker
from dapo.distributed.protocol import (
    CALL_TIMEOUT_S,
    ENGINE_NAME,
    Launcher,
    Worker,
    WorkerSpec,
)
from dapo.distributed.weight_files import RankWeights
from dapo.engines.engine import WeightSource
from dapo.engines.request_checks import EngineState
from dapo.types import Generation, GenerationRequest

if TYPE_CHECKING:
    from dapo.libs.vllm_weights import WeightTransfer

CLOSE_TIMEOUT_S = 2.0
MAX_RESTARTS = 10
POLL_S = 0.1  # also the time for which a submit or an abort may wait
REMEMBERED_ANSWERS = 2**16  # newest answers whose engine is known to requests that continue them


class Call(NamedTuple):
    """A call on an engine's process, kept for replay."""

    method: str
    arguments: tuple[Any, ...] = ()


SENT = Call("receive_weights")  # in a log, the place of weights that were sent from GPU to GPU


@dataclass(eq=False)
class EngineHandle:
    """One engine of the pool and its present process. At most one call at a time is pending."""

    name: str
    spec: WorkerSpec
    worker: Worker
    timeout_s: float  # for the answer to a call; after it the process counts as lost
    in_flight: dict[str, GenerationRequest] = field(default_factory=dict)
    """The requests that the pool has not delivered, by id."""
    # finished generations that the pool has not delivered
    undelivered: list[Generation] = field(default_factory=list)
    call_log: list[Call] = field(default_factory=list)
    """Every call from the last load_weights on, without those that raised: they changed nothing."""
    pending_call: "Future[Any] | None" = None  # the last call, until its answer is received
    allowed_s: float = 0.0
    deadline: float = 0.0  # the `time.monotonic` at which its answer is overdue
    awaits_weights: bool = False
    """Whether its process has been replaced, and gets no call before the next weights."""

    def send(self, call: Call) -> None:
        self.request(call.method, *call.arguments, timeout_s=self.timeout_s)

    def request(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """Call the process; not for replay."""
        self.pending_call = self.worker.call(method, *arguments)
        self.allowed_s = timeout_s
        self.deadline = time.monotonic() + timeout_s

    def log_and_send(self, call: Call) -> None:
        """Call the process, and keep the call for replay."""
        self.call_log.append(call)
        self.send(call)

    def receive(self) -> Any:
        """Return the pending call's result, or what the engine raised.

        Raises WorkerDied if there is none by the deadline.
        """
        assert self.pending_call is not None
        try:
            return self.pending_call.result(max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            if self.pending_call.done():  # the method itself raised it
                raise
            raise WorkerDied(f"{self.name} gave no answer within {self.allowed_s:g} s") from None
        except WorkerFault as error:
            raise EngineError(
                f"{self.name} failed with {len(self.in_flight)} requests in flight: {error} (its"
                " log has the traceback)"
            ) from error
        finally:
            if self.pending_call.done():  # not if the wait was interrupted
                self.pending_call = None

    def answer(self) -> Exception | None:
        """Wait for the pending answer, if any; returns its error.

        A process that does not answer in time is ended.
        """
        try:
            if self.pending_call is not None:
                self.receive()
        except DapoError as error:
            if isinstance(error, WorkerDied):
                self.worker.kill()
                self.pending_call = None
            return error
        return None

    def without_weights(self, call: Call, version: int) -> Any:
        """Return what a call answers before the next weights: nothing is sampled."""
        if call.method == "abort":
            return [Generation(name, (), (), "aborted", version) for name in call.arguments[0]]
        return [] if call.method == "poll" else None

    def compact_call_log(self) -> None:
        """Shorten the log to unanswered requests, whose repetition is equal up to rounding."""
        *earlier, last = self.call_log
        done = {request.id for request in last.arguments[0]} if last.method == "submit" else set()
        done |= {generation.request_id for generation in self.undelivered}
        unanswered = [request for name, request in self.in_flight.items() if name not in done]
        self.call_log = [call for call in earlier if call.method == "load_published"]
        self.call_log += [Call("submit", (unanswered,))] if unanswered else []
        self.call_log.append(last)

    def replay(self) -> Generator[Call, Any, Call]:
        """Yield the calls that restore a lost process's state, and receive their results.

        On a device whose rounding varies a response may end earlier or later than the first time.
        Early responses are kept, and delivered ones are aborted: every request is still answered
        exactly once. Returns the pending call.
        """
        active_ids: dict[str, None] = {}
        undelivered_ids = {generation.request_id for generation in self.undelivered}
        for call in self.call_log[:-1]:
            generations = yield _without_finished(call, active_ids)
            if call.method == "submit":
                active_ids.update((request.id, None) for request in call.arguments[0])
            elif call.method != "load_published":
                for generation in generations:
                    active_ids.pop(generation.request_id, None)
                    if (
                        generation.request_id in self.in_flight
                        and generation.request_id not in undelivered_ids
                    ):
                        self.undelivered.append(generation)
        if delivered := [name for name in active_ids if name not in self.in_flight]:
            yield Call("abort", (delivered,))
            for name in delivered:
                del active_ids[name]
        return _without_finished(self.call_log[-1], active_ids)


def _without_finished(call: Call, active_ids: Collection[str]) -> Call:
    if call.method != "abort":
        return call
    return Call("abort", ([name for name in call.arguments[0] if name in active_ids],))


class EnginePool(EngineState):
    """A `RolloutEngine` over one process per spec. Errors of an engine are raised here."""

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[WorkerSpec],
        *,
        log: Callable[[str], None],
        reproducible: bool = True,
        shares_gpus: bool = False,
        transfer: "WeightTransfer | None" = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        """Start an engine per spec; the caller closes the launcher after the pool.

        `log` gets a line per replacement.

        `reproducible` means lockstep and full replay. Engines that share GPUs with trainers drop
        their weights during updates. With `transfer` all weights but the first are sent from GPU to
        GPU, until that fails once. A process counts as lost `call_timeout_s` after an unanswered
        call; the loss after `max_restarts` replacements is an EngineError.
        """
        super().__init__(version=0)
        self._launcher = launcher
        self._log = log
        self._reproducible = reproducible
        self._max_restarts = max_restarts
        self.restarts = 0  # the number of processes replaced so far
        self._shares_gpus = shares_gpus
        self._transfer = transfer
        self._call_timeout_s = call_timeout_s
        # the last loaded ones, with their version
        self._weights: tuple[WeightSource, int] | None = None
        self._owner: dict[str, EngineHandle] = {}
        self._answered: OrderedDict[str, EngineHandle] = OrderedDict()
        """The engines of the newest answers since `load_weights`, a function of the calls alone."""
        names = [ENGINE_NAME.format(i) for i in range(len(specs))]
        factory = f"{EngineWorker.__module__}:{EngineWorker.__qualname__}"
        options = [{"factory": spec.factory, "options": dict(spec.options)} for spec in specs]
        wrapped = [
            replace(spec, factory=factory, options=engine_options)
            for spec, engine_options in zip(specs, options, strict=True)
        ]
        workers = launcher.start(names, wrapped)
        self._engines = [
            EngineHandle(*parts, call_timeout_s)
            for parts in zip(names, wrapped, workers, strict=True)
        ]

    @property
    def in_flight(self) -> Collection[str]:
        return self._owner.keys()

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Send the weights to all engines, or publish them once for all to read together."""
        self._require_idle("load_weights")
        is_first = self._weights is None
        self._version = None
        self._weights = (weights, version)
        self._answered.clear()
        for engine in self._engines:
            engine.call_log.clear()
            engine.awaits_weights = False
        if self._has_sent(weights, version, is_first=is_first):
            for engine in self._engines:
                engine.call_log.append(SENT)
        else:
            call = self._load_call()
            if call is None:
                raise EngineError(f"weights of version {version} have been trained since")
            for engine, loaded in self._call(dict.fromkeys(self._engines, call)).items():
                if loaded != version:
                    raise EngineError(
                        f"{engine.name} has loaded weights of version {loaded}, expected {version}"
                    )
        self._version = version

    def _has_sent(self, weights: WeightSource, version: int, *, is_first: bool) -> bool:
        """Send the weights from GPU to GPU.

        After one failure, whoever survives it, the run goes on with files.

        The first weights go as a file: an engine then checks that they are all of its own.
        """
        if self._transfer is None or is_first:
            return False
        try:
            if isinstance(weights, RankWeights):
                self._transfer.run(None, self._engines, version, weights.send)
            else:
                self._transfer.run(weights, self._engines, version)
            return True
        except (TrainerLost, NumericsError):
            raise
        except Exception as error:  # devices fail in many ways, and files do not depend on them
            self._log(
                "weights could not be sent from GPU to GPU; they go through files from now on:"
                f" {error}"
            )
            # what the transfer has cost is replaced, and does not count
            self._max_restarts += len(self._engines)
            self._transfer = None
            return False

    def _load_call(self) -> Call | None:
        """Return the call that loads the newest weights from a file, written now if missing.

        None if there is no file, and the trainer ranks have other ones by now.
        """
        assert self._weights is not None
        weights, version = self._weights
        if isinstance(weights, RankWeights):
            weights = weights.export()
            if weights is None:
                return None
        return Call("load_published", (self._launcher.publish_weights(weights, version),))

    def drop_weights(self) -> None:
        """Free the memory of engines that share a GPU with a trainer; others keep their weights."""
        self._require_idle("drop_weights")
        if self._shares_gpus:
            self._version = None
            for engine in self._engines:
                engine.call_log.clear()  # a lost engine needs no weights before the next ones
            self._call(dict.fromkeys(self._engines, Call("drop_weights")))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, adjacent ones with equal prompts on one engine; if one fails, none."""
        self._require_weights()
        self._require_new(requests)
        assignments = self._distribute(requests)
        for engine, assigned in assignments.items():
            engine.in_flight.update((request.id, request) for request in assigned)
            self._owner.update((request.id, engine) for request in assigned)
        try:
            self._call(
                {engine: Call("submit", (assigned,)) for engine, assigned in assignments.items()}
            )
        except DapoError:
            self._roll_back(assignments)
            raise

    def poll(self) -> list[Generation]:
        """Advance all engines (without `reproducible`: until the first answers); return results."""
        self._require_open()
        if not any(engine.undelivered for engine in self._engines):
            busy = [
                engine
                for engine in self._engines
                if len(engine.in_flight) > len(engine.undelivered) and not engine.awaits_weights
            ]
            if not busy and self._owner:  # all that is in flight waits for weights
                time.sleep(POLL_S)
            for engine in busy:
                if engine.pending_call is None:
                    engine.log_and_send(Call("poll", (0.0 if self._reproducible else POLL_S,)))
            self._receive_polls(busy if self._reproducible else ready(busy))
        return [generation for engine in self._engines for generation in self._deliver(engine)]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        wanted_ids = self._require_in_flight(request_ids)
        names: dict[EngineHandle, list[str]] = {}
        for name in wanted_ids:
            names.setdefault(self._owner[name], []).append(name)
        self._receive_polls([engine for engine in names if engine.pending_call is not None])
        calls = {}
        for engine, engine_names in names.items():
            finished = {generation.request_id for generation in engine.undelivered}
            calls[engine] = Call(
                "abort", ([name for name in engine_names if name not in finished],)
            )
        stopped: dict[str, Generation] = {}
        for generations in self._call(calls).values():
            stopped |= {generation.request_id: generation for generation in generations}
        for engine, engine_names in names.items():
            # finished but undelivered generations, also of a replaced process
            undelivered = engine.undelivered
            stopped |= {generation.request_id: generation for generation in undelivered}
            engine.undelivered = [
                generation
                for generation in undelivered
                if generation.request_id not in engine_names
            ]
            self._forget(engine, engine_names)
        return [stopped[name] for name in wanted_ids if name in stopped]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        idle = [engine.worker for engine in self._engines if engine.pending_call is None]
        wait([worker.call("close") for worker in idle], timeout=CLOSE_TIMEOUT_S)
        for engine in self._engines:
            engine.worker.close()

    def _distribute(
        self, requests: Sequence[GenerationRequest]
    ) -> dict[EngineHandle, list[GenerationRequest]]:
        """Assign groups to the engine of their previous answers, or to the least busy one."""
        assignments: dict[EngineHandle, list[GenerationRequest]] = {}
        for (_, answered), group in groupby(
            requests, key=lambda r: (r.prompt_ids, self._answered.get(r.previous or ""))
        ):
            engine = answered or min(
                self._engines,
                key=lambda e: (
                    e.awaits_weights,
                    len(e.in_flight) + len(assignments.get(e, ())),
                ),
            )
            assignments.setdefault(engine, []).extend(group)
        return assignments

    def _roll_back(self, assignments: Mapping[EngineHandle, Sequence[GenerationRequest]]) -> None:
        """Undo a submit that one of several engines has refused."""
        undo = {}
        for engine, assigned in assignments.items():
            names = [request.id for request in assigned]
            for name in names:
                del engine.in_flight[name], self._owner[name]
            # a refused call is not logged
            if engine.call_log and engine.call_log[-1].arguments == (assigned,):
                undo[engine] = Call("abort", (names,))
        self._call(undo)

    def _receive_polls(self, engines: Sequence[EngineHandle]) -> None:
        answers = self._receive(engines)
        for engine, answer in answers.items():
            if not isinstance(answer, DapoError):
                engine.undelivered += answer
        _raise_first(answers)

    def _deliver(self, engine: EngineHandle) -> list[Generation]:
        generations = engine.undelivered
        engine.undelivered = []
        self._forget(engine, [generation.request_id for generation in generations])
        return generations

    def _forget(self, engine: EngineHandle, answered: Sequence[str]) -> None:
        """Remove answered requests, and remember their engine for requests that continue them."""
        for name in answered:
            self._owner.pop(name, None)
            engine.in_flight.pop(name, None)
            self._answered[name] = engine
            if len(self._answered) > REMEMBERED_ANSWERS:
                self._answered.popitem(last=False)

    def _call(self, calls: Mapping[EngineHandle, Call]) -> dict[EngineHandle, Any]:
        """Call several engines at the same time. Raises the first error, when all have answered."""
        self._receive_polls([engine for engine in calls if engine.pending_call is not None])
        answers: dict[EngineHandle, Any] = dict.fromkeys(calls)
        called = []
        for engine, call in calls.items():
            if engine.awaits_weights:
                answers[engine] = engine.without_weights(call, self._version or 0)
            else:
                engine.log_and_send(call)
                called.append(engine)
        answers |= self._receive(called)
        _raise_first(answers)
        return answers

    def _receive(self, engines: Sequence[EngineHandle]) -> dict[EngineHandle, Any]:
        """Return results or errors of pending calls; lost processes are replaced until then."""
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
            last_calls = {engine: engine.call_log[-1] for engine in lost}
            self._replace(lost)
            for engine in [engine for engine in waiting if engine.awaits_weights]:
                waiting.remove(engine)
                answers[engine] = engine.without_weights(last_calls[engine], self._version or 0)
        return answers

    def _replace(self, lost: dict[EngineHandle, WorkerDied]) -> None:
        """Start processes in place of lost ones, and replay their calls up to the pending one."""
        while lost:
            for engine, error in lost.items():
                self._count_restart(engine, error)
                if engine.call_log and engine.call_log[0] is SENT:
                    self._find_weights(engine)
                if not self._reproducible and not engine.awaits_weights:
                    engine.compact_call_log()
            try:
                workers = self._launcher.start(
                    [engine.name for engine in lost], [engine.spec for engine in lost]
                )
            except WorkerDied as error:
                lost = dict.fromkeys(lost, error)
                continue
            for engine, worker in zip(lost, workers, strict=True):
                engine.worker = worker
            lost = self._replay([engine for engine in lost if not engine.awaits_weights])

    def _find_weights(self, engine: EngineHandle) -> None:
        """Replace weights that were sent by a file, or let the engine wait for the next ones."""
        call = self._load_call()
        if call is not None:
            engine.call_log[0] = call
            return
        engine.call_log.clear()
        engine.awaits_weights = True
        self._log(
            f"{engine.name} waits for the next weights: those that it had were sent to it, and have"
            f" been trained since; {len(engine.in_flight)} of its responses begin again"
        )

    def _count_restart(self, engine: EngineHandle, error: WorkerDied) -> None:
        engine.worker.kill()
        engine.pending_call = None  # one that was overdue will not be answered
        most = self._max_restarts
        if self.restarts >= most:
            done = f"{self.restarts} engines have been replaced in this run, of at most {most}"
            raise EngineError(f"{error}. It is not replaced: {done}") from error
        self.restarts += 1
        self._log(f"{error}; {engine.name} is replaced ({self.restarts} of at most {most} times)")

    def _replay(self, engines: Sequence[EngineHandle]) -> dict[EngineHandle, WorkerDied]:
        """Replay the calls on several engines at once; return those lost meanwhile."""
        replaying = {engine: engine.replay() for engine in engines}
        answers: dict[EngineHandle, Any] = dict.fromkeys(engines)
        lost: dict[EngineHandle, WorkerDied] = {}
        while replaying:
            for engine, calls in list(replaying.items()):
                try:
                    engine.send(calls.send(answers[engine]))
                except StopIteration as end:
                    del replaying[engine]
                    engine.send(end.value)
            for engine in list(replaying):
                try:
                    answers[engine] = engine.receive()
                except WorkerDied as error:
                    del replaying[engine]
                    lost[engine] = error
        return lost


def ready(busy: Sequence[EngineHandle]) -> list[EngineHandle]:
    """Wait for the first of these engines to answer; overdue ones are returned too."""
    pending_call = {
        engine.pending_call: engine for engine in busy if engine.pending_call is not None
    }
    remaining_s = min((engine.deadline for engine in busy), default=0.0) - time.monotonic()
    done, _ = wait(pending_call, timeout=max(0.0, remaining_s), return_when=FIRST_COMPLETED)
    now = time.monotonic()
    return [
        engine
        for future, engine in pending_call.items()
        if future in done or now >= engine.deadline
    ]


def _raise_first(answers: Mapping[EngineHandle, Any]) -> None:
    for answer in answers.values():
        if isinstance(answer, DapoError):
            raise answer
