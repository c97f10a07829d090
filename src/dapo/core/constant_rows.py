"""Masks with a single value, which all share one block of memory."""

from collections.abc import Sequence
from functools import lru_cache

MIN_LENGTH = 2**15
"""Length of the shared memory, doubled for longer rows."""


def constant_row(value: bool, length: int) -> Sequence[int]:
    """Return `length` ones or zeros as a read-only view of bytes, typed as `array("b")`."""
    if length < 0:
        raise ValueError(f"a row has at least 0 values, got {length}")
    return _memory(bool(value), max(MIN_LENGTH, 1 << (length - 1).bit_length()))[:length]


@lru_cache
def _memory(value: bool, length: int) -> memoryview:
    return memoryview(bytes([value]) * length).cast("b")
