"""Sets of real numbers as finite unions of intervals with exact endpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
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
        """The endpoint given by an expression without variables. Raises Undefined or TooCostly."""
        if infinity_of(node):
            return cls(infinite=infinity_of(node))
        return cls(node=node, value=real_key(value_of(node)))

    def before(self, other: "Endpoint") -> bool:
        """Whether it is smaller."""
        if self.infinite or other.infinite:
            return self.infinite < other.infinite
        return is_less(self.value, other.value)

    def equals(self, other: "Endpoint") -> bool:
        """Whether the values are equal."""
        if self.infinite or other.infinite:
            return self.infinite == other.infinite
        return same_values(self.value, other.value)


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
        """Whether no number is in it."""
        if self.low.equals(self.high):
            return bool(self.low.infinite) or not (self.low_closed and self.high_closed)
        return self.high.before(self.low)


RealSet = tuple[Interval, ...]  # disjoint, in increasing order
MINUS_INFINITY = Endpoint(infinite=-1)
INFINITY = Endpoint(infinite=1)
REALS: RealSet = (Interval(MINUS_INFINITY, INFINITY, False, False),)


def point(end: Endpoint) -> RealSet:
    """The set of one number."""
    return (Interval(end, end, True, True),)


def half_line(end: Endpoint, sign: str) -> RealSet:
    """The numbers `x` for which `x sign end` is true; `sign` is one of `<`, `≤`, `>`, `≥`, `≠`."""
    below = Interval(MINUS_INFINITY, end, False, sign == "≤")
    above = Interval(end, INFINITY, sign == "≥", False)
    if sign == "≠":
        return (below, above)
    if sign in "<≤":
        return (below,)
    return (above,)


def union(*real_sets: RealSet) -> RealSet:
    """The numbers in any of the sets."""
    intervals = [
        interval for real_set in real_sets for interval in real_set if not interval.is_empty
    ]
    ordered: list[Interval] = []
    for interval in intervals:
        index = next(
            (i for i, later in enumerate(ordered) if _starts_before(interval, later)), len(ordered)
        )
        ordered.insert(index, interval)
    merged: list[Interval] = []
    for interval in ordered:
        if merged and _touches(merged[-1], interval):
            merged[-1] = _joined(merged[-1], interval)
        else:
            merged.append(interval)
    return tuple(merged)


def intersection(first: RealSet, second: RealSet) -> RealSet:
    """The numbers in both sets."""
    return union(
        tuple(common for a in first for b in second if not (common := _common(a, b)).is_empty)
    )


def complement(real_set: RealSet) -> RealSet:
    """The real numbers outside the set."""
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
    """The pairs of corresponding endpoints if two sets have the same intervals, else None."""
    if len(first) != len(second):
        return None
    pairs = []
    for a, b in zip(first, second, strict=True):
        closed = (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed)
        if not (closed and a.low.equals(b.low) and a.high.equals(b.high)):
            return None
        pairs += [(a.low, b.low), (a.high, b.high)]
    return pairs


def _starts_before(first: Interval, second: Interval) -> bool:
    if first.low.equals(second.low):
        return first.low_closed and not second.low_closed
    return first.low.before(second.low)


def _touches(earlier: Interval, later: Interval) -> bool:
    """Whether `other`, which starts later, overlaps or continues `one`."""
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


def _common(one: Interval, other: Interval) -> Interval:
    first, second = (one, other) if one.low.before(other.low) else (other, one)
    low_closed = (
        first.low_closed and second.low_closed
        if first.low.equals(second.low)
        else second.low_closed
    )
    small, large = (one, other) if one.high.before(other.high) else (other, one)
    same = small.high.equals(large.high)
    high_closed = small.high_closed and large.high_closed if same else small.high_closed
    return Interval(second.low, small.high, low_closed, high_closed)
