"""exp, log and log-gamma with the same last bit on every machine: from + - * / alone, in a fixed
order.

The functions of `math` come from the C library, which has variants for processors and differs
between systems. What a run decides by, or records, may not depend on that. These are accurate to a
few units in the last place.
"""

from collections.abc import Sequence
from math import frexp, ldexp, pi

# ln 2 in two parts: small integers times the first are exact
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LN2 = _LN2_HIGH + _LN2_LOW
_SMALLEST_EXPONENT = -746.0  # exp is 0 below it
_ROOT_HALF = 0.7071067811865476
_EXP_TERMS = 16
_LOG_TERMS = 12  # they leave less than 1e-17 in the reduced ranges
_LOG_ROOT_TWO_PI = 0.9189385332046727
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_STIRLING_FROM = 10.0  # from there on the terms above leave less than 1e-16


def exp(x: float) -> float:
    """Return `e^x`; raises OverflowError above the largest float."""
    if x < _SMALLEST_EXPONENT:
        return 0.0
    doublings = round(x / _LN2)
    remainder = (x - doublings * _LN2_HIGH) - doublings * _LN2_LOW
    value = 1.0
    for n in range(_EXP_TERMS, 0, -1):
        value = 1.0 + remainder * value / n
    return ldexp(value, doublings)


def log(x: float) -> float:
    """Return the natural logarithm of a positive finite number; raises ValueError for others."""
    if not 0 < x < float("inf"):
        raise ValueError(f"log needs a positive finite number, got {x!r}")
    mantissa, exponent = frexp(x)
    if mantissa < _ROOT_HALF:
        mantissa *= 2
        exponent -= 1
    # log m = 2 artanh s = 2 s (1 + s^2/3 + s^4/5 + ...)
    s = (mantissa - 1) / (mantissa + 1)
    series = 0.0
    for n in range(_LOG_TERMS, 0, -1):
        series = s * s * (1 / (2 * n + 1) + series)
    return exponent * _LN2_HIGH + (2 * s * (1 + series) + exponent * _LN2_LOW)


def log_gamma(x: float) -> float:
    """Return the log of the gamma function of a positive finite number: shifted Stirling series."""
    factor = 1.0
    while x < _STIRLING_FROM:
        factor *= x
        x += 1
    correction = _polynomial(_STIRLING, 1 / (x * x)) / x
    return (x - 0.5) * log(x) - x + _LOG_ROOT_TWO_PI + correction - log(factor)


def cos(x: float) -> float:
    """Return the cosine of an angle from 0 to pi."""
    if x > pi / 2:
        return -cos(pi - x)
    value = 1.0
    square = x * x
    for n in range(24, 0, -2):
        value = 1.0 - square * value / (n * (n - 1))
    return value


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    """Return the value of a polynomial, the constant first, by Horner's rule."""
    value = 0.0
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value
