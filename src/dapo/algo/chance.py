"""The chance that a group carries a signal (Eq. 11) if the problem's probability of a correct
response is uncertain.

A problem's responses are correct with an unknown probability p, for which its history gives a
Beta(a, b) distribution:

    chance(p)    = 1 - p^G - (1-p)^G                                    some but not all of G responses are correct
    E[chance(p)] = 1 - B(a+G, b) / B(a, b) - B(a, b+G) / B(a, b)        over p ~ Beta(a, b)

Runs decide by these numbers and record them, so their last bit is the same on every machine: sums
and products are taken in a fixed order, never by BLAS, and exp, log and log-gamma are those of
`core.portable_math`.
"""

from collections.abc import Sequence
from math import comb, fsum, ldexp, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapo.core.portable_math import exp, log, log_gamma
from dapo.libs.sample_intervals.beta import beta_fraction

MAX_CONCENTRATION = 64.0
"""Bound on a + b of a fitted distribution, so that a problem's own responses count even if all
problems are alike.
"""
PSEUDO_PROBLEMS = 4.0  # the weight, in problems, of the uniform distribution's spread in a fit
_UNIFORM_CORRELATION = 1 / 3  # between two responses to one problem under Beta(1, 1)


class Beta(NamedTuple):
    """A Beta distribution of the probability that a response is correct."""

    a: float
    b: float


UNIFORM = Beta(1.0, 1.0)


def chance_at(p: float, group_size: int) -> float:
    """`1 - p^G - (1-p)^G`: the chance that a group carries a signal where responses are correct
    with probability p.
    """
    all_correct = prod([p] * group_size)
    all_wrong = prod([1.0 - p] * group_size)
    return 1.0 - all_correct - all_wrong


def largest_chance(group_size: int) -> float:
    """`1 - 2^(1-G)`, the largest possible chance, at p = 1/2."""
    return 1.0 - ldexp(1.0, 1 - group_size)


def expected_chance(posterior: Beta, group_size: int) -> float:
    """The mean of `chance_at` over a Beta distribution, in closed form; from 0 to `largest_chance`.

    The ratio `B(a+G, b) / B(a, b)` is the product of `(a + i) / (a + b + i)` over i = 0 .. G-1: the
    probability that response i is correct after i correct ones.
    """
    a, b = posterior
    all_correct = prod((a + i) / (a + b + i) for i in range(group_size))
    all_wrong = prod((b + i) / (a + b + i) for i in range(group_size))
    return max(0.0, 1.0 - all_correct - all_wrong)


def likely_interval(group_size: int) -> tuple[float, float]:
    """The interval of p in which `chance_at` is at least half of `largest_chance`."""
    low = 0.0
    high = 0.5
    half = largest_chance(group_size) / 2
    for _ in range(64):  # bisection to the precision of a float
        middle = (low + high) / 2
        if chance_at(middle, group_size) < half:
            low = middle
        else:
            high = middle
    return high, 1.0 - high


def beta_cdf(x: float, distribution: Beta) -> float:
    """The probability that a Beta-distributed number is at most x: the regularised incomplete beta
    function.
    """
    a, b = distribution
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there: use the symmetry
        return 1.0 - beta_cdf(1.0 - x, Beta(b, a))
    inverse_beta = log_gamma(a + b) - log_gamma(a) - log_gamma(b)
    factor = exp(inverse_beta + a * log(x) + b * log(1.0 - x)) / a
    return min(1.0, factor * beta_fraction(x, a, b))


def fit_beta(
    correct: NDArray[np.float64], wrong: NDArray[np.float64], ages: NDArray[np.float64]
) -> Beta:
    """The distribution of p over problems, by the method of moments, from counts of responses to
    each of them.

    With n = correct + wrong, weights w = age * n, W = sum w, and x = correct / n of each problem:

        mean         m = sum w x / W
        correlation  r = (sum w (x - m)^2 / (m (1 - m)) - D) / (W - sum w^2 / W - D),  D = sum w (1 - w / W) / n

    r, between 0 and 1, is the correlation of two responses to one problem: the variance of x in
    excess of n coin flips. Both are shrunk towards the uniform distribution, m by the weight of one
    problem and r by the weight of PSEUDO_PROBLEMS, while the observed problems weigh `W^2 / sum
    w^2`. Then a + b = 1 / r - 1, at most MAX_CONCENTRATION, and a = m (a + b).

    Args:
        correct: `[n]` correct responses to each problem, which may be discounted.
        wrong: `[n]` wrong responses, likewise.
        ages: `[n]` the remaining weight of each problem, from 0 to 1.
    """
    trials = correct + wrong
    weights = trials * ages
    has_weight = weights > 0
    trials = trials[has_weight]
    weights = weights[has_weight]
    rates = correct[has_weight] / trials
    # fsum: numpy's products of vectors differ in the last bit with the processor
    total = fsum(weights)
    squares = fsum(weights * weights)
    if not total > 0 or not squares > 0:
        return UNIFORM
    problems = total * total / squares
    mean = (problems * fsum(weights * rates) / total + 0.5) / (problems + 1)
    flip_spread = fsum(weights * (1 - weights / total) / trials)  # D
    room = total - squares / total - flip_spread
    estimate = 0.0
    # one problem, or one response to each, says nothing of the correlation
    if room > 1e-9 * total:
        distances = rates - mean
        spread = fsum(weights * (distances * distances)) / (mean * (1 - mean))
        estimate = (spread - flip_spread) / room
    estimate = min(max(estimate, 0.0), 1.0)
    prior_sum = PSEUDO_PROBLEMS * _UNIFORM_CORRELATION
    correlation = (problems * estimate + prior_sum) / (problems + PSEUDO_PROBLEMS)
    concentration = min(1 / correlation - 1, MAX_CONCENTRATION)
    return Beta(mean * concentration, (1 - mean) * concentration)


def measured_chances(correct: Sequence[int], wrong: Sequence[int], group_size: int) -> list[float]:
    """The chance that a group of each problem carries a signal, from c correct and w wrong
    responses to it.

    With n = c + w of at least G it is the fraction of sets of G of these responses that are neither
    all correct nor all wrong, which is unbiased:

        1 - C(c, G) / C(n, G) - C(w, G) / C(n, G)

    With fewer responses it is the mean over the posterior of `fit_beta` of all problems and the
    problem's own counts.
    """
    prior = fit_beta(
        np.asarray(correct, np.float64), np.asarray(wrong, np.float64), np.ones(len(correct))
    )
    chances = []
    for c, w in zip(correct, wrong, strict=True):
        if c + w >= group_size:
            equal_sets = comb(c, group_size) + comb(w, group_size)
            chances.append(1.0 - equal_sets / comb(c + w, group_size))
        else:
            posterior = Beta(prior.a + c, prior.b + w)
            chances.append(expected_chance(posterior, group_size))
    return chances
