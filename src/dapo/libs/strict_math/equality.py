"""Compares expressions by value and form, and checks whether the sides of an equation agree."""

from fractions import Fraction

from .answer import Quantity, Value
from .answer_forms import form_allows, is_literal
from .arithmetic import Value as Number
from .arithmetic import (
    is_near,
    is_rounding,
    is_zero,
    names_of,
    same_function,
    same_values,
    value_of,
)
from .expressions import Node, number, unsigned
from .real_sets import infinity_of
from .units import PERCENT, conversion

# Significant digits, all correct, that a decimal needs to answer an irrational reference
_MIN_DIGITS = 7
_DIGITS_OF_A_DOUBLE = (16, 17)


def same_expression(reference: Node, answer: Node) -> bool:
    """Return True if an expression has the reference's value in a form that leaves nothing to be
    computed.
    """
    infinity = infinity_of(reference)
    if infinity or infinity_of(answer):
        return infinity == infinity_of(answer)
    if reference == answer:
        return True
    if names_of(answer) != names_of(reference):
        return False
    if is_decimal(answer) and not names_of(reference):
        value = value_of(reference)
        if not isinstance(value, Fraction):
            return _is_value_in_decimals(answer, value)
    if not form_allows(reference, answer):
        return False
    if names_of(reference):
        return same_function(reference, answer)
    return same_values(value_of(reference), value_of(answer))


def same_exact(node: Node, candidate: Node) -> bool:
    """Return True if two expressions have the same rational value."""
    value = value_of(node)
    candidate_value = value_of(candidate)
    return isinstance(value, Fraction) and value == candidate_value


def is_below_one(node: Node) -> bool:
    """Return True if it is a literal number between -1 and 1."""
    return is_literal(node) and abs(value_of(node)) < 1


def is_hundredth(node: Node, percentage: Node) -> bool:
    """Return True if a number is a hundredth of another one, both in a finished form: 0.5 of 50,
    pi/4 of 25 pi.
    """
    for part in (node, percentage):
        if names_of(part) or infinity_of(part):
            return False
    if is_literal(percentage) and is_literal(node):
        return value_of(node) * 100 == value_of(percentage)
    if not form_allows(node, percentage) or is_decimal(percentage):
        return False
    value = value_of(percentage)
    return same_values(value_of(node), value / 100)


def is_plain_number(node: Node) -> bool:
    """Return True if it is written as digits, with or without a sign and a decimal point."""
    node = unsigned(node)
    return node.op == "number" and "e" not in node.text.lower()


def is_decimal(node: Node) -> bool:
    """Return True if it is written with a decimal point and without an exponent."""
    return is_plain_number(node) and "." in unsigned(node).text


def claim_holds(claim: Quantity, value: Value) -> bool:
    """Return True if another side of an equation has the value of its last side; units are
    converted where that is known.
    """
    if not isinstance(value, Quantity) or names_of(value.node):
        return False
    claimed = value_of(claim.node)
    actual = value_of(value.node)
    same_unit = not claim.unit or not value.unit or claim.unit == value.unit
    if same_unit and same_values(claimed, actual):
        return True
    if claim.unit == value.unit:
        # the digits of a difference may cancel
        return actual == 0 and is_zero(claim.node)
    if claim.unit == PERCENT:
        return _is_percentage(claimed, actual)
    if value.unit == PERCENT:
        return _is_percentage(actual, claimed)
    if not same_unit:
        factor = conversion(claim.unit, value.unit)
        if factor is None:
            return True  # units of other dimensions, such as persons and dollars
        return isinstance(claimed, Fraction) and same_values(claimed * factor, actual)
    return actual == 0 and is_zero(claim.node)


def _is_percentage(percentage: Number, fraction: Number) -> bool:
    return isinstance(percentage, Fraction) and same_values(percentage / 100, fraction)


def approximation_holds(exact: Node, decimal: Node) -> bool:
    r"""Return True if the right side of `\approx` is the left one, rounded or truncated to its
    number of digits.
    """
    if not is_literal(decimal) or decimal.op not in ("number", "neg"):
        return False
    _, _, decimals = unsigned(decimal).text.partition(".")
    return is_rounding(value_of(decimal), len(decimals), value_of(exact))


def difference(left_side: Node, right_side: Node) -> Node:
    """Return the difference of two sides, which is zero where the equation holds."""
    return Node("+", (left_side, Node("neg", (right_side,))))


def is_multiple(node: Node, candidate: Node, *, positive: bool = False) -> bool:
    """Return True if one expression is the other times a constant that is not zero."""
    if names_of(node) != names_of(candidate):
        return False
    point = {
        name: Fraction(19 + 7 * i, 11 + 2 * i) for i, name in enumerate(sorted(names_of(node)))
    }
    first = value_of(node, point)
    second = value_of(candidate, point)
    if first == 0 or second == 0:
        return False
    if not isinstance(first, Fraction) or not isinstance(second, Fraction):
        return same_function(node, candidate) or (
            not positive and same_function(node, Node("neg", (candidate,)))
        )
    factor = first / second
    return (factor > 0 or not positive) and same_function(
        node, Node("*", (number(factor), candidate))
    )


def _is_value_in_decimals(answer: Node, value: object) -> bool:
    """Return True if a decimal has enough digits of an irrational value, each of them right."""
    integer, _, decimals = unsigned(answer).text.partition(".")
    exact = value_of(answer)
    num_digits = len((integer + decimals).lstrip("0"))
    if num_digits >= _MIN_DIGITS and is_rounding(exact, len(decimals), value):
        return True
    if num_digits in _DIGITS_OF_A_DOUBLE and is_near(exact, value):
        return True
    return same_values(exact, value)  # a reference such as 2^{1/2} \cdot 2^{3/2}, which is rational
