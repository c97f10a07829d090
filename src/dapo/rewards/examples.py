"""Small reward functions in TRL's convention: the reward of configs/tiny.yaml, and templates for
your own.
"""

from typing import Any


def has_digit(completions: list[Any], **columns: Any) -> list[bool]:
    """Right if the response contains a digit; even a random model sometimes succeeds."""
    return [
        any(character.isdigit() for character in _text(completion)) for completion in completions
    ]


def digit_share(completions: list[Any], **columns: Any) -> list[float]:
    """Return a score between 0 and 1: the fraction of digits among the response's characters."""
    texts = [_text(completion) for completion in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def brevity(completions: list[Any], **columns: Any) -> list[float]:
    """Score few words high, from 1 to 0; combine it with a verifier at a small weight."""
    return [1.0 / (1.0 + len(_text(completion).split())) for completion in completions]


def _text(completion: Any) -> str:
    """Return the text of a completion: a string, or a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
