"""Continues responses under new weights: the engine stops, loads them, and samples the rest."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from dapo.engines.engine import EngineLayer, RolloutEngine, Unfinished, float_array
from dapo.types import Generation, GenerationRequest

Versions: TypeAlias = tuple[tuple[int, int], ...]
"""The first token and the version of each stretch of a response, in order."""


class ContinuingEngine(EngineLayer):
    """Makes an engine suspendable: the rest of a response is a request with an offset.

    The prompt of that request holds the tokens so far, so that keys and values are always those of
    the weights that sample. The parts are joined into one Generation, whose `versions` tell them
    apart.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self._beginnings: dict[str, Generation] = {}  # by the id of the request

    def poll(self) -> list[Generation]:
        return [self._joined(generation) for generation in self._engine.poll()]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return [self._joined(generation) for generation in self._engine.abort(request_ids)]

    def suspend(self, request_ids: Sequence[str]) -> list[Generation | Unfinished]:
        parts: list[Generation | Unfinished] = []
        for generation in self.abort(request_ids):
            is_whole = generation.finish != "aborted"
            parts.append(generation if is_whole else Unfinished(generation))
        return parts

    def resume(self, requests: Sequence[GenerationRequest], parts: Sequence[Unfinished]) -> None:
        continuations = []
        for request, part in zip(requests, parts, strict=True):
            beginning = part.generation
            if len(beginning.token_ids) > 0:
                self._beginnings[request.id] = beginning
                continuations.append(_rest_of(request, beginning))
            else:
                continuations.append(request)
        self._engine.submit(continuations)

    def close(self) -> None:
        self._beginnings.clear()
        super().close()

    def _joined(self, generation: Generation) -> Generation:
        """Return a generation behind the tokens that its response has from earlier weights."""
        beginning = self._beginnings.pop(generation.request_id, None)
        if beginning is None:
            return generation
        return joined(beginning, generation)


def _rest_of(request: GenerationRequest, beginning: Generation) -> GenerationRequest:
    """Return the request for the tokens that follow the beginning of its response."""
    count = len(beginning.token_ids)
    return replace(
        request,
        prompt_ids=(*request.prompt_ids, *beginning.token_ids),
        max_new_tokens=request.max_new_tokens - count,
        min_new_tokens=max(0, request.min_new_tokens - count),
        offset=request.offset + count,
    )


def joined(beginning: Generation, continuation: Generation) -> Generation:
    """Join the parts of a single response."""
    versions = beginning.versions or ((0, beginning.version),)
    return replace(
        continuation,
        token_ids=array("i", [*beginning.token_ids, *continuation.token_ids]),
        logprobs=float_array([*beginning.logprobs, *continuation.logprobs]),
        version=beginning.version,
        versions=extended(versions, continuation, at=len(beginning.token_ids)),
    )


def extended(versions: Versions, part: Generation, *, at: int) -> Versions | None:
    """Return the versions of a response of `at` tokens and a further part; None for one version."""
    entries = list(versions) if at else []
    if part.token_ids:
        for start, version in part.versions or ((0, part.version),):
            if not entries or entries[-1][1] != version:
                entries.append((at + start, version))
    return tuple(entries) if len(entries) > 1 else None
