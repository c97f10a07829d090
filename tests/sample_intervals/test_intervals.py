"""Intervals: by hand, where values do not vary, and how often they cover what they estimate."""

from collections.abc import Callable, Iterator
from math import atan, pi, sqrt, tan
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from dapo.evaluation.scores import pass_at_k
from dapo.libs.sample_intervals import (
    Interval,
    difference_interval,
    difference_variance,
    mean_interval,
    student_p_value,
    student_quantile,
)
from helpers.tables import for_each_row

TRIALS = 10_000
"""The standard error of a coverage of 95 % is then 0.22 %."""

Values: TypeAlias = NDArray[np.float64]
Trials: TypeAlias = Iterator[tuple[Values, float]]


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (9, 2.2622),
        (10, 2.2281),
        (29, 2.0452),
        (120, 1.9799),
        (10_000, 1.9600),
    ],
)
def test_students_quantiles_are_those_of_the_printed_table(freedom: int, quantile: float):
    assert student_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


@for_each_row("freedom", [1.0, 1.05, 1.3, 1.5, 1.99, 2.0, 2.4, 3.7, 17.2, 250.5, 1999.0])
def test_an_interval_of_any_degrees_of_freedom_leaves_out_5_percent_of_students_density(
    freedom: float,
):
    """The tail by Simpson's rule over angles: with t = sqrt(freedom) tan(u) the density is
    cos(u)^(freedom - 1).
    """
    end = atan(student_quantile(freedom) / sqrt(freedom))

    def area(low: float, high: float) -> float:
        points = np.linspace(low, high, 200_001)
        values = np.cos(points) ** (freedom - 1) if freedom > 1 else np.ones(len(points))
        return float(values[0] + 4 * values[1::2].sum() + 2 * values[2:-1:2].sum() + values[-1]) * (
            high - low
        )

    outside = area(end, pi / 2) / area(0.0, pi / 2)
    assert outside == pytest.approx(0.05, rel=1e-5)
    assert student_p_value(student_quantile(freedom), freedom) == pytest.approx(0.05, rel=1e-11)


def test_quantiles_and_p_values_have_the_closed_forms_of_one_and_two_degrees_of_freedom():
    assert student_quantile(1) == pytest.approx(tan(0.475 * pi), rel=1e-12)
    assert student_quantile(2) == pytest.approx(0.95 * sqrt(2 / (1 - 0.95**2)), rel=1e-12)
    for t in (0.001, 0.7, 2.0, 40.0, 1e6):
        assert student_p_value(t, 1) == pytest.approx(1 - 2 / pi * atan(t), abs=1e-15, rel=1e-9)
        assert student_p_value(-t, 2) == pytest.approx(1 - t / sqrt(2 + t * t), abs=1e-15, rel=1e-9)
    assert student_p_value(1e6, 2) == pytest.approx(1e-12, rel=1e-9)  # far tails keep their digits


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -1.0, 0.0], [0.5] * 3 + [-1.0] * 20])
def test_the_variance_of_differences_is_read_from_their_interval(values: list[float]):
    low, high = difference_interval(values) or (0.0, 0.0)
    assert difference_variance((high - low) / 2, len(values)) == pytest.approx(np.var(values))


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.5, 1.0])
def test_the_variance_of_equal_differences_is_bounded_by_their_interval(value: float):
    for size in (1, 2, 64):
        low, high = difference_interval([value] * size) or (0.0, 0.0)
        assert 0 <= difference_variance((high - low) / 2, size) < 3 / size


def wilson(fraction: float, trials: float, z: float) -> Interval:
    """The two p that solve (fraction - p)^2 = z^2 p (1 - p) / trials."""
    roots = np.roots([1 + z * z / trials, -2 * fraction - z * z / trials, fraction**2])
    return float(roots.min()), float(roots.max())


