"""The chance of a signal under a Beta distribution, and its fit to counts, against sums and
samples.
"""

import math
from itertools import combinations

import numpy as np
import pytest

from dapo.algo.chance import (
    UNIFORM,
    Beta,
    beta_cdf,
    chance_at,
    expected_chance,
    fit_beta,
    largest_chance,
    likely_interval,
    measured_chances,
)
from helpers.tables import for_each_row

DISTRIBUTIONS = [
    Beta(1.0, 1.0),
    Beta(0.3, 0.2),
    Beta(20.0, 1.5),
    Beta(2.0, 60.0),
    Beta(500.0, 500.0),
]


def samples(distribution: Beta, count: int = 200_000) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=5)).beta(*distribution, size=count)


@for_each_row("group_size", [2, 8, 16])
@for_each_row("distribution", DISTRIBUTIONS)
def test_the_expected_chance_is_the_mean_over_sampled_probabilities(
    distribution: Beta, group_size: int
):
    expected = np.mean([chance_at(p, group_size) for p in samples(distribution, 20_000)])
    assert expected_chance(distribution, group_size) == pytest.approx(expected, abs=0.01)


def test_known_chances_come_out_exactly():
    # a uniform p makes each number of correct responses from 0 to G equally likely
    assert expected_chance(UNIFORM, 8) == pytest.approx(7 / 9, abs=1e-14)
    assert expected_chance(Beta(1e9, 1e9), 4) == pytest.approx(largest_chance(4), abs=1e-6) == 0.875
    assert expected_chance(Beta(64.0, 1e-9), 16) == pytest.approx(0, abs=1e-9)
    assert [largest_chance(n) for n in (2, 3)] == [0.5, 0.75]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_distribution_function_is_the_fraction_of_samples_below(distribution: Beta):
    found = samples(distribution)
    for x in (0.001, 0.1, 0.5, 0.9, 0.999):
        assert beta_cdf(x, distribution) == pytest.approx(np.mean(found <= x), abs=0.005)
    assert (beta_cdf(0, distribution), beta_cdf(1, distribution)) == (0, 1)


def test_the_distribution_function_has_its_closed_forms():
    for x in (1e-9, 0.2, 0.5, 0.99):
        assert beta_cdf(x, UNIFORM) == pytest.approx(x, rel=1e-13)
        assert beta_cdf(x, Beta(5.0, 1.0)) == pytest.approx(x**5, rel=1e-12)
        assert beta_cdf(x, Beta(0.5, 0.5)) == pytest.approx(
            2 / math.pi * math.asin(math.sqrt(x)), rel=1e-12
        )


@pytest.mark.parametrize("group_size", [2, 8, 16])
def test_within_the_likely_interval_the_chance_is_at_least_half_of_the_largest(group_size: int):
    low, high = likely_interval(group_size)
    half = largest_chance(group_size) / 2
    assert chance_at(low, group_size) == pytest.approx(half, rel=1e-9)
    assert chance_at(high, group_size) == pytest.approx(half, rel=1e-9)
    assert chance_at(low - 0.01, group_size) < half < chance_at(low + 0.01, group_size)


@pytest.mark.parametrize("truth", [Beta(2.0, 6.0), Beta(0.5, 0.2), Beta(20.0, 1.0), UNIFORM])
def test_a_fit_to_eight_responses_to_each_of_3000_problems_finds_the_distribution(truth: Beta):
    rng = np.random.Generator(np.random.Philox(key=1))
    correct = rng.binomial(8, rng.beta(*truth, size=3000)).astype(float)
    found = fit_beta(correct, 8 - correct, np.ones(3000))
    assert found.a / sum(found) == pytest.approx(truth.a / sum(truth), abs=0.015)
    assert sum(found) == pytest.approx(sum(truth), rel=0.2)


