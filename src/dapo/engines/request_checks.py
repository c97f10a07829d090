"""What an engine may be asked for: all requests of a call are checked before one of them is queued."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from dapo.core.errors import EngineError
from dapo.types import GenerationRequest


@dataclass(frozen=True)
class PositionBound:
    """How many tokens a prompt and its response may have together."""

    positions: int
    name: str
    """What sets the bound, for the message."""
    fix: str


def new_requests(
    requests: Sequence[GenerationRequest],
    in_flight: Sequence[Container[str]],
    *,
    vocabulary: int,
    bounds: Sequence[PositionBound] = (),
) -> dict[str, GenerationRequest]:
    """The requests by id. Raises EngineError for the first that could never be served or whose id is in flight."""
    new: dict[str, GenerationRequest] = {}
    prompt: tuple[int, ...] | None = None
    for request in requests:
        if request.id in new or any(request.id in ids for ids in in_flight):
            raise EngineError(f"request id {request.id!r} is in flight already; ids must be unique")
        new[request.id] = request
        _check_numbers(request)
        _check_size(request, bounds)
        if request.prompt_ids is not prompt:  # the G requests of a group share theirs
            _check_prompt(request, vocabulary)
        prompt = request.prompt_ids
    return new


def _check_numbers(request: GenerationRequest) -> None:
    expectations = (
        ("max_new_tokens", request.max_new_tokens, "at least 1", request.max_new_tokens >= 1),
        (
            "min_new_tokens",
            request.min_new_tokens,
            f"from 0 to max_new_tokens={request.max_new_tokens}",
            0 <= request.min_new_tokens <= request.max_new_tokens,
        ),
        ("temperature", request.temperature, "0 (greedy) or more", 0 <= request.temperature < float("inf")),
        ("top_p", request.top_p, "above 0 and at most 1", 0 < request.top_p <= 1),
        ("seed", request.seed, "0 or more", request.seed >= 0),
        ("prompt length", len(request.prompt_ids), "at least 1 token", len(request.prompt_ids) >= 1),
    )
    for name, value, expected, holds in expectations:
        if not holds:
            raise EngineError(f"request {request.id!r}: {name} must be {expected}, got {value}")


def _check_size(request: GenerationRequest, bounds: Sequence[PositionBound]) -> None:
    size = len(request.prompt_ids) + request.max_new_tokens
    for bound in bounds:
        if size > bound.positions:
            raise EngineError(
                f"request {request.id!r} needs {size} positions ({len(request.prompt_ids)} prompt + "
                f"{request.max_new_tokens} max_new_tokens), but {bound.name} is {bound.positions}; {bound.fix}, or "
                "lower rollout.max_response_tokens"
            )


def _check_prompt(request: GenerationRequest, vocabulary: int) -> None:
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocabulary:
        raise EngineError(
            f"request {request.id!r}: prompt token {low if low < 0 else high} is outside the model's vocabulary of "
            f"{vocabulary}; is this the model's own tokenizer?"
        )
