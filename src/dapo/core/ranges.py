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

    Raises:
        ValueError: the ranges do not ascend within `length`.
    """
    are_pairs = all(len(pair) == 2 for pair in ranges)
    ends = [0, *chain.from_iterable(ranges), length]
    if not are_pairs or any(left > right for left, right in pairwise(ends)):
        raise ValueError(
            f"expected ascending ranges (start, end) within {length} tokens, got {ranges}"
        )
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            first, _ = joined[-1]
            joined[-1] = (first, end)
        elif start < end:
            joined.append((start, end))
    if not length or joined == [(0, length)]:
        return None
    return tuple(joined)


def select(values: Sequence[T], ranges: Ranges | None) -> Sequence[T]:
    """Return the values in the ranges, in order."""
    if ranges is None:
        return values
    return [value for start, end in ranges for value in values[start:end]]


def spread(selected: Sequence[float], ranges: Ranges | None, length: int) -> Sequence[float]:
    """Return the row of this length from which `select` takes these values, zeros elsewhere."""
    if ranges is None:
        return selected
    row = array("d", bytes(8 * length))
    position = 0
    for start, end in ranges:
        size = end - start
        row[start:end] = array("d", selected[position : position + size])
        position += size
    return row


def zeroed(values: Sequence[float], ranges: Ranges) -> Sequence[float]:
    """Return the values with zeros outside the ranges, as an array of their type or a tuple."""
    row = spread(select(values, ranges), ranges, len(values))
    if isinstance(values, array):
        return array(values.typecode, row)
    return tuple(row)


def mask_of(ranges: Ranges, length: int) -> "array[int]":
    """Return 1 for each token in the ranges, else 0, in one byte each."""
    mask = array("b", bytes(length))
    for start, end in ranges:
        # a stored range may be anything
        mask[start:end] = array("b", b"\1" * (min(end, length) - start))
    return mask
