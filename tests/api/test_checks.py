"""Looks before and after a run: `dapo.check`, `dapo.check_reward` and `dapo.compare`."""

from pathlib import Path
from typing import Any

import pytest

import dapo
from helpers.tables import for_each_row

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
SMALL: dict[str, Any] = {"prompts_per_step": 2, "group_size": 4, "max_response_tokens": 6}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def digits(completions: list[str], **columns: Any) -> list[bool]:
    return [any(map(str.isdigit, text)) for text in completions]


def test_a_call_is_checked_with_the_keywords_of_train_and_leaves_nothing(tmp_path: Path):
    check = dapo.check("tiny-random", data=ROWS, reward=digits, run_dir="x", sinks="wandb", **SMALL)
    assert check.ok
    assert "GiB" in check.verdict
    assert "--" not in check.verdict
    assert repr(check).startswith(check.verdict)
    assert check.verdict in check._repr_html_()
    facts = dict(zip(check.frame["about"], check.frame["fact"], strict=True))
    assert facts["train data"].startswith("8 problems, 8 distinct")
    assert "2 prompts, 8 responses" in facts["step"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        dapo.DataError, match=r"^data, row 1: no prompt; .*; rename yours to prompt$"
    ):
        dapo.check("tiny-random", data=[{"x": "1"}], **SMALL)


def test_a_reward_that_pays_for_digits_is_found_before_a_run():
    check = dapo.check_reward(digits, ROWS)
    assert not check.ok
    assert "are judged right though they are wrong" in check.verdict
    shown = repr(check).splitlines()
    assert shown[1].split() == ["response", "verdict", "score", "issues"]
    assert any("some number" in line for line in shown)
    assert set(check.frame["verdict"]) == {"correct", "wrong"}
    exact = dapo.check_reward("exact", ROWS)
    assert (exact.ok, exact.verdict[:18]) == (True, "nothing suspicious")


def test_runs_are_compared_with_the_first(sync_run: Path, lora_run: Path):
    result = dapo.compare(dapo.load(sync_run), lora_run)
    assert repr(result) == repr(dapo.compare([sync_run, str(lora_run)]))
    assert list(result.frame["run"]) == [str(sync_run), str(lora_run)]
    assert result.frame["pairs"][1] > 0
    difference = result.details[0].held_out["final"].difference["difference"]
    assert result.frame["difference"][1] == difference
    assert result.verdict.endswith(f"; a is {sync_run}, b is {lora_run}")
    assert "95 % interval" in result.verdict
    assert "<table" in result._repr_html_()


@for_each_row(
    ("call", "expected"),
    [
        (lambda: dapo.compare("a"), "expected two runs or more"),
        (lambda: dapo.compare("a", "b"), "a"),
        (lambda: dapo.check("tiny-random", train_dataset=ROWS), "train_dataset=ROWS is data=ROWS"),
        (lambda: dapo.check("tiny-random"), "data is missing"),
        (lambda: dapo.check_reward(3), "reward: expected a verifier's name"),
        (lambda: dapo.reward_test, "dapo.check_reward(FUNCTION, ROWS)"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(call: Any, expected: str):
    with pytest.raises((dapo.DapoError, AttributeError)) as refused:
        call()
    assert expected in str(refused.value)
