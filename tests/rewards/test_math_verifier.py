"""`math`: extraction, equivalence, and above all what is not accepted."""

import pyarrow.parquet
import pytest

from dapo.rewards import get_verifier
from dapo.types import Problem
from helpers.released import dapo_math_parquet, released
from helpers.tables import for_each_row


@pytest.fixture(scope="module")
def verifier():
    return get_verifier("math")


def judged(verifier, answer, response):
    """True, False, or the error."""
    verdict = verifier(Problem("1", "Q", answer), response)
    if verdict.error is None:
        assert verdict.score == (1.0 if verdict.correct else -1.0)
    return verdict.error or verdict.correct


@for_each_row(
    "response",
    [
        "Answer: 42",
        "answer: 42.",
        "**Answer:** 42",
        "**Answer: 42**",
        "**Final Answer:** $42$",
        "Answer: \\( 42 \\)",
        "Answer: \\[42\\]",
        "Answer:\n$$\n42\n$$",
        "Answer: $\\boxed{42}$",
        "Answer: the number of ways is $\\boxed{42}$.",
        "Answer: 42.0",
        "Answer: +42",
        "Answer: 042",
        "Answer: 42^\\circ",
        "Answer: 42°",
        "Answer: $42^{\\circ}$",
        "Answer: $42",
        "Answer: \\$42.00",
        "Answer: 42\\%",
        "Answer: 42 cm",
        "Answer: $42 \\text{ cm}^2$",
        "Answer: 42 square units",
        "Answer: x = 42",
        "Answer: $m + n = 42$",
        "Answer: $AB + BC = \\boxed{42}$",
        "Answer: $f(3) = 6 \\cdot 7 = 42$",
        "Answer: 6×7 = 42",
        "Answer: 41\nno, wait:\nAnswer: 42",
        "<think>Answer: 41</think>\nso \\boxed{42}",
        "It is \\boxed{41}, no, \\boxed{42}.",
        "\\boxed{ 42 }",
        "\\boxed{x = 42}",
        "\\boxed{42} is what I say; \\boxed{4",
    ],
)
def test_forty_two_in_many_forms(verifier, response):
    assert judged(verifier, "42", response) is True


@for_each_row(
    "response",
    [
        "",
        "42",
        "The answer is 42",
        "so the answer: 42",
        "Answer:",
        "Answer: 43",
        "Answer: -42",
        "Answer: 42.5",
        "Answer: 42.0000001",
        "Answer: 4 2",
        "Answer: 42 or 43",
        "Answer: 42, 43",
        "Answer: 42; 42",
        "Answer: 42 and 42",
        "Answer: $42$ or $43$",
        "Answer: 42 \\text{ or } 43",
        "Answer: \\boxed{42} or \\boxed{43}",
        "Answer: \\{42, 43\\}",
        "Answer: [1, 2, 42]",
        "Answer: 40 2",
        "Answer: 40\\quad 2",
        "Answer: 41 = 42",
        "Answer: 1 = 2 = 42",
        "Answer: 3 apples or 5 = 42",
        "Answer: 42 \\approx 43",
        "Answer: 42 \\pm 0",
        "Answer: 42_7",
        "Answer: 42'",
        "Answer: 42 because 6 * 7 = 42",
        "Answer: 42 since it is so",
        "Answer: 42 (or 43)",
        "Answer: 42 \\text{ (or 43)}",
        "Answer: not 42",
        "Answer: x \\ge 42",
        "Answer: 42x",
        "Answer: -\\boxed{42}",
        "Answer: 5\\boxed{42}",
        "Answer: 43\n\\boxed{42}",
        "Answer: 42\nAnswer: 43",
        "\\boxed{41} \\boxed{43}",
        "\\boxed{42",
        "\\boxed{}",
        "Answer: \\sum_{k=1}^{42} 1",
        "Answer: " + "1+" * 300 + "42",
        "Answer: \\frac{84}{",
        "Answer: @@",
        "Answer: 👍",
    ],
)
def test_what_does_not_answer_forty_two(verifier, response):
    assert judged(verifier, "42", response) is False


