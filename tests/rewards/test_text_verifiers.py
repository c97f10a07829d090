"""The verifiers that compare text or numbers: exact, gsm8k, math_dapo."""

import json

import pytest

from dapo.rewards import get_verifier
from dapo.rewards.verifiers.math_dapo import normalize
from dapo.types import Problem
from helpers.paths import SHARED_DATA

GSM8K = SHARED_DATA / "gsm8k" / "test.jsonl"


def judged(name, answer, response, **options):
    """True, False, or the error."""
    verdict = get_verifier(name, **options)(Problem("1", "Q", answer), response)
    if verdict.error is None:
        assert verdict.score == (1.0 if verdict.correct else -1.0)
    return verdict.error or verdict.correct


@pytest.mark.parametrize("response", ["12", " 12\n", "12.", "**12**", "**12.**", "$12$", "`12`", '"12"', "\\boxed{12}"])
def test_exact_takes_the_answer_itself_in_any_wrapping(response):
    assert judged("exact", "12", response) is True


@pytest.mark.parametrize(
    "response",
    [
        "",
        "13",
        "12 13",
        "12 or 13",
        "3 + 9 = 12",
        "The answer is 12",
        "Answer: 12",
        "12\n12",
        "1 2",
        "-12",
        "12%",
        "012",
    ],
)
def test_exact_takes_nothing_else(response):
    assert judged("exact", "12", response) is False


def test_exact_ignores_case_by_default():
    assert judged("exact", "Paris", "paris.") is True
    assert judged("exact", "Paris", "paris", ignore_case=False) is False
    assert judged("exact", "New  York", "new york") is True
    assert judged("exact", "12", "<think>3 + 9</think>\n12") is True


@pytest.mark.parametrize(
    ("options", "response", "expected"),
    [
        ({"extract": "answer_line"}, "3 + 9 is\nAnswer: 12.", True),
        ({"extract": "answer_line"}, "12", False),
        ({"extract": "last_number"}, "3 + 9 = 12, I think.", True),
        ({"extract": "last_number"}, "12.0 dollars", True),
        ({"extract": "last_number"}, "12, no: 13", False),
        ({"extract": "last_number"}, "twelve", False),
        ({"extract": "final"}, "The answer is 12.", True),
        ({"extract": "final"}, "12, no: 13", False),
    ],
)
def test_exact_reads_the_configured_part_of_the_response(options, response, expected):
    assert judged("exact", "12", response, **options) is expected


def test_exact_without_a_usable_reference_is_an_error_not_a_wrong_answer():
    assert judged("exact", " ", "12") == "exact: the reference is empty (' ')"
    assert "is not a number, which extract=last_number needs" in judged("exact", "x", "x", extract="last_number")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("It is 6 * 200.\n#### 1200", True),
        ("#### 1,200", True),
        ("#### $1,200.00", True),
        ("#### \\$1{,}200", True),
        ("#### 1200 dollars", True),
        ("#### **1200**", True),
        ("####1200.", True),
        ("#### 5\nno, wait\n#### 1200\nbye", True),
        ("Answer: she makes $1200.", True),
        ("\\boxed{1200}", True),
        ("#### 1200 or 1300", False),
        ("#### 1200\n#### 5", False),
        ("#### -1200", False),
        ("#### 1,2,0,0", False),
        ("#### twelve hundred", False),
        ("#### ", False),
        ("1200", False),
        ("", False),
    ],
)
def test_gsm8k_compares_the_one_marked_number_by_value(response, expected):
    assert judged("gsm8k", "6 * 200 = <<6*200=1200>>1200\n#### 1,200", response) is expected


def test_gsm8k_flexible_takes_the_last_number_where_nothing_is_marked():
    assert judged("gsm8k", "7", "so 3 and then 7", flexible=True) is True
    assert judged("gsm8k", "7", "#### 3\nor 7", flexible=True) is False
    assert judged("gsm8k", "7", "none", flexible=True) is False


def test_gsm8k_reads_signs_and_decimals_of_the_reference():
    assert judged("gsm8k", "#### -7.50", "#### -7.5") is True
    assert judged("gsm8k", "18", "#### 18.0") is True
    assert "does not end in a number" in judged("gsm8k", "#### many", "#### 7")
    assert "does not end in a number" in judged("gsm8k", "", "#### 7")


