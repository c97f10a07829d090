"""Laws of dynamic sampling's filter (Eq. 11)."""

import pytest

from dapo.algo.overlong import overlong_penalty
from dapo.algo.sampling import SignalRule, is_informative
from dapo.types import Generation, Group, Problem, Verdict

RIGHT = Verdict(True, 1.0)
WRONG = Verdict(False, -1.0)
FAILED = Verdict(None, 0.0, error="timed out after 10 s")


def graded(*scores: float) -> list[Verdict]:
    return [Verdict(None, score) for score in scores]


@pytest.mark.parametrize(
    ("verdicts", "informative"),
    [
        ([RIGHT, WRONG, WRONG, WRONG], True),
        ([WRONG, RIGHT, RIGHT, RIGHT], True),
        ([RIGHT, WRONG], True),
        ([RIGHT, RIGHT, RIGHT, RIGHT], False),
        ([WRONG, WRONG, WRONG, WRONG], False),
        ([RIGHT], False),
        ([WRONG], False),
        ([], False),
    ],
)
def test_a_group_carries_a_signal_if_some_but_not_all_responses_are_correct(verdicts, informative):
    assert is_informative(verdicts) is informative


def test_all_wrong_group_is_dropped_even_if_lengths_differ():
    lengths = (3, 10, 20)
    shaped = [
        WRONG.score + overlong_penalty(length, max_length=20, buffer=10) for length in lengths
    ]
    assert shaped == [-1.0, -1.0, -2.0]  # the shaped rewards do differ
    group = Group(
        problem=Problem("p", "1+1?", "2"),
        prompt_ids=(1,),
        generations=tuple(Generation(f"r{n}", (5,) * n, (-0.5,) * n, "stop", 1) for n in lengths),
        verdicts=(WRONG, WRONG, WRONG),
    )
    assert not group.is_informative


def test_all_correct_group_is_dropped_even_if_its_scores_differ():
    assert not is_informative([Verdict(True, 1.0), Verdict(True, 0.5)])


def test_verdicts_with_an_error_neither_help_nor_hurt():
    assert is_informative([FAILED, RIGHT, WRONG, FAILED])
    assert not is_informative([FAILED, WRONG, WRONG])  # an error is not a different score
    assert not is_informative([FAILED, RIGHT, RIGHT])
    assert not is_informative([FAILED, FAILED, RIGHT])  # nothing to compare the one with
    assert not is_informative([FAILED, FAILED])


def test_graded_scores_carry_a_signal_if_they_differ():
    assert is_informative(graded(0.0, 0.0, 0.3))
    assert not is_informative(graded(0.3, 0.3, 0.3))


def test_by_score_partial_credit_carries_a_signal_where_all_are_wrong():
    credited = Verdict(False, -0.5)
    assert not is_informative([WRONG, credited])
    assert is_informative([WRONG, credited], "score")
    assert not is_informative([credited, credited], "score")
    assert not is_informative([FAILED, credited], "score")


def test_six_times_a_tenth_is_not_a_signal_though_its_std_is_above_zero():
    scores = [0.1] * 6
    mean = sum(scores) / 6
    assert (sum((score - mean) ** 2 for score in scores) / 6) ** 0.5 > 0
    assert not is_informative(graded(*scores))


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ((0.0, 1.0), True),  # mean 0.5
        ((0.0, 0.25), False),  # mean 0.125, exactly the lower threshold
        ((0.75, 1.0), False),  # mean 0.875, exactly the upper one
        ((0.5, 0.625), False),  # spread 0.125 of 0.25
        ((0.5, 0.75), True),  # exactly the spread
        ((-3.0, 4.0), True),
    ],
)
def test_thresholds_ask_for_a_spread_and_for_a_mean_strictly_between(scores, shown):
    signal = SignalRule(min_spread=0.25, mean_above=0.125, mean_below=0.875)
    assert signal.is_met_by(graded(*scores)) is shown


def test_an_error_counts_neither_in_the_mean_nor_in_the_spread_of_scores():
    signal = SignalRule(min_spread=0.125, mean_above=0.375, mean_below=0.875)
    assert signal.is_met_by([*graded(0.5, 0.625), FAILED])
    assert not signal.is_met_by([*graded(0.5, 0.5625), FAILED])  # its placeholder of 0 is no score
