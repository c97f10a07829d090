"""Intervals over seeds and problems: by hand, and how often they cover what they estimate."""

from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from dapo.libs.sample_intervals import (
    difference_interval,
    mean_interval,
    mean_over_seeds,
    student_p_value,
    student_quantile,
    two_way_difference,
    two_way_mean,
    variance_of_mean,
)

TRIALS = 2000
"""The standard error of a coverage of 95 % is then 0.5 %."""


def test_the_variance_of_the_mean_is_that_of_the_two_way_table():
    # seeds 0 and 1: means 2 and 4; problems: means 2, 3, 4; nothing is left
    table = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    variance, freedom = variance_of_mean(table)
    of_seeds = 3 * 2.0
    of_problems = 2 * 1.0
    assert variance == pytest.approx((of_seeds + of_problems) / 6)
    assert freedom == pytest.approx(
        (of_seeds + of_problems) ** 2 / (of_seeds**2 / 1 + of_problems**2 / 2)
    )


def test_a_rest_larger_than_both_effects_does_not_make_the_variance_smaller_than_the_largest():
    table = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert variance_of_mean(table)[0] == 0.0
    assert variance_of_mean(table + np.array([[0.0], [0.2]]))[0] == pytest.approx(2 * 0.02 / 4)


def test_the_variance_over_three_factors_is_that_of_the_three_way_table():
    rng = np.random.default_rng(3)
    bases, seeds, problems = (
        rng.normal(0, 1, shape) for shape in ((3, 1, 1), (1, 4, 1), (1, 1, 50))
    )
    table = bases + seeds + problems
    expected = bases.var(ddof=1) / 3 + seeds.var(ddof=1) / 4 + problems.var(ddof=1) / 50
    assert variance_of_mean(table)[0] == pytest.approx(expected)
    # a factor whose effect is the same in each level of another adds to its own variance alone
    assert variance_of_mean(np.repeat(table[:, :1], 4, axis=1))[0] == pytest.approx(
        bases.var(ddof=1) / 3 + problems.var(ddof=1) / 50
    )


@pytest.mark.parametrize(
    ("of_bases", "of_seeds", "of_runs"), [(0.5, 0.2, 0.3), (0.1, 0.5, 0.2), (0.0, 0.0, 0.5)]
)
def test_intervals_over_base_models_seeds_and_problems_cover_the_mean(
    of_bases: float, of_seeds: float, of_runs: float
):
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(TRIALS):
        table = (
            rng.normal(0, of_bases, (3, 1, 1))
            + rng.normal(0, of_seeds, (1, 3, 1))
            + rng.normal(0, 1, (1, 1, 40))
        )
        table = table + rng.normal(0, of_runs, (3, 3, 1)) + rng.normal(0, 0.5, (3, 3, 40))
        variance, freedom = variance_of_mean(table)
        covered += abs(table.mean()) <= student_quantile(freedom) * sqrt(variance)
    assert covered / TRIALS >= 0.92  # measured: 92.4, 95.2 and 99.5 %


def test_a_p_value_is_5_percent_where_the_interval_ends():
    for freedom in (1, 2.5, 4, 30.7, 1.0e6):
        assert student_p_value(student_quantile(freedom), freedom) == pytest.approx(0.05, abs=2e-3)
        assert student_p_value(-2 * student_quantile(freedom), freedom) < 0.03
    assert student_p_value(0.0, 3) == pytest.approx(1.0)
    # a table of Student's distribution
    assert student_p_value(2.0, 4) == pytest.approx(0.11612, abs=1e-4)


def test_quantiles_between_integers_lie_between_theirs():
    assert student_quantile(4.0) == pytest.approx(student_quantile(4))
    assert student_quantile(0.3) == pytest.approx(student_quantile(1))
    assert student_quantile(5) < student_quantile(4.5) < student_quantile(4)


def test_one_seed_has_the_interval_over_problems_alone():
    values = [1.0, 0.5, 0.0, 1.0, 0.25]
    found = two_way_mean([values])
    assert (found.low, found.high) == mean_interval(values)
    difference = two_way_difference([[0.0] * 5], [values])
    assert (difference.low, difference.high) == difference_interval(values)


def test_a_mean_of_proportions_stays_within_zero_and_one_and_holds_its_mean():
    found = two_way_mean([[1.0, 1.0, 1.0, 0.75], [1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 1.0, 1.0]])
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low < found.mean < found.high <= 1


def test_differences_that_are_all_equal_have_the_interval_of_problems():
    found = two_way_difference([[0.25] * 30] * 4, [[0.5] * 30] * 4)
    assert found.mean == 0.25
    assert (found.low, found.high) == difference_interval([0.25] * 30)