def test_every_gsm8k_reference_judges_its_own_solution_right():
    if not GSM8K.is_file():
        pytest.skip(f"needs {GSM8K}")
    verifier = get_verifier("gsm8k")
    for row in map(json.loads, GSM8K.read_text().splitlines()):
        problem = Problem("1", row["question"], row["answer"])
        assert verifier(problem, row["answer"]).correct is True
        assert verifier(problem, row["answer"] + "1").correct is False


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("34", "Answer: 34", True),
        ("34", "answer : 34", True),
        ("34", "The Answer:34", True),
        ("34", "Answer:\n\n34", True),
        ("34", "Answer: $34$", True),
        ("34", "Answer: \\boxed{34}", True),
        ("34", "Answer: $\\boxed{34}$.", True),
        ("34", "Answer: 3\nAnswer: 34", True),
        ("34", "Answer: x = 34", True),
        ("34", "Answer: 34 square units", True),
        ("34", "Answer: 34^\\circ", True),
        ("34", "Answer: \\text{34}", True),
        ("34", 'Answer: "34"', True),
        ("1234", "Answer: 1,234", True),
        ("1234", "Answer: 1{,}234", True),
        ("\\frac{1}{2}", "Answer: \\frac12", True),
        ("\\sqrt{2}", "Answer: \\sqrt2", True),
        # quirks, kept
        ("34", "**Answer:** 34", False),
        ("34", "Answer: 34.", False),
        ("34", "Answer: \\(34\\)", False),
        ("34", "Answer: 34.0", False),
        ("34", "Answer: 5 = 34", True),
        ("34", "Answer: one of $34$ and $35$", True),
        ("34", "Answer: 3 4", True),
        ("34", "Answer: 34 is it. Answer: 35", False),
        ("34", "Answer: 34 minutes feet km", True),
        ("can", "Answer: c", False),
        ("0.5", "Answer: 1/2", False),
        ("34", "\\boxed{34}", False),
        ("34", "34", False),
        ("34", "", False),
        ("34", "Answer: 34\n" + "x" * 300, False),
        ("34", "Answer: 34\n" + "x" * 289, True),
        ("34", "x" * 400 + "Answer: 34", True),
        ("[INVALID]", "nothing", True),
    ],
)
def test_math_dapo_judges_as_released(answer, response, expected):
    assert judged("math_dapo", answer, response) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("a cat", "cat"),
        ("banana ", "banan"),
        ("an apple", "apple"),
        ("x = y = 5", "5"),
        ("$5.$", "5"),
        ("\\$5", "5"),
        ("5\\ 6", "56"),
        ("\\mbox{even}", "even"),
        ("x,\\text{and}y", "x,y"),
        ("1,\\text{and}2", "12"),
        ("1 \\text{ and } 2", "12"),
        ("5\\text{ m}", "5"),
        ("5\\text{ m}^2", "5"),
        ("5 \\text{s}", "5"),
        ("7\\mathrm{th}", "7"),
        ("90^{\\circ}", "90"),
        ("1,\\!000", "1000"),
        ("12,34", "1234"),
        ("1,2.5", "1,2.5"),
        ("-1,234", "-1,234"),
        ("before $x$ after $y$", "x"),
        ("\\textbf{7}", "7"),
        ("\\overline{AB}", "AB"),
        ("\\text{a}\\text{b}", "ab"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1}+\\boxed{2}", "1}+\\boxed{2"),
        ("\\frac123", "\\frac{1}{2}3"),
        ("\\frac1{2}", "\\frac{1}{{}2}"),
        ("\\sqrt3x", "\\sqrt{3}x"),
        ("issue", "is"),
        ("always", "al"),
        ("1,2,\\ldots", "12"),
        ("\\dots5", "5"),
        ("", ""),
    ],
)
def test_math_dapo_normalises_as_released(answer, expected):
    assert normalize(answer) == expected


def test_exact_final_takes_the_last_number_only_where_the_reference_is_one():
    verify = get_verifier("exact", extract="final")
    assert verify(Problem("p", "?", "2 7 9"), "2 7 9.").correct
    assert not verify(Problem("p", "?", "2 7 9"), "sorted: 2 7 9").correct
    assert verify(Problem("p", "?", "9"), "sorted: 2 7 9").correct


def test_a_number_of_any_length_is_judged_and_a_denial_is_no_answer():
    digits = "9" * 50_000
    for name, options in (("gsm8k", {}), ("exact", {"extract": "last_number"})):
        verifier = get_verifier(name, **options)
        for answer, expected in (("42", False), (digits, True)):
            verdict = verifier(Problem("1", "Q", answer), f"Answer: {digits}")
            assert (verdict.correct, verdict.error) == (expected, None)
    assert get_verifier("gsm8k")(Problem("1", "Q", "42"), "Answer: not 42").correct is False
    assert get_verifier("gsm8k")(Problem("1", "Q", "42"), "#### isn't 42").correct is False
