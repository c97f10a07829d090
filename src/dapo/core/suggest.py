"""Suggests known names that are similar to an unknown one, for error messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.5) -> list[str]:
    """At most `count` known names that are similar to `word`, the most similar first; `cutoff` 1 asks for equality."""
    return get_close_matches(word, list(known), n=count, cutoff=cutoff)


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str | None = None, count: int = 1) -> str:
    """`did you mean sums?`; where no known name is similar, `otherwise`, or a list of all known names."""
    known = list(known)
    if close := nearest(word, known, count=count):
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(known)}" if otherwise is None else otherwise
