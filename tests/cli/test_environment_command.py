"""`dapo environment test`: what nonsense is paid, and which environments are no function of seed and actions."""

import json
from typing import Any

import pytest

from helpers import commands


def outcome_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = commands.run(capsys, "environment", "test", *arguments, "--json")
    return code, json.loads(out) if out else {"error": err}


def test_the_calculator_rewards_no_nonsense(capsys: pytest.CaptureFixture[str]):
    code, found = outcome_of(capsys, "calculator")
    assert (code, found["suspicious"], len(found["episodes"])) == (0, False, 10)
    assert {each["paid"] for each in found["episodes"]} == {-1.0}
    assert {each["kind"] for each in found["episodes"]} == {"nothing", "random text", "a number"}


def test_the_rewards_of_all_turns_are_added(capsys: pytest.CaptureFixture[str]):
    code, found = outcome_of(capsys, "helpers.environments:Echo", "environment.options.turns=3")
    assert {(each["turns"], each["paid"], each["correct"]) for each in found["episodes"]} == {(3, 6.0, True)}
    code, found = outcome_of(capsys, "helpers.environments:Echo", "environment.max_turns=2")
    assert {(each["paid"], each["correct"]) for each in found["episodes"]} == {
        (2.5, False)
    }  # 1 + 2, less 0.5 at its end
    assert code == 0


def test_two_plays_that_differ_are_named_and_end_with_1(capsys: pytest.CaptureFixture[str]):
    code, out, _ = commands.run(capsys, "environment", "test", "helpers.environments:Forgetful")
    assert (code, out.count("two plays differ")) == (1, 10)
    assert "the environment is no function of its seed and its actions" in out
    assert outcome_of(capsys, "helpers.environments:Dice")[0] == 0


def test_an_environment_that_fails_ends_with_1_and_its_reason(capsys: pytest.CaptureFixture[str]):
    code, found = outcome_of(capsys, "helpers.environments:Broken")
    assert code == 1
    assert all("ConnectionError: the game server is down" in each["error"] for each in found["episodes"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["calculato"], "there is no such environment"),
        (["calculator", "optim.lr=1"], "takes options of environment only"),
    ],
)
def test_what_cannot_be_tested_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str):
    code, found = outcome_of(capsys, *arguments)
    assert (code, expected in found["error"]) == (2, True)
