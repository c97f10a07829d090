"""The rule that sets the weight of the entropy bonus."""

import pytest

from dapo.algo.entropy import DELTA, EntropyBonus


def weights(target: float, entropies: list[float]) -> list[float]:
    """The weight in each update: before the first one, and after each entropy that an update has measured."""
    bonus = EntropyBonus(target)
    found = [bonus.weight]
    for entropy in entropies:
        bonus = bonus.after(entropy)
        found.append(bonus.weight)
    return found


def test_the_weight_grows_below_the_target_and_is_zero_above_it():
    # c: .005, .010, .005, .010; above the target the bonus is off, whatever c is
    assert weights(0.5, [0.4, 0.3, 0.6, 0.2]) == pytest.approx([0, DELTA, 2 * DELTA, 0, 2 * DELTA])


def test_at_the_target_itself_the_bonus_acts_with_a_smaller_weight():
    assert weights(0.5, [0.1, 0.1, 0.1, 0.5]) == pytest.approx([0, DELTA, 2 * DELTA, 3 * DELTA, 2 * DELTA])


def test_a_long_time_above_the_target_is_no_debt():
    assert weights(0.5, [2.0] * 100 + [0.4])[-1] == pytest.approx(DELTA)


def test_the_rule_keeps_the_entropy_of_a_policy_that_collapses_at_the_target():
    # each update takes 3 % of the entropy away, and the bonus gives back in proportion to its weight
    entropy, bonus, seen = 2.0, EntropyBonus(0.4), []
    for _ in range(3000):
        weight = bonus.weight
        bonus = bonus.after(entropy)
        entropy += -0.03 * entropy + 0.2 * weight
        seen.append(entropy)
    assert 2.0 * 0.97**3000 < 1e-30
    assert min(seen[100:]) > 0.2
    assert sum(seen[-1000:]) / 1000 == pytest.approx(0.4, abs=0.05)
