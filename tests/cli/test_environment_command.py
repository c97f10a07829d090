"""`dapo test ENVIRONMENT`: the rewards of nonsense, and environments that are not deterministic."""

import json
import linecache
from typing import Any

import pytest

import dapo
from helpers import commands


def outcome_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = commands.run(capsys, "test", *arguments, "--json")
    return code, json.loads(out) if out else {"error": err}


def ends(found: dict[str, Any]) -> set[tuple[int, float, bool]]:
    """Turns, rewards and verdicts; of the two that are met, the shorter one is cut off."""
    return {(each["turns"], each["reward"], each["correct"]) for each in found["episodes"]}


def test_the_calculator_rewards_no_nonsense(capsys: pytest.CaptureFixture[str]):
    code, found = outcome_of(capsys, "calculator")
    assert (code, found["suspicious"], len(found["episodes"])) == (0, False, 10)
    assert {each["reward"] for each in found["episodes"]} == {-1.0}
    kinds = ["nothing", "random text", "a number"]
    assert [each["kind"] for each in found["episodes"]] == [*kinds, "cut off", *kinds, *kinds]


def test_the_rewards_of_all_turns_are_added(capsys: pytest.CaptureFixture[str]):
    code, found = outcome_of(capsys, "helpers.environments:Echo", "environment.options.turns=3")
    assert ends(found) == {(3, 6.0, True), (1, -0.5, False)}
    code, found = outcome_of(capsys, "helpers.environments:Echo", "environment.max_turns=2")
    # 1 + 2, less 0.5 at its end
    assert ends(found) == {(2, 2.5, False), (1, -0.5, False)}
    assert code == 0


def test_the_environment_of_a_run_is_played_also_one_that_was_typed_in_a_cell(tmp_path, capsys):
    source = (
        "from dapo.environments import StepResult\n\nclass Kind:\n    def reset(self, problem,"
        " seed):\n"
    )
    source += "        return 'Say something.'\n    def step(self, action):\n"
    source += "        return StepResult(reward=3.0, done=True)\n"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache["<kind>"] = (len(source), None, source.splitlines(keepends=True), "<kind>")
    exec(compile(source, "<kind>", "exec"), namespace)
    sizes: dict[str, Any] = {
        "steps": 1,
        "prompts_per_step": 2,
        "group_size": 2,
        "max_response_tokens": 8,
    }
    options: dict[str, Any] = {
        "dynamic_sampling.enabled": False,
        "threads": 1,
        "run_dir": tmp_path / "run",
    }
    dapo.train("tiny-random", data="environment", environment=namespace["Kind"], **sizes, **options)
    capsys.readouterr()
    code, found = outcome_of(capsys, str(tmp_path / "run"))
    assert (code, {each["reward"] for each in found["episodes"]}) == (0, {3.0, 0.0})
    code, found = outcome_of(capsys, str(tmp_path / "run"), "reward.workers=1")
    assert (code, "takes options of environment only" in found["error"]) == (2, True)


def test_two_plays_that_differ_are_named_and_end_with_1(capsys: pytest.CaptureFixture[str]):
    code, out, _ = commands.run(capsys, "test", "helpers.environments:Forgetful", "--verbose")
    assert (code, out.count("two plays differ")) == (1, 9)  # not the one that is cut
    assert out.startswith("9 of 10 episodes differ when they are repeated")
    assert "the environment is not deterministic" in out
    assert outcome_of(capsys, "helpers.environments:Dice")[0] == 0


def test_an_environment_that_fails_ends_with_1_and_its_reason(capsys: pytest.CaptureFixture[str]):
    code, found = outcome_of(capsys, "helpers.environments:Broken")
    assert code == 1
    assert all(
        "ConnectionError: the game server is down" in each["error"] for each in found["episodes"]
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["calculato"], "no verifier, environment or run is named calculato; did you mean calc"),
        (["calculato", "--environment"], "there is no such environment"),
        (["calculator", "optim.lr=1"], "takes options of environment only"),
        (["calculator", "--answer", "3"], "--answer and --right are for rewards"),
        (["calculator", "--reward", "--environment"], "contradict each other"),
    ],
)
def test_what_cannot_be_tested_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
):
    code, found = outcome_of(capsys, *arguments)
    assert (code, expected in found["error"]) == (2, True)
