"""A table of cases as one test: every case runs, and the one that fails is named."""

import inspect

import pytest

from helpers.loops import loop_over


def test_every_case_runs_with_the_fixtures_of_the_test():
    seen = []

    @loop_over("number", range(3))
    @loop_over(("name", "flag"), [("a", True), ("b", False)])
    def record(capsys: str, number: int, name: str, flag: bool) -> None:
        seen.append((capsys, number, name, flag))

    assert list(inspect.signature(record).parameters) == ["capsys"]
    record(capsys="a fixture")
    names = (("a", True), ("b", False))
    assert seen == [("a fixture", number, *each) for number in range(3) for each in names]


def test_the_error_names_the_case_that_fails():
    @loop_over("number", [1, 2, 3])
    def is_not_two(number: int) -> None:
        assert number != 2

    with pytest.raises(AssertionError) as caught:
        is_not_two()
    assert caught.value.__notes__ == ["in the case {'number': 2}"]


def test_no_case_goes_unnoticed():
    with pytest.raises(AssertionError):
        loop_over("number", [])

    @loop_over("number", [1, 2])
    def skip(number: int) -> None:
        pytest.skip("not here")

    with pytest.raises(AssertionError, match=r"the case \{'number': 1\} skips"):
        skip()
