"""The reward of forced-length steps: every second response is right, so that every group trains in
every system.
"""

from binascii import crc32
from typing import Any

from dapo.types import Group


def every_second(completions: list[Any], **columns: Any) -> list[float]:
    """+1, -1, +1, ... in the order of the responses, whatever they say."""
    return [1.0 if i % 2 == 0 else -1.0 for i in range(len(completions))]


def half_of_the_problems(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
    """+1 for about every second problem, chosen by its text, and -1 for the others."""
    return [1.0 if crc32(prompt.encode()) % 2 else -1.0 for prompt in prompts]


def every_second_group(group: Group) -> bool:
    """Every second problem of the stream carries a signal, whatever the responses to it are."""
    return group.id % 2 == 0


def three_kinds(completions: list[str], prompts: list[str], **columns: Any) -> list[bool]:
    """Three difficulties: sums need a digit first, `largest` accepts any response, other tasks
    accept none.

    A policy can learn the first. The other two give groups without a signal, like trivial and
    impossible problems.
    """
    return [
        "largest" in prompt or ("+" in prompt and completion[:1].isdigit())
        for completion, prompt in zip(completions, prompts, strict=True)
    ]
