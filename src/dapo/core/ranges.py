"""Ranges [start, end) of a row's tokens, such as those of an episode that the policy sampled; None:
the whole row.
"""

from array import array
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Ranges: TypeAlias = tuple[tuple[int, int], ...]


def merged(ranges: Sequence[Sequence[int]], length: int) -> Ranges | None:
    """Join ranges that touch; None if they cover the row.

    Raises ValueError unless they ascend within `length`.
    """
    if any(len(each) != 2 for each in ranges) or any(
        a > b for a, b in pairwise([0, *chain.from_iterable(ranges), length])
    ):
        raise ValueError(
            f"expected ascending ranges (start, end) within {length} tokens, got {ranges}"
        )
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        elif start < end:
            found.append((start, end))
    return None if not length or found == [(0, length)] else tuple(found)


def select(values: Sequence[T], ranges: Ranges | None) -> Sequence[T]:
    """The values in the ranges, in order."""
    return (
        values
        if ranges is None
        else [value for start, end in ranges for value in values[start:end]]
    )


def spread(selected: Sequence[float], ranges: Ranges | None, length: int) -> Sequence[float]:
    """The row of this length from which `select` takes these values, with zeros elsewhere."""
    if ranges is None:
        return selected
    found = array("d", bytes(8 * length))
    taken = 0
    for start, end in ranges:
        found[start:end] = array("d", selected[taken : taken + end - start])
        taken += end - start
    return found


def zeroed(values: Sequence[float], ranges: Ranges) -> Sequence[float]:
    """The values with zeros outside of the ranges; an array stays one of its type, anything else
    becomes a tuple.
    """
    found = spread(select(values, ranges), ranges, len(values))
    return array(values.typecode, found) if isinstance(values, array) else tuple(found)


def mask_of(ranges: Ranges, length: int) -> "array[int]":
    """1 for each token in the ranges, else 0, in one byte each."""
    found = array("b", bytes(length))
    for start, end in ranges:
        # a stored range may be anything
        found[start:end] = array("b", b"\1" * (min(end, length) - start))
    return found
