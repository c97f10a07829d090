"""Loops at the end of responses, and responses with several marked answers."""

import random

from dapo.sampling.rollout_metrics import MAX_PERIOD, has_many_answers, looping, response_metrics
from dapo.types import Generation, Group, Problem, Verdict
from helpers.tables import for_each_row


def naive(tokens: list[int]) -> bool:
    """Whether the end is a unit of at most MAX_PERIOD tokens, four times or more, of 24 tokens in
    all.
    """
    for period in range(1, MAX_PERIOD + 1):
        span = max(4 * period, 24)
        end = tokens[-span:]
        if len(end) == span and all(end[i] == end[i - period] for i in range(period, span)):
            return True
    return False


@for_each_row(
    ("tokens", "expected"),
    [
        ([7] * 24, True),
        ([7] * 23, False),
        ([1, 2, 3, *([4, 5] * 12)], True),
        ([*([4, 5] * 12), 1], False),  # a loop that the response has left
        ([*range(64)] * 4, True),
        ([*range(64)] * 3, False),
        ([*range(65)] * 4, False),  # a longer unit is text that comes again
        ([], False),
    ],
)
def test_a_loop_is_the_same_tokens_four_times_and_24_in_all(tokens: list[int], expected: bool):
    assert looping([tokens], ["length"]).tolist() == [expected]
    assert naive(tokens) == expected


def test_the_end_token_is_no_part_of_a_loop():
    assert looping([[7] * 24 + [0], [7] * 24 + [0]], ["stop", "length"]).tolist() == [True, False]


def test_many_responses_at_once_are_judged_as_each_of_them_is():
    draw = random.Random(0)
    responses = []
    for _ in range(300):
        unit = [draw.randrange(3) for _ in range(draw.randrange(1, 70))]
        responses.append(
            [draw.randrange(9) for _ in range(draw.randrange(9))] + unit * draw.randrange(6)
        )
    found = looping(responses, ["length"] * len(responses)).tolist()
    assert found == [naive(response) for response in responses]
    assert 50 < sum(found) < 250


@for_each_row(
    ("text", "expected"),
    [
        ("Answer: 1\nAnswer: 2\nAnswer: 3", True),
        ("answer : 1 \\boxed{2} and\n#### 3", True),
        ("Answer: 1\nso the answer: 1", False),
        ("#### Step one\n#### Step two\n#### Step three", False),  # headings
        ("#### 1\n#### 2\n#### -3.5", True),
        ("the answers are 1, 2 and 3", False),
    ],
)
def test_three_marked_answers_are_many(text: str, expected: bool):
    group = Group(
        Problem("1", "?", ""),
        (1,),
        (Generation("0", (5,), (-1.0,), "stop", 0),),
        (Verdict(True, 1.0),),
        texts=(text,),
    )
    assert has_many_answers(text) == expected
    assert response_metrics([group]) == ({"rollout/many_answers_fraction": 1.0} if expected else {})


def test_half_of_a_surrogate_pair_is_searched_as_well():
    group = Group(
        Problem("1", "?", ""),
        (1,),
        (Generation("0", (5,), (-1.0,), "stop", 0),),
        (Verdict(True, 1.0),),
        texts=("\ud83d",),
    )
    assert response_metrics([group]) == {}
