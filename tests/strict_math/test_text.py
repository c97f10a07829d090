"""Finding the answer in a response."""

from fractions import Fraction

import pytest

from dapo.libs.strict_math.text import (
    answer_line,
    boxes,
    final_part,
    last_boxed,
    numbers_in,
    only_listed,
    plain_number,
    strip_formatting,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: 42", "42"),
        ("so\nANSWER : 42\n", "42"),
        ("Answer: 1\nbut wait\nAnswer: 2\nthanks", "2"),
        ("**Answer:** 42", "42"),
        ("**Answer: 42**", "42"),
        ("**Answer**: 42", "42"),
        ("__Answer__: `42`", "42"),
        ("### Final Answer: 42", "42"),
        ("> - answer: 42", "42"),
        ("The final answer is: 42", "42"),
        ("\\textbf{Answer:} 42", "42"),
        ("Answer：42", "42"),
        ("Answer:\n\n42\nmore", "42"),
        ("Answer:\n$$\n42\n$$\nmore", "$$ 42 $$"),
        ("Answer:\n\\[\nx\n+1\n\\]", "\\[ x +1 \\]"),
        ("Answer:\n$$\n42", "$$"),
        ("Answer: 1\nAnswer:", None),
        ("The answer: none of these lines", "none of these lines"),
        ("in the middle answer: 42", None),
        ("Answers: 42", None),
        ("Answer 42", None),
        ("", None),
    ],
)
def test_the_last_line_that_says_answer_is_found(text, expected):
    assert answer_line(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\fbox{7}", "7"),
        ("\\boxed{x = \\boxed{4}}", "4"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        ("\\boxed{3} then \\boxed{4", "3"),
        ("\\boxed{4", None),
        ("} \\boxed{4}", "4"),
        ("boxed{4}", None),
    ],
)
def test_the_last_balanced_box_is_found(text, expected):
    assert last_boxed(text) == expected


def test_a_hundred_thousand_open_boxes_are_read_in_one_pass():
    assert boxes("\\boxed{" * 100_000) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 12. ", "12"),
        ("**12**", "12"),
        ("**12.**", "12"),
        ("$12$.", "12"),
        ("$$12$$", "12"),
        ("\\(12\\)", "12"),
        ("\\[ 12 \\]", "12"),
        ("`12`", "12"),
        ('"12"', "12"),
        ("$\\boxed{12}$", "12"),
        ("\\boxed{1} + \\boxed{2}", "\\boxed{1} + \\boxed{2}"),
        ("$3$ or $4$", "$3$ or $4$"),
        ("**3** or **4**", "**3** or **4**"),
        ("1.5", "1.5"),
        ("...", ""),
        ("$", "$"),
        ("", ""),
    ],
)
def test_wrappings_come_off_only_if_they_hold_everything(text, expected):
    assert strip_formatting(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["36"]', "36"),
        (' ["\\\\frac{1}{2}"] ', "\\frac{1}{2}"),
        ("[36]", "[36]"),
        ("[1, 2)", "[1, 2)"),
        ('["a", "b"]', '["a", "b"]'),
        ('[["a"]]', '[["a"]]'),
        ('[" "]', '[" "]'),
        ("[]", "[]"),
        ("36", "36"),
    ],
)
def test_only_a_list_of_one_text_is_its_item(text, expected):
    assert only_listed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", 42), ("-42", -42), ("+42", 42), ("−42", -42), ("042", 42), ("42.", 42), ("42.50", Fraction(85, 2)),
        (".5", Fraction(1, 2)), ("1,234", 1234), ("1,234,567.5", Fraction(2469135, 2)), ("12,34", None),
        ("1,2345", None), ("1 2", None), ("1/2", None), ("4%", None), ("", None), ("-", None),
        (".", None), ("٣", None), ("1e3", None),
    ],
)  # fmt: skip
def test_a_plain_number_is_one_number_and_nothing_else(text, expected):
    assert plain_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3-4", [3, 4]), ("from -3 to 4", [-3, 4]), ("1,200.50 and 7", [Fraction(2401, 2), 7]), ("3,4", [3, 4]),
        ("1,2345", [1, 2345]), ("3.4.5", [Fraction(17, 5), Fraction(1, 2)]), ("none", []), ("12.", [12]),
    ],
)  # fmt: skip
def test_numbers_in_a_text_come_in_order(text, expected):
    assert numbers_in(text) == expected


def test_private_reasoning_is_not_the_answer():
    assert final_part("<think>Answer: 3</think>Answer: 4") == "Answer: 4"
    assert final_part("no thoughts") == "no thoughts"
