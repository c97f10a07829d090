"""`math` on the committed table of judged cases; `make verifier-report` prints it beside the other verifiers."""

from benchmarks.verifier_report import read_cases
from dapo.rewards import get_verifier
from dapo.types import Problem


def test_the_table_is_as_described():
    cases = read_cases()
    assert len(cases) >= 200
    assert len({(case.truth, case.response) for case in cases}) == len(cases)
    assert sum(case.expected for case in cases) > 150
    assert sum(not case.expected for case in cases) > 150
    assert all(case.why for case in cases)


def test_math_accepts_no_wrong_answer_and_every_right_one():
    verifier = get_verifier("math")
    misjudged = {
        case.response
        for case in read_cases()
        if (verifier(Problem("1", "Q", case.truth), case.response).correct is True) != case.expected
    }
    assert misjudged == set()
