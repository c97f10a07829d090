"""The rule that sets the weight of the entropy bonus."""

import pytest

from dapo.algo.entropy import DELTA, MAX_COEFFICIENT, EntropyBonus


def weights(target: float, entropies: list[float], *, updates: int = 1) -> list[float]:
    """The weight in each step: the first, and those after steps whose updates have measured these
    entropies.
    """
    bonus = EntropyBonus(target)
    found = []
    for step, entropy in enumerate([*entropies, 0.0], 1):
        for update in range(updates):
            bonus = bonus.at_step(step)
            found += [bonus.weight] if not update else []
            assert bonus.weight == found[-1]  # one weight in all updates of a step
            bonus = bonus.after(entropy + (update - (updates - 1) / 2) / 10)
    return found


def test_the_weight_grows_below_the_target_and_is_zero_above_it():
    # c: 1, 2, 1, 2 times .0001; above the target the bonus is off, whatever c is
    assert weights(0.5, [0.4, 0.3, 0.6, 0.2]) == pytest.approx([0, DELTA, 2 * DELTA, 0, 2 * DELTA])


def test_a_step_counts_once_by_the_mean_of_its_updates():
    once = weights(0.5, [0.4, 0.3, 0.6, 0.2])
    for updates in (2, 5):
        assert weights(0.5, [0.4, 0.3, 0.6, 0.2], updates=updates) == pytest.approx(once)


def test_the_weight_has_the_bounds_and_the_pace_that_were_released():
    assert (DELTA, MAX_COEFFICIENT) == (0.0001, 0.005)
    found = weights(99.0, [1.0] * 100)
    assert found[:3] == pytest.approx([0, 0.0001, 0.0002])
    assert found[49:52] == pytest.approx([0.0049, 0.005, 0.005])
    assert max(found) == MAX_COEFFICIENT
    after_the_bound = weights(0.5, [0.4] * 100 + [0.6, 0.5])
    # it falls at once: nothing was stored up beyond it
    assert after_the_bound[-2:] == pytest.approx([0, 0.0048])


def test_at_the_target_itself_the_bonus_acts_with_a_smaller_weight():
    assert weights(0.5, [0.1, 0.1, 0.1, 0.5]) == pytest.approx(
        [0, DELTA, 2 * DELTA, 3 * DELTA, 2 * DELTA]
    )


def test_a_long_time_above_the_target_is_no_debt():
    assert weights(0.5, [2.0] * 100 + [0.4])[-1] == pytest.approx(DELTA)


def test_the_rule_keeps_the_entropy_of_a_policy_that_collapses_at_the_target():
    # each step takes 3 % of the entropy away, and the bonus gives back in proportion to its weight
    entropy = 2.0
    bonus = EntropyBonus(0.4)
    seen = []
    for step in range(1, 3001):
        bonus = bonus.at_step(step)
        weight = bonus.weight
        bonus = bonus.after(entropy)
        entropy += -0.03 * entropy + 10 * weight
        seen.append(entropy)
    assert 2.0 * 0.97**3000 < 1e-30
    assert min(seen[100:]) > 0.2
    assert sum(seen[-1000:]) / 1000 == pytest.approx(0.4, abs=0.05)
