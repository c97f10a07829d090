"""Which rewards favour short responses."""

import pytest

from dapo.types import Verdict
from evidence.reward_and_length import REWARDS, JudgedGroup, tendency

RIGHT = Verdict(True, 1.0)
WRONG = Verdict(False, -1.0)
HALF = Verdict(False, -0.5)

SHORT_RIGHT = JudgedGroup(2, [RIGHT, WRONG, WRONG, WRONG], [50, 100, 100, 150], [1, 2, 2, 3])
LONG_CREDITED = JudgedGroup(5, [WRONG, WRONG, HALF, HALF], [50, 100, 100, 150], [1, 2, 2, 3])
TWICE = JudgedGroup(2, [RIGHT, RIGHT, WRONG, WRONG], [100, 100, 100, 100], [2, 2, 2, 2])


def of(name, groups):
    return tendency(groups, *REWARDS[name])


def test_a_short_right_response_favours_short_ones():
    found = of("right or wrong", [SHORT_RIGHT, LONG_CREDITED])
    assert (found["kept"], found["long"]) == (0.5, 0.0)
    # advantages 1.5 and three times -0.5; relative lengths -0.5, 0, 0, 0.5
    assert found["length"] == pytest.approx((1.5 * -0.5 - 0.5 * 0.5) / 4)
    assert found["calculations"] == pytest.approx((1.5 * -1 - 0.5) / 4)


def test_credit_keeps_the_long_problem_which_favours_long_responses():
    found = of("partial credit", [LONG_CREDITED])
    assert (found["kept"], found["long"]) == (1.0, 1.0)
    assert found["length"] > 0
    both = of("partial credit", [SHORT_RIGHT, LONG_CREDITED])
    assert of("partial credit", [SHORT_RIGHT])["length"] < both["length"] < found["length"]


def test_right_at_least_twice_leaves_out_groups_that_are_right_once():
    found = of("right at least twice", [SHORT_RIGHT, LONG_CREDITED, TWICE])
    assert (found["kept"], found["length"]) == (0.33, 0.0)