def test_pairing_by_seed_and_problem_removes_what_both_rows_share():
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 0.2, (5, 1)) + rng.normal(0, 0.3, (1, 40))
    first, second = (shared + rng.normal(mean, 0.01, (5, 40)) for mean in (0.0, 0.05))
    paired = two_way_difference(first.tolist(), second.tolist(), proportions=False)
    assert paired.low is not None
    assert paired.high is not None
    assert 0.04 < paired.low < paired.high < 0.06
    alone = two_way_mean(second.tolist(), proportions=False)
    assert alone.low is not None
    assert alone.high is not None
    assert alone.high - alone.low > 20 * (paired.high - paired.low)


def test_one_number_per_seed_has_students_interval():
    found = mean_over_seeds([4.0, 5.0, 6.0])
    assert found["mean"] == 5.0
    assert found["high"] == pytest.approx(5 + 4.30265 / sqrt(3), abs=1e-4)
    assert mean_over_seeds([3.0]) == {"mean": 3.0, "low": None, "high": None}
    assert mean_over_seeds([]) == {"mean": None, "low": None, "high": None}


# --- coverage: experiments are simulated, each with new seeds and new problems


def simulated(
    rng: np.random.Generator,
    seeds: int,
    problems: int,
    k: int,
    *,
    level: float,
    of_seeds: float,
    of_problems: float,
) -> NDArray[np.float64]:
    """The chance that a response is correct, for each seed and problem, and what k responses give:
    [2, S, P].
    """
    logits = level + rng.normal(0, of_seeds, (seeds, 1)) + rng.normal(0, of_problems, (1, problems))
    chances = 1 / (1 + np.exp(-(logits + rng.normal(0, 0.5, (seeds, problems)))))
    return np.stack([chances, rng.binomial(k, chances) / k])


SETTINGS = {
    "3 seeds, 100 problems, k=4, seeds differ little": (3, 100, 4, 0.0, 0.1, 1.5),
    "3 seeds, 100 problems, k=4, seeds differ": (3, 100, 4, 0.0, 0.4, 1.5),
    "5 seeds, 30 problems, k=4, seeds differ little": (5, 30, 4, 0.0, 0.1, 1.5),
    "5 seeds, 100 problems, k=4, seeds differ": (5, 100, 4, 0.0, 0.4, 1.5),
    "5 seeds, 300 problems, k=1, seeds differ much": (5, 300, 1, 0.0, 0.8, 1.0),
    "5 seeds, 200 problems, k=4, most are solved": (5, 200, 4, 2.5, 0.4, 1.5),
    "8 seeds, 200 problems, k=2, most are not": (8, 200, 2, -2.0, 0.3, 1.5),
}


def truth(level: float, of_seeds: float, of_problems: float) -> float:
    """The accuracy over all seeds and problems."""
    logits = np.random.default_rng(1).normal(
        level, np.sqrt(of_seeds**2 + of_problems**2 + 0.25), 500_000
    )
    return float(np.mean(1 / (1 + np.exp(-logits))))


@pytest.mark.parametrize("name", SETTINGS)
def test_intervals_of_an_accuracy_cover_it_in_95_percent_of_experiments_and_not_by_being_wide(
    name: str,
):
    seeds, problems, k, level, of_seeds, of_problems = SETTINGS[name]
    rng = np.random.default_rng(list(name.encode()))
    expected = truth(level, of_seeds, of_problems)
    covered = narrow = 0
    for _ in range(TRIALS):
        _, values = simulated(
            rng, seeds, problems, k, level=level, of_seeds=of_seeds, of_problems=of_problems
        )
        found = two_way_mean(values)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= expected <= found.high
        centre = (found.low + found.high) / 2
        half = 0.7 * (found.high - found.low) / 2
        narrow += abs(expected - centre) <= half
    assert 0.93 <= covered / TRIALS <= 0.975
    assert narrow / TRIALS < 0.93


@pytest.mark.parametrize("name", SETTINGS)
def test_intervals_of_a_paired_difference_cover_it_in_95_percent_of_experiments(name: str):
    seeds, problems, k, level, of_seeds, of_problems = SETTINGS[name]
    rng = np.random.default_rng(list(name.encode()))
    expected = truth(level + 0.5, np.hypot(of_seeds, 0.2), np.hypot(of_problems, 0.5)) - truth(
        level, of_seeds, of_problems
    )
    covered = narrow = 0
    for _ in range(TRIALS):
        first = rng.normal(level, of_problems, (1, problems)) + rng.normal(0, of_seeds, (seeds, 1))
        # the change helps by 0.5 on average, more in some seeds and on some problems
        second = first + 0.5 + rng.normal(0, 0.2, (seeds, 1)) + rng.normal(0, 0.5, (1, problems))
        rows = [
            1 / (1 + np.exp(-(each + rng.normal(0, 0.5, first.shape)))) for each in (first, second)
        ]
        values = [rng.binomial(k, chances) / k for chances in rows]
        found = two_way_difference(*values)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= expected <= found.high
        centre = (found.low + found.high) / 2
        half = 0.7 * (found.high - found.low) / 2
        narrow += abs(expected - centre) <= half
    assert 0.93 <= covered / TRIALS <= 0.975
    assert narrow / TRIALS < 0.93