def test_problems_that_are_all_alike_make_a_narrow_fit_and_few_problems_a_wide_one():
    def all_correct(count: int) -> float:
        return expected_chance(fit_beta(np.full(count, 8.0), np.zeros(count), np.ones(count)), 8)

    chances = [all_correct(count) for count in (0, 1, 5, 60, 1000)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(7 / 9)
    assert chances[1] > 0.5 > chances[3] > chances[4]
    assert chances[3] < 0.1
    half = fit_beta(np.full(5000, 4.0), np.full(5000, 4.0), np.ones(5000))
    assert sum(half) == 64  # a problem's own responses still count


def test_a_fit_counts_each_problem_by_its_age():
    correct = np.array([8.0, 8.0, 0.0, 0.0])
    wrong = np.array([0.0, 0.0, 8.0, 8.0])
    recent = fit_beta(correct, wrong, np.array([1.0, 1.0, 1e-6, 1e-6]))
    alone = fit_beta(correct[:2], wrong[:2], np.ones(2))
    assert recent == pytest.approx(alone, rel=1e-4)
    assert fit_beta(correct, wrong, np.zeros(4)) == UNIFORM


@pytest.mark.parametrize("number", range(8))
def test_a_fit_to_a_few_problems_of_unequal_weight_is_the_formula_written_out(number: int):
    """Among 5 to 20 problems each one's own part in the sums is seen; 3,000 problems hide it."""
    rng = np.random.Generator(np.random.Philox(key=number))
    count = int(rng.integers(5, 21))
    trials = rng.integers(2, 40, count)
    correct = rng.binomial(trials, rng.uniform(0.05, 0.95, count))
    ages = rng.uniform(0.1, 1.0, count)
    weights = [float(age * n) for age, n in zip(ages, trials, strict=True)]
    whole = sum(weights)
    squares = sum(w * w for w in weights)
    rates = [c / n for c, n in zip(correct, trials, strict=True)]
    problems = whole * whole / squares
    mean = (problems * sum(w * x for w, x in zip(weights, rates, strict=True)) / whole + 0.5) / (
        problems + 1
    )
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, rates, strict=True))
    flips = sum(w * (1 - w / whole) / n for w, n in zip(weights, trials, strict=True))
    correlation = (variance / (mean * (1 - mean)) - flips) / (whole - squares / whole - flips)
    assert 0.05 < correlation < 0.95  # no bound hides the terms
    shrunk = (problems * correlation + 4 / 3) / (problems + 4)
    expected = mean * (1 / shrunk - 1), (1 - mean) * (1 / shrunk - 1)
    assert fit_beta(correct.astype(float), (trials - correct).astype(float), ages) == pytest.approx(
        expected, rel=1e-9
    )


def test_a_group_is_kept_unless_all_of_it_is_correct_or_all_incorrect():
    assert chance_at(0.5, 2) == 0.5
    assert chance_at(0.25, 4) == pytest.approx(1 - 1 / 256 - 81 / 256)
    assert chance_at(0.0, 16) == chance_at(1.0, 16) == 0.0


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_a_measured_chance_is_the_fraction_of_sets_of_responses_that_differ(group_size: int):
    for n in range(group_size, 8):
        for c in range(n + 1):
            sets = list(combinations([True] * c + [False] * (n - c), group_size))
            (found,) = measured_chances([c], [n - c], group_size)
            assert found == pytest.approx(
                np.mean([any(each) and not all(each) for each in sets]), abs=1e-12
            )


@pytest.mark.parametrize("p", [0.0, 0.005, 0.3, 0.9, 1.0])
def test_measured_chances_are_unbiased_from_as_many_responses_as_a_group_has(p: float):
    for n in (8, 12, 32):
        counts = range(n + 1)
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in counts]
        measured = measured_chances(list(counts), [n - c for c in counts], 8)
        assert np.dot(weights, measured) == pytest.approx(chance_at(p, 8), abs=1e-12)


def test_with_fewer_responses_than_a_group_has_a_chance_is_the_mean_of_its_posterior():
    correct = [0, 1, 4, 9]
    wrong = [4, 3, 0, 7]
    prior = fit_beta(np.array(correct, float), np.array(wrong, float), np.ones(4))
    *few, many = measured_chances(correct, wrong, 8)
    assert few == [
        expected_chance(Beta(prior.a + c, prior.b + w), 8)
        for c, w in zip(correct[:3], wrong, strict=False)
    ]
    assert many == pytest.approx(1 - math.comb(9, 8) / math.comb(16, 8), abs=1e-15)


def test_with_fewer_responses_chances_of_problems_that_are_nearly_never_solved_are_too_high():
    """What docs/lab/scale.md says of it: 4 responses expect .12 of groups of 8 where .04 carry a
    signal.
    """
    rates = samples(Beta(1, 200), 40_000)
    correct = np.random.default_rng(1).binomial(4, rates)
    expected = np.mean([np.mean(measured_chances(c, 4 - c, 8)) for c in correct.reshape(-1, 32)])
    assert expected == pytest.approx(0.12, abs=0.01)
    assert np.mean([chance_at(p, 8) for p in rates]) == pytest.approx(0.04, abs=0.005)
