"""95 % intervals of a mean over problems, chosen by their measured coverage (docs/evaluation.md,
Intervals).

The problems are the sample: their values are independent, the k responses to one of them are not.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import exp, lgamma, log, log1p, pi, sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .beta import incomplete_beta

Interval: TypeAlias = tuple[float, float]

CONFIDENCE = 0.95
_NORMAL_QUANTILE = 1.959964  # of CONFIDENCE
_MAX_FREEDOM = 2000  # above it Student's quantile equals the normal one to three digits
_ROUNDING = 1.0e-9  # values that differ by less are equal: 0.9 - 0.8 is not 0.1


def mean_interval(values: Sequence[float], *, proportions: bool = True) -> Interval | None:
    """Compute the 95 % interval of the mean over problems, with one value per problem.

    Values with `proportions`, from 0 to 1, have Wilson's interval, with the number of trials that
    gives a proportion the variance of this mean (`proportions_interval`); it is (0, 1) for an empty
    list. Other scores have Student's; None if they do not vary, or are fewer than two: nothing then
    bounds the score of another problem.
    """
    if not len(values):
        return (0.0, 1.0) if proportions else None
    array = np.asarray(values, dtype=np.float64)
    size = len(array)
    mean = float(array.mean())
    deviation = float(array.std())
    if not proportions:
        return (
            student_interval(mean, deviation**2 / (size - 1), size - 1) if _varies(array) else None
        )
    if not _varies(array) or set(array.tolist()) == {0.0, 1.0}:
        # for values that do not vary, assume that each problem is solved always or never, which is
        # the widest
        return wilson_interval(mean, size, _NORMAL_QUANTILE)
    return proportions_interval(
        mean, size * mean * (1 - mean) / deviation**2, student_quantile(size - 1), size
    )


def difference_interval(
    differences: Sequence[float], *, proportions: bool = True
) -> Interval | None:
    """Compute Student's 95 % interval of the mean of paired differences.

    If the differences do not vary, it does not exist: proportions then have the interval of Bonett
    and Price, which counts one more problem with the difference +1 and one more with -1, and scores
    have None.
    """
    if not differences:
        return None
    array = np.asarray(differences, dtype=np.float64)
    if _varies(array):
        return student_interval(
            float(array.mean()), float(array.var(ddof=1)) / len(array), len(array) - 1
        )
    if not proportions:
        return None
    array = np.append(array, [1.0, -1.0])
    half = _NORMAL_QUANTILE * float(array.std()) / sqrt(len(array))
    return max(-1.0, float(array.mean()) - half), min(1.0, float(array.mean()) + half)


def difference_variance(half: float, size: int) -> float:
    """Return the variance of `size` differences with an interval of this half width; if they do not
    vary, a bound of it.
    """
    return 0.0 if size < 2 else (size - 1) * (half / student_quantile(size - 1)) ** 2


@lru_cache(maxsize=4096)
def student_quantile(freedom: float) -> float:
    """Compute the number of standard errors of an interval of CONFIDENCE to each side.

    `freedom` need not be an integer; below 1 it counts as 1.
    """
    if freedom > _MAX_FREEDOM:
        return _NORMAL_QUANTILE
    freedom = max(1.0, freedom)
    log_scale = lgamma((freedom + 1) / 2) - lgamma(freedom / 2) - log(freedom * pi) / 2
    # it lies below every quantile, and the tail is convex: Newton's method does not overshoot
    t = _NORMAL_QUANTILE
    for _ in range(60):
        density = exp(log_scale - (freedom + 1) / 2 * log1p(t * t / freedom))
        step = (student_p_value(t, freedom) - (1 - CONFIDENCE)) / (2 * density)
        t += step
        if abs(step) <= 1e-13 * t:
            break
    return t


def student_p_value(t: float, freedom: float) -> float:
    """Return the two-sided p-value of a mean that is `t` standard errors from the tested bound.

    It is the incomplete beta function at freedom / (freedom + t^2) with a = freedom / 2 and b =
    1/2.
    """
    freedom = min(max(1.0, freedom), _MAX_FREEDOM)
    share = t * t / (freedom + t * t)
    if share > 0.5:
        return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1.0 - incomplete_beta(share, 0.5, freedom / 2)


def _varies(array: NDArray[np.float64]) -> bool:
    return bool(array.max() - array.min() > _ROUNDING)


def student_interval(mean: float, variance: float, freedom: float) -> Interval:
    """Compute Student's interval of a mean with this variance, of these degrees of freedom."""
    half = student_quantile(freedom) * sqrt(variance)
    return mean - half, mean + half


def proportions_interval(mean: float, trials: float, quantile: float, problems: int) -> Interval:
    """Compute Wilson's interval of a mean of proportions, which ends no closer to 1 and 0 than if
    all were 1, or 0.

    Problems that are nearly all solved vary too little to show how often another one is not.
    """
    low, high = wilson_interval(mean, trials, quantile)
    all_solved, none_solved = (
        wilson_interval(fraction, problems, _NORMAL_QUANTILE) for fraction in (1.0, 0.0)
    )
    return min(low, all_solved[0]), max(high, none_solved[1])


def wilson_interval(fraction: float, trials: float, quantile: float) -> Interval:
    """Compute Wilson's interval of a fraction, which stays within 0 and 1.

    `trials` need not be an integer; `quantile` is the number of standard errors to each side
    (`student_quantile`).
    """
    square = quantile * quantile
    centre = (fraction + square / (2 * trials)) / (1 + square / trials)
    variance = fraction * (1 - fraction) / trials + square / (4 * trials * trials)
    half = quantile / (1 + square / trials) * sqrt(variance)
    # rounding may put an end on the wrong side of the fraction
    return min(fraction, max(0.0, centre - half)), max(fraction, min(1.0, centre + half))
