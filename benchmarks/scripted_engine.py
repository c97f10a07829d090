"""A rollout engine without a model: its responses come from a function, so that tests of a loop
need no patching.
"""

from array import array
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource
from dapo.engines.request_checks import EngineState, check_requests
from dapo.types import Finish, Generation, GenerationRequest

Script: TypeAlias = Callable[[GenerationRequest], tuple[Sequence[int], Finish]]
"""Returns the whole response to a request and its finish; the engine cuts it at the limits of the
request.
"""

Delay: TypeAlias = Callable[[GenerationRequest], int]
"""Returns the number of polls that a request takes from its start to its answer, 1 or more."""


@dataclass
class _RunningSequence:
    request: GenerationRequest
    token_ids: Sequence[int]
    finish: Finish
    delay: int
    polls: int = 0


class ScriptedEngine(EngineState):
    """A deterministic `RolloutEngine` that samples nothing.

    Token ids are those of the script from the request's offset, a tuple or an `array.array`. Calls
    are recorded: `submitted` requests, `aborted` ids, `loaded` versions and the number of `polls`.
    """

    def __init__(
        self,
        script: Script,
        *,
        delay: Delay | None = None,
        slots: int | None = None,
        logprob: float | Callable[[int], Sequence[float]] = -1.0,
    ) -> None:
        """Raises EngineError for fewer than one slot: the number of requests that run at a time,
        None for all.

        `delay` decides the order of finishing; by default each token takes one poll. `logprob` is
        every token's, or a function from the number of tokens to their values.
        """
        super().__init__(version=0)
        if slots is not None and slots < 1:
            raise EngineError(f"slots must be at least 1, got {slots}")
        self._script = script
        self._delay = delay
        self._slots = slots
        self._logprob = logprob
        self._sequences: dict[str, _RunningSequence] = {}
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.loaded: list[int] = []
        self.polls = 0

    @property
    def in_flight(self) -> KeysView[str]:
        return self._sequences.keys()

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Record the version; the weights are not read."""
        self._require_idle("load_weights")
        self._version = version
        self.loaded.append(version)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._require_open()
        self._require_new(requests)
        check_requests(requests)
        self._sequences.update([(request.id, self._answer(request)) for request in requests])
        self.submitted.extend(requests)

    def poll(self) -> list[Generation]:
        """Advance the running requests by one poll, and return those whose delay has passed."""
        self._require_open()
        self.polls += 1
        running = list(self._sequences.values())[: self._slots]
        for seq in running:
            seq.polls += 1
        finished = [seq for seq in running if seq.polls >= seq.delay]
        for seq in finished:
            del self._sequences[seq.request.id]
        return [self._generation(seq.request, seq.token_ids, seq.finish) for seq in finished]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these requests, and return their tokens so far, which arrive evenly over the
        delay.
        """
        names = self._require_in_flight(request_ids)
        self.aborted.extend(names)
        stopped = [self._sequences.pop(name) for name in names]
        partial = [seq.token_ids[: len(seq.token_ids) * seq.polls // seq.delay] for seq in stopped]
        return [
            self._generation(seq.request, ids, "aborted")
            for seq, ids in zip(stopped, partial, strict=True)
        ]

    def close(self) -> None:
        """Afterwards every other call raises EngineError; the records stay."""
        self._is_closed = True
        self._sequences = {}

    def _answer(self, request: GenerationRequest) -> _RunningSequence:
        token_ids, finish = cut(request, *self._script(request))
        delay = max(1, len(token_ids)) if self._delay is None else self._delay(request)
        if delay < 1:
            raise EngineError(
                f"request {request.id!r}: a delay must be at least 1 poll, got {delay}"
            )
        return _RunningSequence(request, token_ids, finish, delay)

    def _generation(
        self, request: GenerationRequest, token_ids: Sequence[int], finish: Finish
    ) -> Generation:
        count = len(token_ids)
        start = request.offset
        logprobs = (
            self._logprob(start + count)[start:]
            if callable(self._logprob)
            else (self._logprob,) * count
        )
        return Generation(request.id, token_ids, logprobs, finish, self._require_weights())


def cut(
    request: GenerationRequest, token_ids: Sequence[int], finish: Finish
) -> tuple[Sequence[int], Finish]:
    """Cut a scripted response as an engine would: from `offset` to its first stop id or to
    `max_new_tokens` tokens.

    Stop ids among the first `min_new_tokens` are left out: no engine could sample them. An array
    stays one, anything else becomes a tuple.
    """
    ids: Any = token_ids if isinstance(token_ids, array) else tuple(token_ids)
    start = request.offset
    while early := [
        i
        for i, token in enumerate(ids[: start + request.min_new_tokens])
        if token in request.stop_ids
    ]:
        ids = ids[: early[0]] + ids[early[0] + 1 :]
    kept = ids[start : start + request.max_new_tokens]
    # `in` and `index` search in C
    if ends := [kept.index(stop) for stop in request.stop_ids if stop in kept]:
        return kept[: min(ends) + 1], "stop"
    return kept, "length" if len(kept) == request.max_new_tokens else finish
