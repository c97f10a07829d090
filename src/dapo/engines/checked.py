"""What an engine owes and what it hands in, compared: nothing that breaks the contract gets past here."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import TypeVar

import numpy as np

from dapo.core.errors import DapoError, EngineError
from dapo.core.packed import CompactArray
from dapo.engines.engine import RolloutEngine, WeightSource, drop_weights
from dapo.types import Generation, GenerationRequest

T = TypeVar("T")

STALL_S = 1800.0
_STALL_POLLS = 1000
# a softmax in float32 may come out a rounding above 1
_LOGPROB_TOLERANCE = 1e-3


class CheckedEngine:
    """An engine whose every answer is checked against its request. Whatever is wrong is an EngineError.

    It names the request, what was expected and what came. An engine in process that hangs inside a call cannot be
    ended from here; one whose polls return nothing for ever can: it has hung after `stall_s` seconds without a finished
    response, provided that it has been polled more often than any response has tokens. So a slow engine that makes a
    token a poll is never taken for a hung one.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        vocabulary: int,
        stall_s: float = STALL_S,
    ) -> None:
        """`vocabulary` is the number of tokens that the model knows."""
        self._engine = engine
        self._vocabulary, self._stall_s = vocabulary, stall_s
        self._version: int | None = None
        """Of the weights that sample, once some were loaded: an engine may begin with weights of its own."""
        self._pending: dict[str, GenerationRequest] = {}
        self._answered: set[str] = set()
        self._idle_polls, self._last_answer = 0, time.monotonic()

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """From now on every answer must be of this version."""
        self._called("load_weights", lambda: self._engine.load_weights(weights, version))
        self._version = version

    def drop_weights(self) -> None:
        """If the engine can."""
        self._called("drop_weights", lambda: drop_weights(self._engine))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        if not self._pending:
            self._answered.clear()
            self._idle_polls, self._last_answer = 0, time.monotonic()
        self._called("submit", lambda: self._engine.submit(requests))
        self._pending.update((request.id, request) for request in requests)

    def poll(self) -> list[Generation]:
        """What has finished."""
        found = self._list_of_generations("poll", self._called("poll", self._engine.poll))
        for generation in found:
            self._check(generation, self._pop_pending(generation))
        self._check_stalled(bool(found))
        return found

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """One partial response for each."""
        found = self._list_of_generations("abort", self._called("abort", lambda: self._engine.abort(request_ids)))
        for generation in found:
            request = self._pop_pending(generation)
            if generation.finish != "aborted":
                raise _wrong(generation, "finish 'aborted' after an abort", repr(generation.finish))
            self._check_tokens(generation, request)
        for name in request_ids:
            if name in self._pending:
                raise EngineError(f"the engine did not answer the abort of request {name!r}")
        return found

    def close(self) -> None:
        """Free everything."""
        self._engine.close()

    def _called(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except DapoError:
            raise
        except Exception as error:
            frames = extract_tb(error.__traceback__)
            where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
            raise EngineError(
                f"the engine failed in {name} with {len(self._pending)} requests in flight: "
                f"{type(error).__name__}: {error}{where}"
            ) from error

    def _list_of_generations(self, name: str, found: object) -> list[Generation]:
        if not isinstance(found, list):
            raise EngineError(f"the engine's {name} returned a {type(found).__name__}, expected a list of Generation")
        for item in found:
            if not isinstance(item, Generation):
                raise EngineError(f"the engine's {name} returned a {type(item).__name__}, expected a Generation")
        return found

    def _pop_pending(self, generation: Generation) -> GenerationRequest:
        if generation.request_id in self._answered:
            raise EngineError(f"the engine answered request {generation.request_id!r} twice")
        if generation.request_id not in self._pending:
            raise EngineError(f"the engine answered request {generation.request_id!r}, which is not in flight")
        self._answered.add(generation.request_id)
        return self._pending.pop(generation.request_id)

    def _check(self, generation: Generation, request: GenerationRequest) -> None:
        self._check_tokens(generation, request)
        ids, finish = generation.token_ids, generation.finish
        if finish == "stop" and (not ids or ids[-1] not in request.stop_ids):
            got = f"token {ids[-1]}" if ids else "no token"
            raise _wrong(generation, f"a last token among {_format_ids(request.stop_ids)} with finish 'stop'", got)
        if finish == "length" and len(ids) != request.max_new_tokens:
            raise _wrong(generation, f"{request.max_new_tokens} tokens with finish 'length'", f"{len(ids)} tokens")
        if finish not in ("stop", "length"):
            raise _wrong(generation, "finish 'stop' or 'length'", repr(finish))
        if _holds_any(ids[:-1], request.stop_ids):
            early = next(i for i, token in enumerate(ids) if token in request.stop_ids)
            raise _wrong(generation, f"an end at the first stop id ({ids[early]}, token {early})", f"{len(ids)} tokens")
        if finish == "length" and ids[-1] in request.stop_ids:
            raise _wrong(generation, f"finish 'stop', since the last token is {ids[-1]}", "'length'")

    def _check_tokens(self, generation: Generation, request: GenerationRequest) -> None:
        ids, logprobs = generation.token_ids, generation.logprobs
        if len(ids) > request.max_new_tokens:
            raise _wrong(generation, f"at most {request.max_new_tokens} tokens", str(len(ids)))
        # millions of tokens a step: what is right is found out without a loop in Python
        if ids and not _are_tokens(ids, self._vocabulary):
            for position, token in enumerate(ids):
                if type(token) is not int or not 0 <= token < self._vocabulary:
                    raise _wrong(
                        generation, f"token ids from 0 to {self._vocabulary - 1}", f"{token!r} at token {position}"
                    )
        if len(logprobs) != len(ids):
            raise _wrong(generation, f"{len(ids)} log-probabilities, one a token", str(len(logprobs)))
        if logprobs and not _are_logprobs(logprobs):
            for position, logprob in enumerate(logprobs):
                if not (math.isfinite(logprob) and logprob <= _LOGPROB_TOLERANCE):
                    raise _wrong(
                        generation, "finite log-probabilities of at most 0", f"{logprob:g} at token {position}"
                    )
        if self._version is not None and generation.version != self._version:
            raise _wrong(generation, f"weights of version {self._version}", f"version {generation.version}")

    def _check_stalled(self, progressed: bool) -> None:
        if progressed or not self._pending:
            self._idle_polls, self._last_answer = 0, time.monotonic()
            return
        self._idle_polls += 1
        longest = max(request.max_new_tokens for request in self._pending.values())
        waited = time.monotonic() - self._last_answer
        if self._idle_polls > _STALL_POLLS + 2 * longest and waited > self._stall_s:
            raise EngineError(
                f"the engine has finished nothing for {waited:.0f} s and {self._idle_polls} polls with "
                f"{len(self._pending)} requests in flight (the first: {next(iter(self._pending))!r}); it has hung"
            )


def _are_tokens(ids: Sequence[int], vocabulary: int) -> bool:
    if isinstance(ids, CompactArray):
        # as unsigned numbers negative ones are larger than any vocabulary: one pass
        unsigned = {4: np.uint32, 8: np.uint64}[ids.array.itemsize] if ids.array.dtype.kind == "i" else None
        return unsigned is not None and int(ids.array.view(unsigned).max()) < vocabulary
    return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary


def _are_logprobs(logprobs: Sequence[float]) -> bool:
    if isinstance(logprobs, CompactArray):
        return math.isfinite(logprobs.sum) and bool(logprobs.array.max() <= _LOGPROB_TOLERANCE)
    return math.isfinite(sum(logprobs)) and max(logprobs) <= _LOGPROB_TOLERANCE


def _holds_any(ids: Sequence[int], wanted: Sequence[int]) -> bool:
    if isinstance(ids, CompactArray):
        return any(bool((ids.array == item).any()) for item in wanted)
    return not set(wanted).isdisjoint(ids)


def _wrong(generation: Generation, expected: str, got: str) -> EngineError:
    return EngineError(f"the engine's answer to request {generation.request_id!r}: expected {expected}, got {got}")


def _format_ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "") if ids else "no stop ids at all"