def test_zeros_and_ones_have_wilsons_interval():
    assert mean_interval([1.0] * 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert mean_interval([0.0] * 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert mean_interval([1.0] * 3 + [0.0] * 7) == pytest.approx(
        wilson(0.3, 10, 1.959964), abs=1e-9
    )
    assert mean_interval([1.0] * 3 + [0.0] * 7) == pytest.approx((0.1078, 0.6032), abs=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30, 49, 1000])
def test_an_interval_holds_its_mean_and_stays_within_zero_and_one(count: int):
    for values in ([1.0] * count, [0.0] * count, [*[1.0] * count, 0.0], [*[0.0] * count, 0.5]):
        low, high = mean_interval(values) or (1, 0)
        assert 0 <= low <= np.mean(values) <= high <= 1


def test_proportions_have_wilsons_interval_with_the_trials_that_explain_their_variance():
    # mean 1/2, variance of the values 1/16: a mean of 4 of them varies like a fraction of 16 trials
    assert mean_interval([0.25, 0.75, 0.25, 0.75]) == pytest.approx(
        wilson(0.5, 16, 3.18245), abs=1e-4
    )


@for_each_row("problems", [2, 10, 76, 1000])
@for_each_row("nearly", [69 / 70, 0.9, 0.5, 0.0])
def test_an_interval_near_all_or_none_is_no_narrower_than_where_all_are_equal(
    problems: int, nearly: float
):
    """pass@4 of 69/70 on one of 76 problems, and 1 on the others, is no 100.0 % (100.0 % to 100.0
    %).
    """
    values = [nearly, *[1.0] * (problems - 1)]
    low, high = mean_interval(values) or (0, 0)
    solved = mean_interval([1.0] * problems) or (0, 0)
    none_solved = mean_interval([0.0] * problems) or (0, 0)
    assert low <= solved[0]
    assert high >= np.mean(values)
    mirrored = mean_interval([1 - value for value in values]) or (0, 0)
    assert mirrored == pytest.approx((1 - high, 1 - low))
    assert mirrored[1] >= none_solved[1]


@for_each_row("value", [0.0, 1 / 3, 0.5, 1.0])
@for_each_row("problems", [1, 2, 30])
def test_equal_proportions_are_as_uncertain_as_problems_that_are_solved_always_or_never(
    value: float, problems: int
):
    low, high = mean_interval([value] * problems) or (0, 0)
    assert (low, high) == pytest.approx(wilson(value, problems, 1.959964), abs=1e-6)
    assert high - low > 0.1


def test_values_that_differ_by_rounding_alone_are_equal():
    assert mean_interval([0.1 + 0.2, 0.3] * 15) == pytest.approx(mean_interval([0.3] * 30))
    assert difference_interval([0.9 - 0.8, 0.1] * 20) == pytest.approx(
        difference_interval([0.1] * 40)
    )


def test_nothing_has_the_widest_interval_and_scores_of_nothing_none():
    assert mean_interval([]) == (0.0, 1.0)
    assert mean_interval([], proportions=False) is None
    assert difference_interval([]) is None


def test_scores_have_students_interval_and_none_where_they_do_not_vary():
    half = 4.30265 / sqrt(3)  # standard deviation 1, three problems
    assert mean_interval([4.0, 5.0, 6.0], proportions=False) == pytest.approx(
        (5 - half, 5 + half), abs=1e-4
    )
    assert mean_interval([0.0] * 30, proportions=False) is None
    assert mean_interval([7.5], proportions=False) is None


def test_differences_have_students_interval_and_a_wide_one_where_they_do_not_vary():
    half = 12.7062 * 0.25 / sqrt(1)
    assert difference_interval([0.0, 0.5]) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-4)
    # with one more problem at +1 and one at -1: mean 0, variance 2/32
    assert difference_interval([0.0] * 30) == pytest.approx((-0.0866, 0.0866), abs=1e-4)
    low, high = difference_interval([1 / 32] * 3) or (0, 0)
    assert low < -0.5 < 0.5 < high
    low, high = difference_interval([-1.0] * 60) or (0, 0)
    assert low == -1.0
    assert -0.95 < high < -0.85
    assert difference_interval([0.25] * 9, proportions=False) is None


# --- coverage: evaluations are simulated, each of new problems


def solved_or_not(rng: np.random.Generator, problems: int) -> Trials:
    """One response to each problem; each evaluation is of another model."""
    for rate in rng.uniform(0.05, 0.95, TRIALS):
        yield rng.binomial(1, rate, problems).astype(float), rate


def clustered(rng: np.random.Generator, problems: int, k: int, a: float, b: float) -> Trials:
    """k responses to each problem, whose chance to be solved has a beta distribution."""
    for rates in rng.beta(a, b, (TRIALS, problems)):
        yield rng.binomial(k, rates) / k, a / (a + b)


def equally_hard(rng: np.random.Generator, problems: int, k: int) -> Trials:
    """k responses to each problem, all problems with the same chance."""
    for rate in rng.uniform(0.05, 0.95, TRIALS):
        yield rng.binomial(k, rate, problems) / k, rate


