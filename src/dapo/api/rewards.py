"""What callers hand over as a reward, by name and weight. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dapo.core.errors import RewardError

Reward: TypeAlias = Any
"""A verifier's name, `module:function`, a function or another callable; a list of them, or a mapping to weights."""


def weighted_rewards(reward: Reward) -> list[tuple[Any, float]]:
    """The names and callables of a reward with their weights. Raises RewardError for anything else."""
    if isinstance(reward, Mapping):
        weighted = list(reward.items())
    elif isinstance(reward, list | tuple):
        weighted = [item if isinstance(item, tuple) else (item, 1.0) for item in reward]
    else:
        weighted = [(reward, 1.0)]
    for each, _ in weighted:
        if not isinstance(each, str) and not callable(each):
            raise RewardError(
                f"reward: expected a verifier's name, module:function, a function, or several of them, got {each!r}"
            )
    return weighted


def verifier_of(names: Mapping[str, float]) -> str | Mapping[str, float]:
    """`reward.verifier` for names with their weights."""
    return next(iter(names)) if list(names.values()) == [1.0] else names


def named_rewards(reward: Reward) -> tuple[str | Mapping[str, float], dict[str, Callable[..., Any]]]:
    """`reward.verifier` for a reward, and its callables by the names that stand for them there. Raises RewardError."""
    names: dict[str, float] = {}
    functions: dict[str, Callable[..., Any]] = {}
    for each, weight in weighted_rewards(reward):
        name = each if isinstance(each, str) else _name_of(each)
        if name in names:
            raise RewardError(f"reward: {name} is there twice; give it once, with a weight")
        names[name] = weight
        if not isinstance(each, str):
            functions[name] = each
    return verifier_of(names), functions


def _name_of(function: Callable[..., Any]) -> str:
    """`module:function`, whether it can be imported by that name or not."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"
