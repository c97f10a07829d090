"""A table of cases as one test: every case runs, and the one that fails is named."""

import inspect

import pytest

from helpers.tables import for_each_row


def test_every_case_runs_with_the_fixtures_of_the_test():
    seen = []

    @for_each_row("number", range(3))
    @for_each_row(("name", "flag"), [("a", True), ("b", False)])
    def record(capsys: str, number: int, name: str, flag: bool) -> None:
        seen.append((capsys, number, name, flag))

    assert list(inspect.signature(record).parameters) == ["capsys"]
    record(capsys="a fixture")
    names = (("a", True), ("b", False))
    assert seen == [("a fixture", number, *each) for number in range(3) for each in names]


def test_the_error_names_the_case_that_fails():
    @for_each_row("number", [1, 2, 3])
    def is_not_two(number: int) -> None:
        assert number != 2

    with pytest.raises(pytest.fail.Exception, match=r"1 of 3 rows fail\n\(2,\)\n  AssertionError"):
        is_not_two()


def test_no_case_goes_unnoticed():
    with pytest.raises(AssertionError):
        for_each_row("number", [])

    @for_each_row("number", [1, 2])
    def skip(number: int) -> None:
        pytest.skip("not here")

    with pytest.raises(pytest.fail.Exception, match=r"2 of 2 rows fail\n\(1,\)\n  skips: not here"):
        skip()
