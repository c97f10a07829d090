"""The regularised incomplete beta function, the distribution function of the Beta distribution."""

from math import exp, lgamma, log, log1p

_TINY = 1.0e-300
_STEPS = 1000


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The probability that a number from Beta(a, b) is at most `x`; `a` and `b` are above 0."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there: use the symmetry
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    factor = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    return min(1.0, factor * beta_fraction(x, a, b))


def beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function by Lentz's method."""
    numerator = 1.0
    denominator = 1.0 / (1.0 - (a + b) * x / (a + 1) or _TINY)
    value = denominator
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = value
        for term in (even, odd):
            denominator = 1.0 / (1.0 + term * denominator or _TINY)
            numerator = 1.0 + term / numerator or _TINY
            value *= numerator * denominator
        if abs(value - before) <= 1e-15 * abs(value):
            break
    return value