@for_each_row(
    ("answer", "given", "expected"),
    [
        ("1234", "1,234", True),
        ("1234", "1{,}234", True),
        ("1234", "1\\,234", True),
        ("1,234", "1234", True),
        ("1234567", "1 234 567", True),
        ("-3", "−3", True),
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac{1}{2}", "1/2", True),
        ("\\frac{1}{2}", "\\dfrac12", True),
        ("\\frac{1}{3}", "0.333333", False),
        ("\\frac{1}{3}", "0.33", False),
        ("\\sqrt{2}", "2^{1/2}", True),
        ("2\\sqrt{3}", "2√3", True),
        ("\\frac{\\pi}{2}", "π/2", True),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        ("x^2", "x²", True),
        ("xy", "yx", True),
        ("xy", "x + y", False),
        ("2xy", "2yx", True),
        ("\\log_2 8", "3", True),
        ("3", "\\log_2 8", False),
        ("24", "4!", False),
        ("(1, 2)", "\\left( 1, 2 \\right)", True),
        ("(1, 2)", "(2, 1)", False),
        ("(1, 2)", "1, 2", False),
        ("[1, 2)", "(1, 2)", False),
        ("[2, 5)", "x \\in [2, 5)", True),
        ("1, 2", "2, 1", True),
        ("1, 2", "2 and 1", True),
        ("\\{1, 2\\}", "2, 1", True),
        ("1, 2", "x = 1, x = 2", True),
        ("3 \\text{ or } 4", "4, 3", True),
        ("1, 2", "1, 1", False),
        ("1, 2", "1, 2, 3", False),
        ("1, 2", "1", False),
        ("y = 2x + 1", "y=2x+1", True),
        ("x = 5", "5", True),
        ("x = 2", "y = 2", False),
        ("x \\le 5", "5 \\ge x", True),
        ("5 \\text{ m}", "5 \\text{ km}", False),
        ("5 \\text{ cm}", "5", True),
        ("5 hours", "5 hour", True),
        ("10\\%", "10", True),
        ("0.5", "50\\%", True),
        ("\\text{even}", "Even", True),
        ("\\text{even}", "odd", False),
        ("\\text{(B)}", "B", True),
        ("(B)", "B", True),
        ("B", "C", False),
        ("Tuesday", "\\text{Tuesday}", True),
        ("Tuesday", "Tuesday or Friday", False),
        ("6 - 5i", "6-5i", True),
        ("\\infty", "∞", True),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}", True),
    ],
)
def test_references_that_are_not_plain_numbers(verifier, answer, given, expected):
    assert judged(verifier, answer, f"Answer: {given}") is expected
    assert judged(verifier, answer, f"so \\boxed{{{given}}}") is expected


@pytest.mark.parametrize("answer", ["", "  ", "$", "\\frac{1}{", "@@", "1, ", "42 ####", "1 @ 2"])
@for_each_row("response", ["Answer: 42", "Answer: @@", "\\boxed{\\frac{1}{}", "none", ""])
def test_a_reference_that_cannot_be_read_is_an_error_whatever_the_response(
    verifier, answer, response
):
    assert (
        judged(verifier, answer, response)
        == f"math: the reference {answer!r} cannot be read as mathematics"
    )


def test_every_dapo_math_reference_is_right_for_itself_and_wrong_for_the_next(verifier, tmp_path):
    for file in (dapo_math_parquet(tmp_path), *released("dapo-math-17k.parquet")):
        rows = pyarrow.parquet.read_table(file, columns=["reward_model"]).to_pylist()
        for answer in {row["reward_model"]["ground_truth"] for row in rows}:
            assert judged(verifier, answer, f"Answer: ${answer}$") is True
            assert judged(verifier, answer, f"\\boxed{{{int(answer) + 1}}}") is False


def test_it_sets_no_alarm_and_works_outside_the_main_thread(verifier):
    import signal
    import threading

    signal.setitimer(signal.ITIMER_REAL, 60)
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append(judged(verifier, "\\sqrt{2}", "Answer: 2^{1/2}"))
    )
    thread.start()
    thread.join()
    judged(verifier, "\\sqrt{8}", "Answer: 2\\sqrt{2}")
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    assert seen == [True]
    assert left > 0
