"""Evaluates expressions within bounds: exactly where the value is rational, else to 100 digits."""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, TypeAlias

from .expressions import Node

Value: TypeAlias = Fraction | Any  # a Fraction where it is exact, else a number of mpmath
_MAX_BITS = 400_000
_MAX_FACTORIAL = 20_000
_MAX_MAGNITUDE = 10**15  # bits of the exponent's effect
_DIGITS = 100
# Digits, of the 100 computed, to which two irrational values must agree to be equal: a relative
# tolerance
_AGREEMENT = 40
_MAX_HEIGHT = 10**20
_MAX_INDEX = 64  # of a root that is computed exactly
_POINTS = 8
_MIN_POINTS = 3


class Undefined(ArithmeticError):
    """The expression has no value: a division by zero, a logarithm of zero."""


class TooCostly(ArithmeticError):
    """The value is beyond the bounds."""


@cache
def _mp() -> Any:
    """Return a private mpmath context, whose precision no other code changes."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = _DIGITS
    return context


def value_of(node: Node, names: Mapping[str, Fraction] | None = None) -> Value:
    """Return the value of an expression at these values of its variables.

    Raises:
        Undefined: it has no value.
        TooCostly: it exceeds the bounds; this is found before anything large is computed.
    """
    try:
        return _value(node, names or {})
    except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:
        raise Undefined(str(error)) from error


def names_of(node: Node) -> frozenset[str]:
    """Return the variables of an expression."""
    if node.op == "name":
        return frozenset([node.text])
    if not node.args:
        return frozenset()
    return frozenset().union(*map(names_of, node.args))


def same_values(first: Value, second: Value) -> bool:
    """Return True if two values are equal: exactly if both are rational, else to 40 digits,
    relative to their size.
    """
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    for value in (first, second):
        if isinstance(value, Fraction) and abs(value.numerator) * value.denominator > _MAX_HEIGHT:
            # a number of many digits may be near an irrational one, and is never equal to it
            return False
    first = to_mp(first)
    second = to_mp(second)
    size = max(abs(first), abs(second))
    return bool(abs(first - second) <= size * _mp().mpf(10) ** -_AGREEMENT)


def is_real(value: Value) -> bool:
    """Return True if a value has no imaginary part."""
    return isinstance(value, Fraction) or bool(
        abs(_mp().im(value)) <= abs(value) * _mp().mpf(10) ** -_AGREEMENT
    )


def real_key(value: Value) -> Any:
    """Return a real value for sorting; raises Undefined."""
    if not is_real(value):
        raise Undefined("not real")
    return value if isinstance(value, Fraction) else _mp().re(value)


def is_accurate(node: Node) -> bool:
    """Return True if higher precision confirms the digits of a constant; false where digits cancel."""
    value = value_of(node)
    if isinstance(value, Fraction):
        return True
    with _mp().workdps(3 * _DIGITS):
        return same_values(value, value_of(node))


def is_zero(node: Node) -> bool:
    """Return True if a constant is zero: exactly, or to all computed digits."""
    value = value_of(node)
    if isinstance(value, Fraction):
        return value == 0
    with _mp().workdps(3 * _DIGITS):
        return bool(abs(value_of(node)) <= abs(value) * _mp().mpf(10) ** -_DIGITS)


def is_less(first: Value, second: Value) -> bool:
    """Return True if one real value is smaller than another."""
    first, second = _both(first, second)
    return not same_values(first, second) and bool(first < second)


def is_rounding(decimal: Fraction, num_decimals: int, value: Value) -> bool:
    """Return True if a decimal is `value` rounded or truncated to `num_decimals` decimals."""
    if not is_real(value):
        return False
    # in units of the last decimal
    distance = (real_key(to_mp(value)) - to_mp(decimal)) * _mp().mpf(10) ** num_decimals
    if abs(distance) <= _mp().mpf(1) / 2:
        return True
    outwards = distance if decimal > 0 else -distance
    return bool(0 <= outwards < 1)


def is_near(number: Fraction, value: Value) -> bool:
    """Return True if a number equals a value in double precision, as `1.4142135623730951` equals
    the root of 2.
    """
    return bool(abs(to_mp(number) - value) <= abs(value) * _mp().mpf(2) ** -52)


def same_function(reference: Node, candidate: Node) -> bool:
    """Return True if two expressions with variables agree at points of both signs at which the
    first is real.

    The points are fractions, or integers where the first is real at too few fractions, such as
    `(-1)^n`.
    """
    names = sorted(names_of(reference) | names_of(candidate))
    for coordinate in (_fraction, _integer_coordinate):
        values = []
        for trial in range(_POINTS):
            point = {name: coordinate(i, trial) for i, name in enumerate(names)}
            value = _real_value(reference, point)
            if value is not None:
                values.append((point, value))
        if len(values) >= _MIN_POINTS:
            return all(_has_value(candidate, point, value) for point, value in values)
    return False


def _real_value(node: Node, point: Mapping[str, Fraction]) -> Value | None:
    try:
        value = value_of(node, point)
    except Undefined:
        return None
    return value if is_real(value) else None


def _has_value(node: Node, point: Mapping[str, Fraction], expected: Value) -> bool:
    try:
        return same_values(expected, value_of(node, point))
    except Undefined:
        return False


def _fraction(index: int, trial: int) -> Fraction:
    value = Fraction(
        17 + 38 * index + 13 * trial + index * index * trial, 29 + 2 * trial + 3 * index
    )
    return -value if trial % 2 and (trial // 2 + index) % 2 else value


def _integer_coordinate(index: int, trial: int) -> Fraction:
    return Fraction(3 + 5 * index + trial * (2 + index))


def to_mp(value: Value) -> Any:
    """Return the value as a number of mpmath."""
    if isinstance(value, Fraction):
        return _mp().mpf(value.numerator) / value.denominator
    return value


def _value(node: Node, names: Mapping[str, Fraction]) -> Value:
    if node.op in ("number", "repeating"):
        assert node.value is not None
        return node.value
    if node.op == "name":
        if node.text not in names:
            raise Undefined(f"{node.text} has no value")
        return names[node.text]
    if node.op == "constant":
        if node.text == "infinity":
            raise Undefined("infinity")
        return +getattr(_mp(), node.text)
    values = [_value(arg, names) for arg in node.args]
    if node.op == "call":
        return _bounded(_call(node.text, values))
    return _bounded(_OPERATIONS[node.op](*values))


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > 2 * _MAX_BITS:
            raise TooCostly("too many digits")
    elif not _mp().isfinite(value):
        raise Undefined("infinite")
    return value


def _both(first: Value, second: Value) -> tuple[Value, Value]:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first, second
    return to_mp(first), to_mp(second)


def _add(first: Value, second: Value) -> Value:
    first, second = _both(first, second)
    return first + second


def _multiply(first: Value, second: Value) -> Value:
    first, second = _both(first, second)
    return first * second


def _divide(dividend: Value, divisor: Value) -> Value:
    dividend, divisor = _both(dividend, divisor)
    return dividend / divisor


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        exact = _rational_power(base, exponent)
        if exact is not None:
            return exact
    if _is_odd_root(exponent) and _is_negative(base):
        # the real root, as of \sqrt[3]{-8}
        root = _power(-base, exponent)
        return -root if exponent.numerator % 2 else root
    mp = _mp()
    base = to_mp(base)
    exponent = to_mp(exponent)
    if base == 0:
        if mp.re(exponent) <= 0:
            raise Undefined("a power of zero")
        return Fraction(0)
    if abs(exponent) * max(1, abs(mp.log(abs(base), 2))) > _MAX_MAGNITUDE:
        raise TooCostly("too large a power")
    return mp.power(base, exponent)


def _is_odd_root(exponent: Value) -> bool:
    if not isinstance(exponent, Fraction):
        return False
    return exponent.denominator % 2 == 1 and exponent.denominator > 1


def _is_negative(value: Value) -> bool:
    return is_real(value) and bool(real_key(value) < 0)


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return the exact power; None if it is irrational or would have too many digits."""
    bits = base.numerator.bit_length() + base.denominator.bit_length()
    is_small = bits * abs(exponent.numerator) <= _MAX_BITS
    if exponent.denominator == 1:
        if base in (0, 1, -1) and exponent >= 0:
            # only the parity matters, however large the exponent is
            return Fraction(int(base) ** int(exponent % 2 or 2 * (exponent > 0)))
        return base ** int(exponent) if is_small else None
    if base < 0 or exponent.denominator > _MAX_INDEX or not is_small:
        return None
    root = _exact_root(base, exponent.denominator)
    return None if root is None else root**exponent.numerator


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """Return the rational root of a number that is not negative, if it has one."""
    above = _integer_root(value.numerator, index)
    below = _integer_root(value.denominator, index)
    if above is None or below is None:
        return None
    return Fraction(above, below)


