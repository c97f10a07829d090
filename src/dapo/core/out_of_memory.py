"""Turns a device's error of having no memory left into one for people. No torch here: the caller names its error."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dapo.core.errors import OutOfMemory

_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"([\d.]+ \w+) is free")
_CAPACITY = re.compile(r"total capacity of ([\d.]+ \w+)")


@contextmanager
def explain_out_of_memory(
    kind: type[Exception], doing: str, advice: str, *, then: str = "resume the run"
) -> Iterator[None]:
    """Raise OutOfMemory where the block, or the function that this decorates, raises an error of this kind.

    The variables of the frames that failed are dropped: they hold the very tensors that filled the memory, and saving
    the state needs some of it.

    Args:
        kind: The error of the library that computes: torch.OutOfMemoryError.
        doing: The computation, as the subject of a sentence.
        advice: Which options to change, and how.
        then: The remedy with the changed options.
    """
    try:
        yield
    except kind as error:
        text = str(error)
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory(f"{doing} found no memory{_amounts(text)}: {advice}, and {then}") from None


def _amounts(text: str) -> str:
    """The bytes that were asked for and those that were free, as far as torch's message has them."""
    asked, free, capacity = (pattern.search(text) for pattern in (_ASKED, _FREE, _CAPACITY))
    parts = [f"{asked[1]} were asked for"] if asked else []
    if free:
        parts.append(f"{free[1]} of {capacity[1]} were free" if capacity else f"{free[1]} were free")
    return f" ({', '.join(parts) or ' '.join(text.split())[:200]})" if text else ""
