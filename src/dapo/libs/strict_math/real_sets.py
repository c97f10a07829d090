"""Sets of real numbers as finite unions of intervals with exact endpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from .arithmetic import is_less, real_key, same_values, value_of
from .expressions import Node


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of an interval: a finite value, or with `infinite` -1 or 1 minus or plus
    infinity.
    """

    node: Node | None = None
    value: Any = None
    infinite: int = 0

    @classmethod
    def read(cls, node: Node) -> "Endpoint":
        """Return the endpoint given by an expression without variables. Raises Undefined or
        TooCostly.
        """
        if infinity_of(node):
            return cls(infinite=infinity_of(node))
        return cls(node=node, value=real_key(value_of(node)))

    def before(self, end: "Endpoint") -> bool:
        """Return True if it is smaller."""
        if self.infinite or end.infinite:
            return self.infinite < end.infinite
        return is_less(self.value, end.value)

    def equals(self, end: "Endpoint") -> bool:
        """Return True if the values are equal."""
        if self.infinite or end.infinite:
            return self.infinite == end.infinite
        return same_values(self.value, end.value)


def infinity_of(node: Node) -> int:
    """1 for infinity, -1 for minus infinity, 0 for anything else."""
    if node.op == "neg":
        return -infinity_of(node.args[0])
    return int(node.op == "constant" and node.text == "infinity")


@dataclass(frozen=True)
class Interval:
    """All numbers between two ends."""

    low: Endpoint
    high: Endpoint
    low_closed: bool
    high_closed: bool

    @property
    def is_empty(self) -> bool:
        """True if no number is in it."""
        if self.low.equals(self.high):
            return bool(self.low.infinite) or not (self.low_closed and self.high_closed)
        return self.high.before(self.low)


RealSet = tuple[Interval, ...]  # disjoint, in increasing order
MINUS_INFINITY = Endpoint(infinite=-1)
INFINITY = Endpoint(infinite=1)
REALS: RealSet = (Interval(MINUS_INFINITY, INFINITY, False, False),)


def point(end: Endpoint) -> RealSet:
    """Return the set of one number."""
    return (Interval(end, end, True, True),)


def half_line(end: Endpoint, sign: str) -> RealSet:
    """Return the numbers `x` for which `x sign end` is true; `sign` is one of `<`, `≤`, `>`, `≥`,
    `≠`.
    """
    below = Interval(MINUS_INFINITY, end, False, sign == "≤")
    above = Interval(end, INFINITY, sign == "≥", False)
    if sign == "≠":
        return (below, above)
    if sign in "<≤":
        return (below,)
    return (above,)


def union(*real_sets: RealSet) -> RealSet:
    """Return the numbers in any of the sets."""
    ordered: list[Interval] = []
    for interval in chain(*real_sets):
        if interval.is_empty:
            continue
        # no sorting by a key: the ends are compared to 40 digits
        index = 0
        while index < len(ordered) and not _starts_before(interval, ordered[index]):
            index += 1
        ordered.insert(index, interval)
    merged: list[Interval] = []
    for interval in ordered:
        if merged and _touches(merged[-1], interval):
            merged[-1] = _joined(merged[-1], interval)
        else:
            merged.append(interval)
    return tuple(merged)


def intersection(first: RealSet, second: RealSet) -> RealSet:
    """Return the numbers in both sets."""
    return union(tuple(_common(a, b) for a, b in product(first, second)))


def complement(real_set: RealSet) -> RealSet:
    """Return the real numbers outside the set."""
    outside = REALS
    for interval in real_set:
        pieces: list[Interval] = []
        if not interval.low.infinite:
            pieces.append(Interval(MINUS_INFINITY, interval.low, False, not interval.low_closed))
        if not interval.high.infinite:
            pieces.append(Interval(interval.high, INFINITY, not interval.high_closed, False))
        outside = intersection(outside, tuple(pieces))
    return outside


def same_endpoints(first: RealSet, second: RealSet) -> Sequence[tuple[Endpoint, Endpoint]] | None:
    """Return the pairs of corresponding endpoints if two sets have the same intervals, else None."""
    if len(first) != len(second):
        return None
    pairs = []
    for interval, counterpart in zip(first, second, strict=True):
        if interval.low_closed != counterpart.low_closed:
            return None
        if interval.high_closed != counterpart.high_closed:
            return None
        for pair in ((interval.low, counterpart.low), (interval.high, counterpart.high)):
            if not pair[0].equals(pair[1]):
                return None
            pairs.append(pair)
    return pairs


def _starts_before(first: Interval, second: Interval) -> bool:
    if first.low.equals(second.low):
        return first.low_closed and not second.low_closed
    return first.low.before(second.low)


def _touches(earlier: Interval, later: Interval) -> bool:
    """Return True if the later interval overlaps or continues the earlier one."""
    if earlier.high.equals(later.low):
        return earlier.high_closed or later.low_closed
    return later.low.before(earlier.high)


def _joined(earlier: Interval, later: Interval) -> Interval:
    if earlier.high.equals(later.high):
        return Interval(
            earlier.low, earlier.high, earlier.low_closed, earlier.high_closed or later.high_closed
        )
    last = later if earlier.high.before(later.high) else earlier
    return Interval(earlier.low, last.high, earlier.low_closed, last.high_closed)


def _common(first: Interval, second: Interval) -> Interval:
    """Return the numbers in both intervals, which may be none."""
    if first.low.equals(second.low):
        low = first.low
        low_closed = first.low_closed and second.low_closed
    else:
        inner = second if first.low.before(second.low) else first
        low = inner.low
        low_closed = inner.low_closed
    if first.high.equals(second.high):
        high = second.high
        high_closed = first.high_closed and second.high_closed
    else:
        inner = first if first.high.before(second.high) else second
        high = inner.high
        high_closed = inner.high_closed
    return Interval(low, high, low_closed, high_closed)
