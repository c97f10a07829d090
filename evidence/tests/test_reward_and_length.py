"""Which rewards favour short responses."""

import pytest

from dapo.types import Verdict
from evidence.reward_and_length import (
    JudgedGroup,
    as_trained,
    partial_credit,
    right_at_least_twice,
    right_or_wrong,
    tendency,
)

RIGHT = Verdict(True, 1.0)
WRONG = Verdict(False, -1.0)
HALF = Verdict(False, -0.5)

SHORT_RIGHT = JudgedGroup(2, [RIGHT, WRONG, WRONG, WRONG], [50, 100, 100, 150], [1, 2, 2, 3])
LONG_CREDITED = JudgedGroup(5, [WRONG, WRONG, HALF, HALF], [50, 100, 100, 150], [1, 2, 2, 3])
TWICE = JudgedGroup(2, [RIGHT, RIGHT, WRONG, WRONG], [100, 100, 100, 100], [2, 2, 2, 2])


def test_a_short_right_response_favours_short_ones():
    found = tendency([SHORT_RIGHT, LONG_CREDITED], right_or_wrong)
    assert (found["kept"], found["long"]) == (0.5, 0.0)
    # advantages 1.5 and three times -0.5; relative lengths -0.5, 0, 0, 0.5
    assert found["length"] == pytest.approx((1.5 * -0.5 - 0.5 * 0.5) / 4)
    assert found["calculations"] == pytest.approx((1.5 * -1 - 0.5) / 4)


def test_credit_keeps_the_long_problem_which_favours_long_responses():
    found = tendency([LONG_CREDITED], partial_credit)
    assert (found["kept"], found["long"]) == (1.0, 1.0)
    assert found["length"] > 0
    both = tendency([SHORT_RIGHT, LONG_CREDITED], partial_credit)
    assert tendency([SHORT_RIGHT], partial_credit)["length"] < both["length"] < found["length"]


def test_right_at_least_twice_leaves_out_groups_that_are_right_once():
    found = tendency([SHORT_RIGHT, LONG_CREDITED, TWICE], right_at_least_twice)
    assert (found["kept"], found["length"]) == (0.33, 0.0)


def test_the_advantages_of_the_run_hold_its_penalty_on_length():
    verdicts = [WRONG, WRONG, HALF, HALF]
    penalised = JudgedGroup(5, verdicts, [50, 100, 100, 150], [1, 2, 2, 3], [0.5, 0.5, 0.5, -1.5])
    found = tendency([penalised, LONG_CREDITED], as_trained)
    assert found["kept"] == 0.5
    assert found["length"] == pytest.approx((0.5 * -0.5 - 1.5 * 0.5) / 4)
