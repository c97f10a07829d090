"""A rollout engine without a model: answers come from a script, so that a loop can be tested without patching."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dapo.core.errors import EngineError
from dapo.core.packed import CompactArray
from dapo.engines.engine import WeightSource
from dapo.types import Finish, Generation, GenerationRequest

Script: TypeAlias = Callable[[GenerationRequest], tuple[Sequence[int], Finish]]
"""A request's whole response and how it ends; the engine cuts it at the request's limits."""

Delay: TypeAlias = Callable[[GenerationRequest], int]
"""In how many polls after it starts a request is answered, 1 or more."""


@dataclass
class _RunningSequence:
    request: GenerationRequest
    token_ids: Sequence[int]
    finish: Finish
    delay: int
    polls: int = 0

    @property
    def partial(self) -> Sequence[int]:
        """Tokens sampled so far: they come evenly over the delay."""
        return self.token_ids[: len(self.token_ids) * self.polls // self.delay]


class ScriptedEngine:
    """A deterministic `RolloutEngine` that samples nothing.

    `script` gives each request's response; the first stop id ends it (`stop`), else `max_new_tokens` does (`length`),
    else it ends as the script says. `delay` decides the order of finishing; by default a token takes a poll. At most
    `slots` requests are live at a time, first come first served (None: all). Every log-probability is `logprob`, or
    what `logprob` says of so many tokens. A script that answers packed rows has them answered packed.

    What was asked of it stands in `submitted`, `aborted` (request ids), `loaded` (versions) and `polls`.
    """

    def __init__(
        self,
        script: Script,
        *,
        delay: Delay | None = None,
        slots: int | None = None,
        logprob: float | Callable[[int], Sequence[float]] = -1.0,
    ) -> None:
        if slots is not None and slots < 1:
            raise EngineError(f"slots must be at least 1, got {slots}")
        self._script = script
        self._delay = delay
        self._slots = slots
        self._logprob = logprob
        self._in_flight: dict[str, _RunningSequence] = {}
        self._version = 0
        self._closed = False
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.loaded: list[int] = []
        self.polls = 0

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Ids of requests that are not answered yet, first come first."""
        return tuple(self._in_flight)

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Takes the version; the weights are not looked at."""
        self._require_open()
        if self._in_flight:
            raise EngineError(f"load_weights while {len(self._in_flight)} requests are in flight")
        self._version = version
        self.loaded.append(version)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. Raises EngineError, queueing none, for an id in flight or a request for no tokens."""
        self._require_open()
        new: dict[str, _RunningSequence] = {}
        for request in requests:
            if request.id in self._in_flight or request.id in new:
                raise EngineError(f"request id {request.id!r} is in flight already; ids must be unique")
            if not 0 <= request.min_new_tokens <= request.max_new_tokens:
                raise EngineError(
                    f"request {request.id!r}: min_new_tokens must be from 0 to max_new_tokens="
                    f"{request.max_new_tokens}, got {request.min_new_tokens}"
                )
            if request.max_new_tokens < 1 or not request.prompt_ids:
                raise EngineError(
                    f"request {request.id!r} must have a prompt and ask for at least 1 token, got "
                    f"{len(request.prompt_ids)} prompt tokens and max_new_tokens={request.max_new_tokens}"
                )
            new[request.id] = self._answer(request)
        self._in_flight.update(new)
        self.submitted.extend(requests)

    def poll(self) -> list[Generation]:
        """Let one poll's time pass for the live requests, and return those whose delay is over."""
        self._require_open()
        self.polls += 1
        running = list(self._in_flight.values())[: self._slots]
        for seq in running:
            seq.polls += 1
        finished = [seq for seq in running if seq.polls >= seq.delay]
        for seq in finished:
            del self._in_flight[seq.request.id]
        return [self._generation(seq.request, seq.token_ids, seq.finish) for seq in finished]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these; returns the tokens that have come so far. Raises EngineError for an id not in flight."""
        self._require_open()
        if unknown := [name for name in request_ids if name not in self._in_flight]:
            raise EngineError(f"abort: request {unknown[0]!r} is not in flight ({len(unknown)} unknown in all)")
        stopped = [self._in_flight.pop(name) for name in dict.fromkeys(request_ids)]
        self.aborted.extend(seq.request.id for seq in stopped)
        return [self._generation(seq.request, seq.partial, "aborted") for seq in stopped]

    def close(self) -> None:
        """Afterwards every other call raises EngineError; the logs stay."""
        self._closed = True
        self._in_flight = {}

    def _answer(self, request: GenerationRequest) -> _RunningSequence:
        token_ids, finish = cut(request, *self._script(request))
        delay = max(1, len(token_ids)) if self._delay is None else self._delay(request)
        if delay < 1:
            raise EngineError(f"request {request.id!r}: a delay must be at least 1 poll, got {delay}")
        return _RunningSequence(request, token_ids, finish, delay)

    def _generation(self, request: GenerationRequest, token_ids: Sequence[int], finish: Finish) -> Generation:
        count = len(token_ids)
        logprobs = self._logprob(count) if callable(self._logprob) else (self._logprob,) * count
        return Generation(request.id, token_ids, logprobs, finish, self._version)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")


class FaultyEngine(ScriptedEngine):
    """A scripted engine that breaks its contract on purpose: `corrupt` says what `poll` and `abort` return instead.

    It is handed what the engine would have returned, and may change, add, leave out or raise.
    """

    def __init__(
        self,
        script: Script,
        corrupt: Callable[[list[Generation]], list[Generation]],
        *,
        delay: Delay | None = None,
        slots: int | None = None,
    ) -> None:
        super().__init__(script, delay=delay, slots=slots)
        self._corrupt = corrupt

    def poll(self) -> list[Generation]:
        """What `corrupt` makes of it."""
        return self._corrupt(super().poll())

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """What `corrupt` makes of it."""
        return self._corrupt(super().abort(request_ids))


def cut(request: GenerationRequest, token_ids: Sequence[int], finish: Finish) -> tuple[Sequence[int], Finish]:
    """A scripted response as an engine would give it: with its first stop id, and within `max_new_tokens`.

    Stop ids among the first `min_new_tokens` are left out: no engine could sample them.
    """
    if isinstance(token_ids, CompactArray):
        return _cut_array(request, token_ids, finish)
    while early := [t for t in token_ids[: request.min_new_tokens] if t in request.stop_ids]:
        position = list(token_ids).index(early[0])
        token_ids = [*token_ids[:position], *token_ids[position + 1 :]]
    for position, token in enumerate(token_ids[: request.max_new_tokens]):
        if token in request.stop_ids:
            return tuple(token_ids[: position + 1]), "stop"
    if len(token_ids) >= request.max_new_tokens:
        return tuple(token_ids[: request.max_new_tokens]), "length"
    return tuple(token_ids), finish


def _cut_array(
    request: GenerationRequest, token_ids: "CompactArray[int]", finish: Finish
) -> "tuple[CompactArray[int], Finish]":
    """The same without a look at each token in Python."""
    ids = token_ids.array
    stops = np.isin(ids, request.stop_ids)
    early = stops & (np.arange(len(ids)) < request.min_new_tokens)
    if early.any():
        return _cut_array(request, CompactArray(np.delete(ids, early.argmax())), finish)
    if stops[: request.max_new_tokens].any():
        return token_ids[: int(stops.argmax()) + 1], "stop"
    if len(ids) >= request.max_new_tokens:
        return token_ids[: request.max_new_tokens], "length"
    return token_ids, finish
