"""Suggests known names that are similar to an unknown one, for error messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str | None = None, count: int = 1) -> str:
    """`did you mean sums?`; where no known name is similar, `otherwise`, or a list of all known names."""
    known = list(known)
    if close := get_close_matches(word, known, n=count, cutoff=0.5):
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(known)}" if otherwise is None else otherwise
