"""Shortens text and formats numbers for messages and tables, and suggests known names."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Literal

QUOTED_CHARS = 160
MAX_LINE_CHARS = 1500
MAX_LINES = 120
_LONG_WORD = re.compile(r"\S{400,}")
EXCERPT_CHARS = 800
EXCERPT_LINES = 16


def one_line(text: str) -> str:
    """Return the words of a text, separated by single spaces."""
    return " ".join(text.split())


def shorten(text: str, chars: int, *, keep: Literal["start", "ends", "end"] = "start") -> str:
    """Cut a text to `chars` characters, with its start, both ends or its end, and a mark."""
    if len(text) <= chars:
        return text
    if keep == "start":
        return f"{text[: chars - 3]}..."
    if keep == "end":
        return f"... {text[4 - chars :]}"
    half = (chars - 7) // 2
    return f"{text[:half].rstrip()} [...] {text[-half:].lstrip()}"


def bounded(text: str) -> str:
    """Return a message in which long words, lines and lists of lines keep only both ends."""
    lines = [
        _LONG_WORD.sub(lambda word: shorten(word[0], QUOTED_CHARS, keep="ends"), line)
        for line in text.split("\n")
    ]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES // 2 : -MAX_LINES // 2] = [
            f"[... {len(lines) - MAX_LINES:,} lines left out ...]"
        ]
    return "\n".join(shorten(line, MAX_LINE_CHARS, keep="ends") for line in lines)


def quoted(value: object) -> str:
    """Return a value for a message: its `repr`, of which a long one keeps both ends."""
    return shorten(repr(value), QUOTED_CHARS, keep="ends")


def excerpt(text: str) -> str:
    """Both ends of a long text, with a count of the lines or characters left out."""
    lines = text.strip("\n").split("\n")
    if len(lines) > EXCERPT_LINES:
        head = lines[: EXCERPT_LINES // 2]
        tail = lines[-EXCERPT_LINES // 2 :]
        lines = [*head, f"[... {len(lines) - EXCERPT_LINES:,} lines left out ...]", *tail]
    text = "\n".join(lines)
    if len(text) > EXCERPT_CHARS:
        half = EXCERPT_CHARS // 2
        text = (
            f"{text[:half]} [... {len(text) - EXCERPT_CHARS:,} characters left out ...]"
            f" {text[-half:]}"
        )
    return text


def did_you_mean(
    word: str, choices: Iterable[str], *, otherwise: str | None = None, count: int = 1
) -> str:
    """`did you mean sums?`, or without a similar name `otherwise`, or a list of all known names."""
    choices = list(choices)
    if close := get_close_matches(word, choices, n=count, cutoff=0.5):
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(choices)}" if otherwise is None else otherwise


def with_interval(
    value: float | None, interval: Sequence[float | None] | None, style: str = ".1%", none: str = ""
) -> str:
    """Format an accuracy and its interval, `62.5% (45.3% to 77.1%)`, or `none` without one."""
    if value is None:
        return "nothing judged"
    low, high = interval or (None, None)
    return f"{value:{style}}{none if low is None or high is None else f' ({low:{style}} to {high:{style}})'}"
