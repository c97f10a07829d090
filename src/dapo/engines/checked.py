"""Checks every answer of an engine against its request, so that no wrong answer is used."""

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dapo.core.errors import DapoError, EngineError
from dapo.engines.engine import EngineLayer, RolloutEngine, WeightSource, float_array
from dapo.types import Generation, GenerationRequest

T = TypeVar("T")
STALL_S = 1800.0
_STALL_POLLS = 1000
# rounding in float32 may put a probability slightly above 1
_LOGPROB_TOLERANCE = 1e-3


class CheckedEngine(EngineLayer):
    """Checks every answer against its request; a wrong one is an EngineError.

    The tokens and log-probabilities of an answer become arrays (`with_arrays`), whatever sequences
    the engine has returned.

    The error names the request, the expected and the actual value. An engine whose polls return
    nothing counts as hung after `stall_s` seconds without a finished response, provided that it was
    polled more often than any response has tokens. An engine that hangs inside a call in this
    process cannot be interrupted.
    """

    def __init__(self, engine: RolloutEngine, *, vocabulary: int, stall_s: float = STALL_S) -> None:
        """`vocabulary` is the number of the model's tokens."""
        super().__init__(engine)
        self._vocabulary = vocabulary
        self._stall_s = stall_s
        self._version: int | None = None
        """The version that answers must have; None before the first load."""
        self._pending: dict[str, GenerationRequest] = {}
        self._answered: set[str] = set()
        self._idle_polls = 0
        self._last_answer = time.monotonic()

    def load_weights(self, weights: WeightSource, version: int) -> None:
        self._call("load_weights", lambda: self._engine.load_weights(weights, version))
        self._version = version

    def drop_weights(self) -> None:
        self._call("drop_weights", self._engine.drop_weights)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if not self._pending:
            self._answered.clear()
            self._idle_polls = 0
            self._last_answer = time.monotonic()
        self._call("submit", lambda: self._engine.submit(requests))
        self._pending.update((request.id, request) for request in requests)

    def poll(self) -> list[Generation]:
        generations = self._list_of_generations("poll", self._call("poll", self._engine.poll))
        for generation in generations:
            self._check(generation, self._pop_pending(generation))
        self._check_stalled(bool(generations))
        return [with_arrays(generation) for generation in generations]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        generations = self._list_of_generations(
            "abort", self._call("abort", lambda: self._engine.abort(request_ids))
        )
        for generation in generations:
            request = self._pop_pending(generation)
            if generation.finish == "aborted":
                self._check_tokens(generation, request)
            else:  # it had ended before the abort
                self._check(generation, request)
        for name in request_ids:
            if name in self._pending:
                raise EngineError(f"the engine did not answer the abort of request {name!r}")
        return [with_arrays(generation) for generation in generations]

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except DapoError:
            raise
        except Exception as error:
            frames = extract_tb(error.__traceback__)
            where = ""
            if frames:
                where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
            raise EngineError(
                f"the engine failed in {name} with {len(self._pending)} requests in flight: "
                f"{type(error).__name__}: {error}{where}"
            ) from error

    def _list_of_generations(self, name: str, answer: object) -> list[Generation]:
        if not isinstance(answer, list):
            raise EngineError(
                f"the engine's {name} returned a {type(answer).__name__}, expected a list of"
                " Generation"
            )
        for item in answer:
            if not isinstance(item, Generation):
                raise EngineError(
                    f"the engine's {name} returned a {type(item).__name__}, expected a Generation"
                )
        return answer

    def _pop_pending(self, generation: Generation) -> GenerationRequest:
        if generation.request_id in self._answered:
            raise EngineError(f"the engine answered request {generation.request_id!r} twice")
        if generation.request_id not in self._pending:
            raise EngineError(
                f"the engine answered request {generation.request_id!r}, which is not in flight"
            )
        self._answered.add(generation.request_id)
        return self._pending.pop(generation.request_id)

    def _check(self, generation: Generation, request: GenerationRequest) -> None:
        is_stop = np.isin(self._check_tokens(generation, request), request.stop_ids)  # [n]
        ids = generation.token_ids
        finish = generation.finish
        if finish not in ("stop", "length"):
            raise _wrong(generation, "finish 'stop' or 'length'", repr(finish))
        if generation.sampled is not None:
            return  # the end of an episode is its environment's matter
        if finish == "stop" and not is_stop[-1:].any():
            actual = f"token {ids[-1]}" if ids else "no token"
            stops = request.stop_ids
            among = "no stop ids at all"
            if stops:
                among = ", ".join(map(str, stops[:5])) + ", ..." * (len(stops) > 5)
            raise _wrong(generation, f"a last token among {among} with finish 'stop'", actual)
        if finish == "length" and len(ids) != request.max_new_tokens:
            raise _wrong(
                generation,
                f"{request.max_new_tokens} tokens with finish 'length'",
                f"{len(ids)} tokens",
            )
        if is_stop[:-1].any():
            early = int(is_stop.argmax())
            raise _wrong(
                generation,
                f"an end at the first stop id ({ids[early]}, token {early})",
                f"{len(ids)} tokens",
            )
        if finish == "length" and is_stop[-1:].any():
            raise _wrong(
                generation, f"finish 'stop', since the last token is {ids[-1]}", "'length'"
            )

    def _check_tokens(self, generation: Generation, request: GenerationRequest) -> NDArray[Any]:
        """Check tokens and log-probabilities with numpy, which is fast; return the tokens."""
        ids = generation.token_ids
        logprobs = generation.logprobs
        if generation.num_sampled > request.max_new_tokens:
            raise _wrong(
                generation, f"at most {request.max_new_tokens} tokens", str(generation.num_sampled)
            )
        tokens = np.asarray(ids)
        scores = np.asarray(logprobs)
        is_token = (
            tokens.dtype.kind == "i"
            and tokens.min(initial=0) >= 0
            and tokens.max(initial=0) < self._vocabulary
        )
        if len(ids) and not is_token:
            wrong = (
                (index, token)
                for index, token in enumerate(ids)
                if type(token) is not int or not 0 <= token < self._vocabulary
            )
            _raise_first(generation, wrong, f"token ids from 0 to {self._vocabulary - 1}")
        if len(logprobs) != len(ids):
            raise _wrong(
                generation, f"{len(ids)} log-probabilities, one per token", str(len(logprobs))
            )
        if not (np.isfinite(scores).all() and (scores <= _LOGPROB_TOLERANCE).all()):
            wrong_scores = (
                (index, score)
                for index, score in enumerate(logprobs)
                if not (math.isfinite(score) and score <= _LOGPROB_TOLERANCE)
            )
            _raise_first(generation, wrong_scores, "finite log-probabilities of at most 0")
        if self._version is not None and generation.version != self._version:
            raise _wrong(
                generation, f"weights of version {self._version}", f"version {generation.version}"
            )
        return tokens

    def _check_stalled(self, progressed: bool) -> None:
        if progressed or not self._pending:
            self._idle_polls = 0
            self._last_answer = time.monotonic()
            return
        self._idle_polls += 1
        waited = time.monotonic() - self._last_answer
        if waited <= self._stall_s:
            return  # avoids the search for the longest of thousands of requests
        longest = max(request.max_new_tokens for request in self._pending.values())
        if self._idle_polls > _STALL_POLLS + 2 * longest:
            raise EngineError(
                f"the engine has finished nothing for {waited:.0f} s and {self._idle_polls} polls"
                f" with {len(self._pending)} requests in flight (the first:"
                f" {next(iter(self._pending))!r}); it has hung"
            )


def with_arrays(generation: Generation) -> Generation:
    """Return the response with its numbers in arrays, the one form that later stages see.

    Tokens have 4 bytes each, and so have log-probabilities, unless that would change one.
    """
    tokens = generation.token_ids
    logprobs = generation.logprobs
    has_tokens = isinstance(tokens, array) and tokens.typecode == "i"
    if has_tokens and isinstance(logprobs, array) and logprobs.typecode == "f":
        return generation
    return replace(generation, token_ids=array("i", tokens), logprobs=float_array(logprobs))


def _raise_first(generation: Generation, wrong: Iterable[tuple[int, Any]], expected: str) -> None:
    for position, value in wrong:
        raise _wrong(generation, expected, f"{value!r} at token {position}")


def _wrong(generation: Generation, expected: str, actual: str) -> EngineError:
    return EngineError(
        f"the engine's answer to request {generation.request_id!r}: expected {expected}, got"
        f" {actual}"
    )
