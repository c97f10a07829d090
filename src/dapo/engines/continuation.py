"""Responses that go on under other weights: the engine is emptied, gets the weights, and samples
the rest of each.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from dapo.engines.engine import RolloutEngine, WeightSource, float_array
from dapo.types import Generation, GenerationRequest

Versions: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unfinished:
    """A response that was suspended, and what an engine needs beside its request to go on with
    it.
    """

    generation: Generation
    """The tokens so far."""
    lag: int | None = None
    """Polls until the answer of an environment counts; None: a token is to be sampled next."""
    handle: Any = None
    """The open episode in this process; None: an episode is rebuilt from its turns."""
    num_calls: int = 0
    """The number of calls of the episode, by which `handle` is known to stand where this response
    does.
    """

    def close(self) -> None:
        """Give up the response."""
        if self.handle is not None and self.handle.num_calls == self.num_calls:
            self.handle.close()


class SuspendableEngine(RolloutEngine, Protocol):
    """A rollout engine whose responses can stop before their end, and go on after a change of the
    weights.
    """

    def suspend(self, request_ids: Sequence[str]) -> list[Generation | Unfinished]:
        """Stop these requests; a response that has just ended is returned whole.

        The engine then knows none of them.
        """

    def resume(self, requests: Sequence[GenerationRequest], parts: Sequence[Unfinished]) -> None:
        """Go on with suspended responses, each with its request as it was submitted."""


class ContinuingEngine:
    """Makes an engine suspendable: what is left of a response is submitted as a request with an
    offset.

    The prompt of that request holds the tokens so far, so that keys and values are always those of
    the weights that sample. The parts are joined into one Generation, whose `versions` tell them
    apart.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._begun: dict[str, Generation] = {}

    def load_weights(self, weights: WeightSource, version: int) -> None:
        self._engine.load_weights(weights, version)

    def drop_weights(self) -> None:
        self._engine.drop_weights()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._engine.submit(requests)

    def poll(self) -> list[Generation]:
        return [self._joined(each) for each in self._engine.poll()]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return [self._joined(each) for each in self._engine.abort(request_ids)]

    def suspend(self, request_ids: Sequence[str]) -> list[Generation | Unfinished]:
        found = self.abort(request_ids)
        return [Unfinished(each) if each.finish == "aborted" else each for each in found]

    def resume(self, requests: Sequence[GenerationRequest], parts: Sequence[Unfinished]) -> None:
        rest = []
        for request, part in zip(requests, parts, strict=True):
            if count := len(part.generation.token_ids):
                self._begun[request.id] = part.generation
                request = replace(
                    request,
                    prompt_ids=(*request.prompt_ids, *part.generation.token_ids),
                    max_new_tokens=request.max_new_tokens - count,
                    min_new_tokens=max(0, request.min_new_tokens - count),
                    offset=request.offset + count,
                )
            rest.append(request)
        self._engine.submit(rest)

    def close(self) -> None:
        self._begun.clear()
        self._engine.close()

    def _joined(self, generation: Generation) -> Generation:
        begun = self._begun.pop(generation.request_id, None)
        return generation if begun is None else joined(begun, generation)


def joined(first: Generation, rest: Generation) -> Generation:
    """Join the parts of a single response."""
    count = len(first.token_ids)
    return replace(
        rest,
        token_ids=_concatenated(first.token_ids, rest.token_ids),
        logprobs=(
            float_array([*first.logprobs, *rest.logprobs])
            if isinstance(rest.logprobs, array)
            else (*first.logprobs, *rest.logprobs)
        ),
        version=first.version,
        versions=extended(first.versions or ((0, first.version),), rest, at=count),
    )


def extended(versions: Versions, part: Generation, *, at: int) -> Versions | None:
    """The versions of a response to whose first `at` tokens a part is added; None if there is one
    version.
    """
    found = list(versions) if at else []
    for start, version in (part.versions or ((0, part.version),)) if part.token_ids else ():
        if not found or found[-1][1] != version:
            found.append((at + start, version))
    return tuple(found) if len(found) > 1 else None


def _concatenated(first: Sequence[int], rest: Sequence[int]) -> Sequence[int]:
    return array(rest.typecode, [*first, *rest]) if isinstance(rest, array) else (*first, *rest)
