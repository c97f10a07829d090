"""Compares expressions by value and form, and checks whether the sides of an equation agree."""

from fractions import Fraction

from .answer import Quantity, Value
from .answer_forms import form_allows, is_literal
from .arithmetic import (
    is_near,
    is_rounding,
    is_zero,
    names_of,
    same_function,
    same_values,
    value_of,
)
from .expressions import Node, number
from .real_sets import infinity_of
from .units import PERCENT, conversion

_MIN_DIGITS = 7
"""Significant digits, all correct, that a decimal needs to answer an irrational reference."""
_DIGITS_OF_A_DOUBLE = (16, 17)


def same_expression(reference: Node, answer: Node) -> bool:
    """Whether an expression has the reference's value in a form that leaves nothing to be
    computed.
    """
    if infinity_of(reference) or infinity_of(answer):
        return infinity_of(reference) == infinity_of(answer)
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
    """Whether two expressions have the same rational value."""
    first = value_of(node)
    second = value_of(candidate)
    return isinstance(first, Fraction) and first == second


def is_below_one(node: Node) -> bool:
    """Whether it is a literal number between -1 and 1."""
    return is_literal(node) and abs(value_of(node)) < 1


def is_hundredth(node: Node, percentage: Node) -> bool:
    """Whether a number is a hundredth of another one, both in a finished form: 0.5 of 50, pi/4 of
    25 pi.
    """
    if names_of(node) or names_of(percentage) or infinity_of(node) or infinity_of(percentage):
        return False
    if is_literal(percentage) and is_literal(node):
        return value_of(node) * 100 == value_of(percentage)
    if not form_allows(node, percentage) or is_decimal(percentage):
        return False
    value = value_of(percentage)
    return same_values(value_of(node), value / 100)


def is_plain_number(node: Node) -> bool:
    """Whether it is written as digits, with or without a sign and a decimal point."""
    node = node.args[0] if node.op == "neg" else node
    return node.op == "number" and "e" not in node.text.lower()


def is_decimal(node: Node) -> bool:
    """Whether it is written with a decimal point and without an exponent."""
    node = node.args[0] if node.op == "neg" else node
    return node.op == "number" and "." in node.text and "e" not in node.text.lower()


def claim_holds(claim: Quantity, value: Value) -> bool:
    """Whether another side of an equation has the value of its last side; units are converted where
    that is known.
    """
    if not isinstance(value, Quantity) or names_of(value.node):
        return False
    claimed = value_of(claim.node)
    stated_value = value_of(value.node)
    if same_values(claimed, stated_value) and (
        not claim.unit or not value.unit or claim.unit == value.unit
    ):
        return True
    if PERCENT in (claim.unit, value.unit) and claim.unit != value.unit:
        percentage, fraction = (
            (claimed, stated_value) if claim.unit == PERCENT else (stated_value, claimed)
        )
        return isinstance(percentage, Fraction) and same_values(percentage / 100, fraction)
    if claim.unit and value.unit and claim.unit != value.unit:
        factor = conversion(claim.unit, value.unit)
        return factor is None or (
            isinstance(claimed, Fraction) and same_values(claimed * factor, stated_value)
        )
    return stated_value == 0 and is_zero(claim.node)


def approximation_holds(exact: Node, decimal: Node) -> bool:
    r"""Whether the right side of `\approx` is the left one, rounded or truncated to its number of
    digits.
    """
    digits = (decimal.args[0] if decimal.op == "neg" else decimal).text
    if not is_literal(decimal) or decimal.op not in ("number", "neg"):
        return False
    return is_rounding(value_of(decimal), len(digits.partition(".")[2]), value_of(exact))


def difference(left: Node, right: Node) -> Node:
    """The difference of two sides, which is zero where the equation holds."""
    return Node("+", (left, Node("neg", (right,))))


def is_multiple(node: Node, candidate: Node, *, positive: bool = False) -> bool:
    """Whether one expression is the other times a constant that is not zero."""
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
    """Whether a decimal has enough digits of an irrational value, each of them right."""
    digits = (answer.args[0] if answer.op == "neg" else answer).text
    whole, _, decimals = digits.partition(".")
    exact = value_of(answer)
    num_digits = len((whole + decimals).lstrip("0"))
    if num_digits >= _MIN_DIGITS and is_rounding(exact, len(decimals), value):
        return True
    if num_digits in _DIGITS_OF_A_DOUBLE and is_near(exact, value):
        return True
    return same_values(exact, value)  # a reference such as 2^{1/2} \cdot 2^{3/2}, which is rational
