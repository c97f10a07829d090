"""Checks that all engines share: repeated or impossible requests, incomplete weights."""

import math
from collections.abc import Collection, Sequence, Set
from typing import NamedTuple

from dapo.core.errors import EngineError
from dapo.engines.engine import Capabilities
from dapo.types import GenerationRequest

NAMES_SHOWN = 5
_MIN_TEMPERATURE = 1e-20
_MAX_TEMPERATURE = 1e20
"""The range of temperatures besides 0: beyond it logits, divided in float32, are not finite."""
TEMPERATURES = f"0 (greedy) or a number from {_MIN_TEMPERATURE:g} to {_MAX_TEMPERATURE:g}"


class EngineState:
    """Base of engines: whether it is open, its weights' version, and the requests in flight."""

    def __init__(self, *, version: int | None) -> None:
        """`version` of the weights that the engine starts with; None: it starts without weights."""
        self._version = version
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @property
    def in_flight(self) -> Collection[str]:
        """Ids of the unanswered requests, in order of submission where that order is known."""
        raise NotImplementedError

    def drop_weights(self) -> None:
        """Keep the weights; an engine that can free their memory overrides this method."""
        self._require_idle("drop_weights")

    def close(self) -> None:
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")

    def _require_idle(self, call: str) -> None:
        self._require_open()
        if n := len(self.in_flight):
            raise EngineError(
                f"{call} while {n} requests are in flight: poll until they have finished, or abort"
                " them"
            )

    def _require_weights(self) -> int:
        """Return the version of the weights. Raises EngineError unless a complete set is loaded."""
        self._require_open()
        if self._version is None:
            raise EngineError(
                "the weights are incomplete (dropped, never loaded, or the last load_weights"
                " failed): load a complete set first"
            )
        return self._version

    def _require_new(self, requests: Sequence[GenerationRequest]) -> None:
        active = self.in_flight
        if not isinstance(active, Set):  # a controller may have tens of thousands in flight
            active = set(active)
        new = set[str]()
        for request in requests:
            if request.id in active or request.id in new:
                raise EngineError(
                    f"request id {request.id!r} is in flight already; ids must be unique"
                )
            new.add(request.id)

    def _require_in_flight(self, request_ids: Sequence[str]) -> list[str]:
        """Return the ids without repetitions. Raises EngineError for one that is not in flight."""
        self._require_open()
        active = set(self.in_flight)
        if unknown := [name for name in request_ids if name not in active]:
            raise EngineError(
                f"abort: request {unknown[0]!r} is not in flight ({len(unknown)} unknown in all)"
            )
        return list(dict.fromkeys(request_ids))


class PositionBound(NamedTuple):
    """A bound on the tokens of a prompt and its response; `name` is its source, for the message."""

    positions: int
    name: str
    fix: str


def check_requests(
    requests: Sequence[GenerationRequest],
    *,
    vocabulary: int | None = None,
    bounds: Sequence[PositionBound] = (),
) -> None:
    """Raise EngineError for the first request that could never be served."""
    prompt: tuple[int, ...] | None = None
    for request in requests:
        _check_numbers(request)
        _check_size(request, bounds)
        # the G requests of a group share a prompt
        if vocabulary is not None and request.prompt_ids is not prompt:
            low = min(request.prompt_ids)
            high = max(request.prompt_ids)
            if low < 0 or high >= vocabulary:
                raise EngineError(
                    f"request {request.id!r}: prompt token {low if low < 0 else high} is outside"
                    f" the model's vocabulary of {vocabulary}; is this the model's own tokenizer?"
                )
        prompt = request.prompt_ids


def is_temperature(value: float) -> bool:
    """Return True for a temperature that can be sampled at; 0 takes the most likely token."""
    return value == 0 or _MIN_TEMPERATURE <= value <= _MAX_TEMPERATURE


def _check_numbers(request: GenerationRequest) -> None:
    limit = request.max_new_tokens
    least = request.min_new_tokens
    expectations = (
        ("max_new_tokens", limit, "at least 1", limit >= 1),
        ("min_new_tokens", least, f"from 0 to max_new_tokens={limit}", 0 <= least <= limit),
        (
            "temperature",
            request.temperature,
            TEMPERATURES,
            is_temperature(request.temperature),
        ),
        ("top_p", request.top_p, "above 0 and at most 1", 0 < request.top_p <= 1),
        ("seed", request.seed, "0 or more", request.seed >= 0),
        ("offset", request.offset, "0 or more, the tokens sampled before", request.offset >= 0),
        (
            "prompt length",
            len(request.prompt_ids),
            "at least 1 token",
            len(request.prompt_ids) >= 1,
        ),
    )
    for name, value, expected, holds in expectations:
        if not holds:
            raise EngineError(f"request {request.id!r}: {name} must be {expected}, got {value}")


def _check_size(request: GenerationRequest, bounds: Sequence[PositionBound]) -> None:
    size = len(request.prompt_ids) + request.max_new_tokens
    for positions, name, fix in bounds:
        if size > positions:
            raise EngineError(
                f"request {request.id!r} needs {size} positions ({len(request.prompt_ids)} prompt +"
                f" {request.max_new_tokens} max_new_tokens), but {name} is {positions}; {fix}, or"
                " lower rollout.max_response_tokens, or with an environment environment.max_turns"
                " or environment.max_observation_tokens"
            )


def require_all_weights(count: int, *, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise EngineError unless the weights' names are those of the model's `count` parameters."""
    if missing or unexpected:
        raise EngineError(
            f"load_weights needs exactly the model's {count} parameters by name; "
            f"missing: {format_names(missing)}; unexpected: {format_names(unexpected)}"
        )


def require_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Raise EngineError for a weight whose shape differs from the model's."""
    if tuple(shape) != tuple(expected):
        raise EngineError(
            f"load_weights: {name} has shape {tuple(shape)}, the engine's model needs"
            f" {tuple(expected)}"
        )


def require_finite(logprobs_sum: float, version: int, dtype: object) -> None:
    """Raise EngineError if a sum of log-probabilities is not finite, because logits were not."""
    if not math.isfinite(logprobs_sum):
        raise EngineError(
            f"the model's logits are not finite (weights version {version}): the policy has"
            f" diverged, or {dtype} is too narrow for it"
        )


def format_names(names: Sequence[str]) -> str:
    """Return the first few names, for a message."""
    if not names:
        return "none"
    remainder = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + remainder
