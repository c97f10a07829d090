"""Shortens text and formats numbers for messages and tables, and suggests known names."""

import re
from collections.abc import Iterable, Mapping, Sequence
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
    shortened = _LONG_WORD.sub(lambda word: shorten(word[0], QUOTED_CHARS, keep="ends"), text)
    lines = shortened.split("\n")
    if len(lines) > MAX_LINES:
        mark = f"[... {len(lines) - MAX_LINES:,} lines left out ...]"
        lines[MAX_LINES // 2 : -MAX_LINES // 2] = [mark]
    return "\n".join(shorten(line, MAX_LINE_CHARS, keep="ends") for line in lines)


def quoted(value: object) -> str:
    """Return a value for a message: its `repr`, of which a long one keeps both ends."""
    return shorten(repr(value), QUOTED_CHARS, keep="ends")


def excerpt(text: str) -> str:
    """Return both ends of a long text, with a count of the lines or characters left out."""
    lines = text.strip("\n").split("\n")
    if len(lines) > EXCERPT_LINES:
        head = lines[: EXCERPT_LINES // 2]
        tail = lines[-EXCERPT_LINES // 2 :]
        lines = [*head, f"[... {len(lines) - EXCERPT_LINES:,} lines left out ...]", *tail]
    text = "\n".join(lines)
    if len(text) > EXCERPT_CHARS:
        half = EXCERPT_CHARS // 2
        mark = f"[... {len(text) - EXCERPT_CHARS:,} characters left out ...]"
        text = f"{text[:half]} {mark} {text[-half:]}"
    return text


def did_you_mean(
    word: str, choices: Iterable[str], *, otherwise: str | None = None, count: int = 1
) -> str:
    """Return the question `did you mean sums?` for a name that is not known.

    Args:
        word: the name.
        choices: the known names.
        otherwise: the answer without a similar name; None: a list of all known names.
        count: the most names that are proposed.
    """
    choices = list(choices)
    similar = get_close_matches(word, choices, n=count, cutoff=0.5)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    if otherwise is not None:
        return otherwise
    return f"known: {', '.join(choices)}"


def with_interval(
    value: float | None, interval: Sequence[float | None] | None, style: str = ".1%", none: str = ""
) -> str:
    """Format an accuracy and its interval, `62.5% (45.3% to 77.1%)`.

    Args:
        value: the accuracy; None: nothing was judged.
        interval: its ends, if there are any.
        style: the format of the numbers.
        none: the text in place of a missing interval.
    """
    if value is None:
        return "nothing judged"
    low, high = interval or (None, None)
    if low is None or high is None:
        return f"{value:{style}}{none}"
    return f"{value:{style}} ({low:{style}} to {high:{style}})"


def plural(number: int, noun: str) -> str:
    """Return a count and its noun.

    >>> plural(1, "run"), plural(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """Format bytes with a unit, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def weighted(names: str | Mapping[str, float]) -> str:
    """Return a verifier's name, or several with their weights: `0.8 x math + 0.2 x format`."""
    if isinstance(names, str):
        return names
    return " + ".join(f"{weight:g} x {name}" for name, weight in names.items())
