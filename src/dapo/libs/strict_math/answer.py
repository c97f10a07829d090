"""The types of the parts of an answer: numbers with units, tuples, sets of numbers, equations,
matrices, words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .expressions import Node
from .real_sets import Endpoint, Interval, RealSet
from .units import Unit


@dataclass(frozen=True)
class Quantity:
    """A value with its unit."""

    node: Node
    unit: Unit = ()


@dataclass(frozen=True)
class TextAnswer:
    """An answer in words rather than mathematics."""

    text: str


@dataclass(frozen=True)
class Collection:
    """Several parts in brackets: a tuple, a list, a vector, or with `{}` a set, whose order is
    irrelevant.
    """

    items: tuple["Part", ...]
    brackets: str


@dataclass(frozen=True)
class Matrix:
    """Rows of expressions."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class NumberSet:
    """A set of real numbers given by intervals."""

    real_set: RealSet


@dataclass(frozen=True)
class Relation:
    """An inequality that is not solved for one variable, or has several."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio or a time of day: `3:4`, `5:30 pm`."""

    terms: tuple[Node, ...]
    unit: Unit


@dataclass(frozen=True)
class BaseNumber:
    """Digits in a named base: `1011_2`."""

    digits: str
    base: str


@dataclass(frozen=True)
class Congruence:
    r"""A residue class: `3 \pmod 7`."""

    residue: Node
    modulus: Node


MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
"""The sign of each inequality, with the sign that it becomes when the sides are exchanged."""

Value: TypeAlias = (
    Quantity
    | TextAnswer
    | Collection
    | Matrix
    | NumberSet
    | Relation
    | Ratio
    | BaseNumber
    | Congruence
)


@dataclass(frozen=True)
class Part:
    """One of the values of an answer; most answers have one."""

    value: Value
    # the names that equal it: x in `x = 5`; several for `(x, y) = (1, 2)`
    names: tuple[str, ...] = ()
    # other sides of the equation without variables: `6 * 7` in `6 * 7 = 42`
    claims: tuple[Quantity, ...] = ()
    left: tuple[Node, ...] = ()  # sides with variables that are more than a name
    # the first side with variables, as text and as an expression
    first: tuple[str, Node | None] | None = None


@dataclass(frozen=True)
class Answer:
    """The parts of an answer, in their written order."""

    parts: tuple[Part, ...]
    text: str = field(compare=False, default="")


def nodes_of(value: Value) -> Sequence[Node]:
    """Return the expressions of a value."""
    if isinstance(value, Quantity):
        return [value.node]
    if isinstance(value, Collection):
        return [node for item in value.items for node in nodes_of(item.value)]
    if isinstance(value, Matrix):
        return [node for row in value.rows for node in row]
    if isinstance(value, Relation):
        return value.sides
    if isinstance(value, Ratio):
        return value.terms
    return [value.residue, value.modulus] if isinstance(value, Congruence) else []


def units_of(value: Value) -> list[Unit]:
    """Return the units of the numbers of a value."""
    if isinstance(value, Quantity | Ratio):
        return [value.unit]
    return (
        [unit for item in value.items for unit in units_of(item.value)]
        if isinstance(value, Collection)
        else []
    )


def real_set_of(value: Value) -> RealSet | None:
    """Return the set of numbers that a value states or may state: `(1, 2)` is a point or an
    interval.
    """
    if isinstance(value, NumberSet):
        return value.real_set
    if (
        not isinstance(value, Collection)
        or len(value.items) != 2
        or value.brackets not in ("()", "[]", "[)", "(]")
    ):
        return None
    low, high = (item.value for item in value.items)
    if not isinstance(low, Quantity) or not isinstance(high, Quantity):
        return None
    try:
        ends = Endpoint.read(low.node), Endpoint.read(high.node)
    except ArithmeticError:
        return None
    interval = Interval(*ends, value.brackets[0] == "[", value.brackets[1] == "]")
    return None if interval.is_empty else (interval,)


def is_unbounded(part: Part) -> bool:
    """Return True if a part is a set of numbers without a lower or an upper bound."""
    real_set = real_set_of(part.value)
    return bool(real_set) and any(
        end.infinite for interval in real_set or () for end in (interval.low, interval.high)
    )
