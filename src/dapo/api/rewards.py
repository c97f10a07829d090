"""The rewards of a Python call by name and weight. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dapo.core.errors import RewardError

Reward: TypeAlias = Any
"""A verifier's name, `module:function`, a function or another callable; a list of them, or a mapping to weights."""


def weights_by_name(reward: Reward, name_of: Callable[[Any], str]) -> dict[str, float]:
    """The weights of a reward by name.

    Args:
        reward: one verifier or several.
        name_of: names a function.

    Raises:
        RewardError: an element is neither a name nor a function, or a name occurs twice.
    """
    if isinstance(reward, Mapping):
        weighted = list(reward.items())
    else:
        several = reward if isinstance(reward, list | tuple) else [reward]
        weighted = [each if isinstance(each, tuple) else (each, 1.0) for each in several]
    weights: dict[str, float] = {}
    for each, weight in weighted:
        if not isinstance(each, str) and not callable(each):
            raise RewardError(
                f"reward: expected a verifier's name, module:function, a function, or several of them, got {each!r}"
            )
        name = each if isinstance(each, str) else name_of(each)
        if name in weights:
            raise RewardError(f"reward: {name.removeprefix(':')} is listed twice; list it once, with a weight")
        weights[name] = weight
    return weights


def verifier_option(weights: Mapping[str, float]) -> str | Mapping[str, float]:
    """The value of `reward.verifier` for names with their weights."""
    return next(iter(weights)) if list(weights.values()) == [1.0] else weights
