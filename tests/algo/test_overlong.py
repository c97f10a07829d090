"""Laws of the soft overlong punishment (Eq. 13) and of overlong filtering."""

import pytest

from dapo.algo.overlong import overlong_penalty, trains
from helpers.tables import for_each_row

PAPER = {"max_length": 20480, "buffer": 4096}


@for_each_row(
    ("length", "penalty"),
    [
        (0, 0.0),
        (1, 0.0),
        (16383, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (20481, -1.0),
        (10**9, -1.0),
    ],
)
def test_table_of_the_papers_sizes(length, penalty):
    assert overlong_penalty(length, **PAPER) == penalty


def test_the_factor_scales_the_whole_penalty():
    assert overlong_penalty(18432, **PAPER, factor=0.5) == -0.25
    assert overlong_penalty(99999, **PAPER, factor=2.0) == -2.0
    assert overlong_penalty(20480, **PAPER, factor=0.0) == 0.0


def test_it_never_grows_with_length_and_stays_between_minus_factor_and_zero():
    penalties = [
        overlong_penalty(length, max_length=24, buffer=8, factor=3.0) for length in range(40)
    ]
    assert penalties == sorted(penalties, reverse=True)
    assert set(penalties[:17]) == {0.0}
    assert penalties[16:25] == [-3.0 * k / 8 for k in range(9)]
    assert set(penalties[24:]) == {-3.0}


def test_a_buffer_of_the_whole_length_punishes_from_the_first_token():
    assert [overlong_penalty(length, max_length=4, buffer=4) for length in range(6)] == [
        0,
        -0.25,
        -0.5,
        -0.75,
        -1,
        -1,
    ]


@pytest.mark.parametrize("buffer", [0, -1, 4097])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(
        ValueError, match=rf"buffer must lie in 1 .. max_length=4096 tokens, got {buffer}"
    ):
        overlong_penalty(10, max_length=4096, buffer=buffer)


def test_a_negative_factor_would_reward_length_and_is_refused():
    with pytest.raises(ValueError, match=r"factor must not be negative, got -1"):
        overlong_penalty(10, max_length=20, buffer=5, factor=-1.0)


@pytest.mark.parametrize(
    ("mode", "finish", "expected"),
    [
        ("soft", "stop", True),
        ("soft", "length", True),
        ("filter", "stop", True),
        ("filter", "length", False),
        ("off", "stop", True),
        ("off", "length", True),
    ],
)
def test_only_filter_mode_masks_and_only_truncated_responses(mode, finish, expected):
    assert trains(finish, mode=mode) is expected


def test_an_unknown_mode_is_refused_instead_of_training_everything():
    with pytest.raises(ValueError, match="'soft', 'filter' or 'off', got 'hard'"):
        trains("length", mode="hard")
