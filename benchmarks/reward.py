"""The reward of forced-length steps: every second response is right, so that every group trains in every system."""

from typing import Any

from dapo.types import Group


def every_second(completions: list[Any], **columns: Any) -> list[float]:
    """+1, -1, +1, ... in the order of the responses, whatever they say."""
    return [1.0 if i % 2 == 0 else -1.0 for i in range(len(completions))]


def every_second_group(group: Group) -> bool:
    """Every second problem of the stream carries a signal, whatever the responses to it are."""
    return group.id % 2 == 0


def three_kinds(completions: list[str], prompts: list[str], **columns: Any) -> list[bool]:
    """Of sums a response is right if it begins with a digit; of `largest` each response is right, of others none.

    A policy can learn the first. To the others it gets groups without a signal, as to trivial and impossible problems.
    """
    return [
        "largest" in prompt or ("+" in prompt and completion[:1].isdigit())
        for completion, prompt in zip(completions, prompts, strict=True)
    ]
