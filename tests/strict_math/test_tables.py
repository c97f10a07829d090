"""`math` on the committed tables of judged answers; `make verifier-report` prints it beside the
other verifiers.
"""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.verifier_report import Case, judge, read_cases
from dapo.rewards import get_verifier
from dapo.types import Problem

BY_KIND = ("families", "unseen", "subjects", "unseen 2", "notations", "contexts")
KINDS = sorted({case.kind for name in BY_KIND for case in read_cases(name)})
REFUSED_RIGHT = {
    ("e^{i\\pi/3}", "\\frac12 + \\frac{\\sqrt3}{2}i"),  # another form of a complex number
    ("9", "3x = 27, so x = 9"),  # several equations on one line
    ("9", "x^2 = 81, x > 0, x = 9"),
    ("12 \\text{ m/s}", "12 \\frac{m}{s}"),  # units of one letter outside of text
    ("25", "He needs 25 more apples."),  # sentences that may say more than the value
    ("25", "They will meet after 25 minutes."),
}
"""All right answers that `math` refuses: reference, and how the response ends."""


def is_named(case: Case) -> bool:
    answer = (
        case.response.removeprefix("\\boxed{").removesuffix("}")
        if "boxed" in case.response
        else case.response
    )
    return any(case.truth == truth and answer.endswith(end) for truth, end in REFUSED_RIGHT)


VERIFIER = get_verifier("math")


def verdict(truth: str, response: str) -> bool:
    return VERIFIER(Problem("1", "Q", truth), response).correct is True


def test_the_tables_are_as_described():
    for name, at_least, share_right in (
        ("cases", 450, 3),
        ("families", 1350, 3),
        ("unseen", 640, 3),
        ("subjects", 650, 4),
        ("unseen 2", 180, 4),
        ("notations", 130, 3),
        ("contexts", 330, 3),
    ):
        cases = read_cases(name)
        assert len(cases) >= at_least
        assert len({(case.question, case.truth, case.response) for case in cases}) == len(cases)
        assert sum(case.expected for case in cases) >= len(cases) // share_right
        assert sum(not case.expected for case in cases) >= len(cases) // 2
        assert all(case.why and (case.kind or name == "cases") for case in cases)
    assert len(KINDS) >= 40
    sentences = [
        case
        for case in read_cases("subjects")
        if case.kind in ("the answer as the subject", "phrases of the question")
    ]
    assert len(sentences) >= len(read_cases("subjects")) // 3


def test_math_accepts_no_wrong_answer_of_the_first_table_and_every_right_one():
    verifier = get_verifier("math")
    misjudged = [
        case.response
        for case in read_cases()
        if (verifier(Problem("1", case.question, case.truth), case.response).correct is True)
        != case.expected
    ]
    assert misjudged == []


@pytest.mark.parametrize("kind", KINDS)
def test_math_accepts_no_wrong_answer_of_a_kind_and_every_right_one_but_those_named(kind):
    verifier = get_verifier("math")
    accepted_wrong = []
    refused_right = []
    named = []
    for case in (case for name in BY_KIND for case in read_cases(name) if case.kind == kind):
        accepted = verifier(Problem("1", case.question, case.truth), case.response).correct is True
        if accepted and not case.expected:
            accepted_wrong.append((case.truth, case.response))
        if case.expected and not accepted:
            refused_right.append((case.truth, case.response))
        named += [(case.truth, case.response)] if case.expected and is_named(case) else []
    assert (accepted_wrong, refused_right) == ([], named)


# the numbers of a family are any numbers

NUMBERS = st.fractions(max_denominator=10**6).filter(bool)


def latex(number: Fraction) -> str:
    sign = "-" if number < 0 else ""
    return f"{sign}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


@given(number=NUMBERS, factor=st.integers(2, 50))
def test_every_form_of_a_fraction_is_its_value_and_a_neighbour_is_not(number, factor):
    truth = latex(number)
    unreduced = f"{number.numerator * factor}/{number.denominator * factor}"
    for text in (truth, f"x = {truth}", f"{number.numerator}/{number.denominator}", f"${truth}$"):
        assert verdict(truth, f"Answer: {text}"), text
    if number.denominator > 1:
        assert verdict(truth, f"Answer: {unreduced}")
    for other in (-number, number + Fraction(1, 10**9), number * 2):
        assert not verdict(truth, f"Answer: {latex(other)}"), other


@given(digits=st.integers(1, 10**12), exponent=st.integers(-40, 40))
def test_a_decimal_of_any_size_is_compared_exactly(digits, exponent):
    truth = f"{Decimal(digits).scaleb(exponent):f}"
    first = str(digits)[0]
    rest = str(digits)[1:]
    mantissa = f"{first}.{rest}" if rest else first
    if power := exponent + len(rest):
        assert verdict(truth, f"Answer: {mantissa} \\times 10^{{{power}}}")
    assert verdict(truth, f"Answer: {truth}")
    assert not verdict(truth, f"Answer: {Decimal(digits + 1).scaleb(exponent):f}")
    assert not verdict(truth, f"Answer: {Decimal(digits).scaleb(exponent + 1):f}")
    assert not verdict(truth, f"Answer: -{truth}")
    assert not verdict(truth, "Answer: 0")


@given(first=st.integers(2, 10**6), second=st.integers(2, 10**6))
def test_an_operation_is_paid_only_for_the_value_behind_its_equals_sign(first, second):
    for sign, value in (("+", first + second), ("\\times", first * second), ("-", first - second)):
        question = f"{first} {sign} {second}"
        assert not verdict(str(value), f"Answer: {question}")
        assert verdict(str(value), f"Answer: ${question} = {value}$")
        assert not verdict(str(value), f"Answer: ${question} = {value + 1}$")


@given(values=st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), data=st.data())
def test_a_list_is_right_in_any_order_and_wrong_with_an_element_more_or_less(values, data):
    truth = ", ".join(map(str, values))
    shuffled = data.draw(st.permutations(values))
    assert verdict(truth, "Answer: " + ", ".join(map(str, shuffled)))
    assert not verdict(truth, "Answer: " + ", ".join(map(str, shuffled[1:])))
    assert not verdict(truth, "Answer: " + ", ".join(map(str, [*shuffled, 100])))
    pair = f"({truth})"
    assert verdict(pair, f"Answer: ({', '.join(map(str, shuffled))})") == (shuffled == values)


def test_plain_math_verify_runs_as_the_report_uses_it():
    cases = [case for case in read_cases() if case.truth == "\\frac{3}{4}"][:4]
    verdicts, _ = judge(cases, "benchmarks.verifier_report:math_verify_as_documented", {})
    assert [verdict.error for verdict in verdicts] == [None] * 4
    assert verdicts[0].correct is True
