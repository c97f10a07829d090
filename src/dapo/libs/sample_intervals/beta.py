"""The regularised incomplete beta function, the distribution function of the Beta distribution."""

from math import exp, lgamma, log, log1p

_TINY = 1.0e-300
_TOLERANCE = 1.0e-15
_STEPS = 1000


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the probability that a number from Beta(a, b) is at most `x`.

    Args:
        x: Any number.
        a: Above 0.
        b: Above 0.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there: use the symmetry
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    log_beta = lgamma(a + b) - lgamma(a) - lgamma(b)
    # powers of x and 1 - x would leave the range of floats
    factor = exp(log_beta + a * log(x) + b * log1p(-x)) / a
    return min(1.0, factor * beta_fraction(x, a, b))


def beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function by Lentz's method.

    Args:
        x: Between 0 and 1.
        a: Above 0.
        b: Above 0.
    """
    numerator = 1.0
    # a zero would end the method, which goes on from a tiny number
    denominator = 1.0 / (1.0 - (a + b) * x / (a + 1) or _TINY)
    value = denominator
    for m in range(1, _STEPS):
        # the two terms of a step, DLMF 8.17.22
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        last_value = value
        for term in (even, odd):
            denominator = 1.0 / (1.0 + term * denominator or _TINY)
            numerator = 1.0 + term / numerator or _TINY
            value *= numerator * denominator
        if abs(value - last_value) <= _TOLERANCE * abs(value):
            break
    return value