def normal_scores(rng: np.random.Generator, problems: int) -> Trials:
    for row in rng.normal(3.0, 2.0, (TRIALS, problems)):
        yield row, 3.0


def improved(rng: np.random.Generator, problems: int, k: int) -> Trials:
    """Differences of two models: the second closes 30 % of the gap on a random three problems in
    ten.
    """
    first = rng.beta(1.0, 1.0, (TRIALS, problems))
    second = np.where(rng.random(first.shape) < 0.3, first + 0.3 * (1 - first), first)
    for before, after in zip(first, second, strict=True):
        yield rng.binomial(k, after) / k - rng.binomial(k, before) / k, 0.3 * 0.3 * 0.5


def pass_at_4(rng: np.random.Generator, problems: int, a: float, b: float) -> Trials:
    """Estimates from 8 responses to each problem, whose chance to be solved has a beta
    distribution.
    """
    truth = 1 - np.prod([(b + i) / (a + b + i) for i in range(4)])
    estimates = np.array([pass_at_k(8, correct, 4) for correct in range(9)])
    for rates in rng.beta(a, b, (TRIALS // 5, problems)):
        yield estimates[rng.binomial(8, rates)], truth


@pytest.mark.parametrize(("a", "b"), [(2.0, 1.0), (3.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("problems", [10, 30, 76])
def test_intervals_of_pass_at_4_cover_where_nearly_all_problems_are_solved(
    problems: int, a: float, b: float
):
    """Without the ends of equal values they cover 75 to 88 % at (2, 1) and (3, 1)."""
    found = [
        (mean_interval(values.tolist()), truth)
        for values, truth in pass_at_4(np.random.default_rng(7), problems, a, b)
    ]
    covered = np.mean([low <= truth <= high for (low, high), truth in found])
    assert 0.915 <= covered <= 0.99


SIMULATIONS: dict[str, tuple[Callable[..., Trials], tuple[float, ...]]] = {
    "k=1, 10 problems": (solved_or_not, (10,)),
    "k=1, 30 problems": (solved_or_not, (30,)),
    "k=1, 500 problems": (solved_or_not, (500,)),
    "k=4, 30 problems, any difficulty": (clustered, (30, 4, 1.0, 1.0)),
    "k=32, 10 problems, any difficulty": (clustered, (10, 32, 1.0, 1.0)),
    "k=32, 10 problems, medium": (clustered, (10, 32, 2.0, 2.0)),
    "k=32, 30 problems, any difficulty": (clustered, (30, 32, 1.0, 1.0)),
    "k=32, 30 problems, most hard, some easy": (clustered, (30, 32, 0.3, 0.5)),
    "k=32, 30 problems, always or never": (clustered, (30, 32, 0.1, 0.1)),
    "k=32, 100 problems, most easy": (clustered, (100, 32, 3.0, 0.4)),
    "k=32, 30 problems, equally hard": (equally_hard, (30, 32)),
    "scores of 10 problems": (normal_scores, (10,)),
    "difference, k=1, 30 problems": (improved, (30, 1)),
    "difference, k=1, 500 problems": (improved, (500, 1)),
    "difference, k=32, 10 problems": (improved, (10, 32)),
    "difference, k=32, 30 problems": (improved, (30, 32)),
}


def interval_for(name: str, values: Values) -> Interval:
    if name.startswith("difference"):
        found = difference_interval(values.tolist())
    else:
        found = mean_interval(values.tolist(), proportions=not name.startswith("scores"))
    assert found is not None
    return found


def coverages(name: str) -> tuple[float, float]:
    """How often the interval covers the truth, and how often it does when it is made as narrow as
    one of 90 %.
    """
    simulate, sizes = SIMULATIONS[name]
    covered = narrow = 0
    for values, truth in simulate(np.random.default_rng(list(name.encode())), *sizes):
        low, high = interval_for(name, values)
        covered += low <= truth <= high
        centre = (low + high) / 2
        half = (high - low) / 2 * 1.644854 / 1.959964
        narrow += centre - half <= truth <= centre + half
    return covered / TRIALS, narrow / TRIALS


@pytest.mark.parametrize("name", SIMULATIONS)
def test_intervals_cover_95_percent_within_one_and_a_half_and_those_of_90_percent_do_not(name: str):
    covered, narrow = coverages(name)
    assert 0.935 <= covered <= 0.965
    assert narrow < 0.935