def _integer_root(value: int, index: int) -> int | None:
    if index == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > 2000:
        return None
    low = 0
    high = 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**index <= value:
            low = middle
        else:
            high = middle - 1
    return low if low**index == value else None


def _root(radicand: Value, index: Value) -> Value:
    if not isinstance(index, Fraction) or index.denominator != 1 or index < 1:
        return _power(radicand, _divide(Fraction(1), index))
    if isinstance(radicand, Fraction) and radicand < 0 and index % 2:
        return -_power(-radicand, 1 / index)
    return _power(radicand, 1 / index)


def _integer(value: Value) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1:
        raise Undefined("not an integer")
    return int(value)


def _factorial(value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise Undefined("the factorial of a negative number")
        if value > _MAX_FACTORIAL:
            raise TooCostly("too large a factorial")
        return Fraction(_exact_factorial(int(value)))
    if abs(value) > _MAX_FACTORIAL:
        raise TooCostly("too large a factorial")
    return _mp().gamma(to_mp(value) + 1)


_exact_factorial = lru_cache(16)(math.factorial)


def _binomial(above: Value, below: Value) -> Value:
    are_integers = all(isinstance(v, Fraction) and v.denominator == 1 for v in (above, below))
    if are_integers and 0 <= below <= above:
        if min(below, above - below) * int(above).bit_length() > _MAX_BITS // 4:
            raise TooCostly("too large a binomial coefficient")
        return Fraction(math.comb(int(above), int(below)))
    if max(abs(above), abs(below)) > _MAX_FACTORIAL:
        raise TooCostly("too large a binomial coefficient")
    return _mp().binomial(to_mp(above), to_mp(below))


def _logarithm(argument: Value, base: Value | None = None) -> Value:
    mp = _mp()
    if argument == 0 or (base is not None and base in (0, 1)):
        raise Undefined("a logarithm of zero")
    result = mp.log(to_mp(argument))
    return result if base is None else result / mp.log(to_mp(base))


def _floor(value: Value) -> Value:
    if isinstance(value, Fraction):
        return Fraction(math.floor(value))
    return Fraction(int(_mp().floor(real_key(value))))


def _ceil(value: Value) -> Value:
    return -_floor(-value)


def _modulo(dividend: Value, divisor: Value) -> Value:
    return Fraction(_integer(dividend) % _integer(divisor))


def _degree(value: Value) -> Value:
    return to_mp(value) * _mp().pi / 180


_OPERATIONS: Mapping[str, Any] = {
    "+": _add, "neg": lambda value: -value, "*": _multiply, "/": _divide, "÷": _divide, "mixed": _add, "^": _power,
    "root": _root, "log": _logarithm, "!": _factorial, "binom": _binomial, "abs": abs, "floor": _floor,
    "ceil": _ceil, "mod": _modulo, "degree": _degree,
}  # fmt: skip
_REDUCED = {"gcd": math.gcd, "lcm": math.lcm}
_MP_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}


def _call(name: str, values: list[Value]) -> Value:
    if name in _REDUCED:
        return Fraction(_REDUCED[name](*map(_integer, values)))
    if name == "max":
        return max(values, key=real_key)
    if name == "min":
        return min(values, key=real_key)
    (value,) = values
    if name == "lg":
        return _logarithm(value, Fraction(10))
    if name in ("ln", "log"):
        return _logarithm(value)
    if abs(value) > 10**9:
        raise TooCostly(f"{name} of a large number")
    return getattr(_mp(), _MP_NAMES.get(name, name))(to_mp(value))
