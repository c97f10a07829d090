"""Rows that a verifier can judge no response to are found before a run begins, with their
numbers.
"""

import itertools
import json

import pytest

from dapo.cli.main import main
from dapo.config import load_config
from dapo.core.errors import RewardError
from dapo.rewards.data_check import unusable_rows, warnings_about_rows
from dapo.types import Problem
from helpers.tiny_runs import inputs_of


def problems(*answers, **fields):
    return [Problem(str(row), "Q", answer, fields=fields) for row, answer in enumerate(answers, 1)]


def test_the_rows_are_numbered_from_one_and_the_first_reason_is_shown():
    (found,) = unusable_rows(
        problems("A", "Z", "(B)", "C", "AB", "D", *"123456"), "choice", {"letters": "ABC"}
    )
    assert list(found.reasons) == [2, 5, 6, 7, 8, 9, 10, 11, 12]
    assert (
        str(found) == "choice can judge no response to 9 of 12 rows (rows 2, 5, 6, 7, 8, ...); "
        "row 2: the reference 'Z' is not one of the letters ABC"
    )


@pytest.mark.parametrize(
    ("verifier", "options", "good", "bad"),
    [
        ("exact", {}, "4", " "),
        ("exact", {"extract": "last_number"}, "4", "four"),
        ("gsm8k", {}, "2 + 2 = 4 #### 4", "four"),
        ("math", {}, r"so it is $\boxed{4}$ feet.", "She pays.\n\nThus Ann has 8 apples."),
        ("math_dapo", {}, r"\frac{1}{2}", "She pays.\n\nThus Ann has 8 apples."),
        ("regex", {}, r"\d+", "(" ),
        ("regex", {"pattern": r"x = (\d+)"}, "4", ""),
        ("code", {}, "assert f(1) == 2", "f(1)"),
    ],
)  # fmt: skip
def test_each_verifier_names_the_rows_that_it_cannot_judge(verifier, options, good, bad):
    (found,) = unusable_rows(problems(good, bad), verifier, options)
    assert list(found.reasons) == [2]
    assert unusable_rows(problems(good, good), verifier, options) == []


def test_a_reward_of_several_verifiers_says_it_of_each():
    lines = warnings_about_rows(
        problems("1", "x", "A"), {"gsm8k": 1.0, "choice": 0.5}, {}, where="data.train"
    )
    assert [line.partition(" can ")[0] for line in lines] == [
        "data.train: gsm8k",
        "data.train: choice",
    ]


def test_a_data_set_of_which_no_row_can_be_judged_is_refused():
    with pytest.raises(
        RewardError, match=r"data\.train: gsm8k can judge no response to 2 of 2 rows \(rows 1, 2\)"
    ):
        warnings_about_rows(problems("x", "y"), "gsm8k", {}, where="data.train")


CONFIG = (
    "model: tiny-random\ndata: {{train: {}}}\nreward: {{verifier: code}}\n"
    "rollout: {{max_response_tokens: 20}}\noverlong: {{mode: 'off'}}\n"
)


@pytest.mark.parametrize("tick", [0.0, 1.0])
def test_when_the_time_for_checking_is_over_the_rest_of_the_rows_is_left_out(tick, monkeypatch):
    """A clock of processor time advances in steps of 10 ms on some machines: it may stand still for
    the whole check.
    """
    clock = itertools.count()
    monkeypatch.setattr("dapo.rewards.data_check.time.process_time", lambda: next(clock) * tick)
    (found,) = unusable_rows(problems("x", "y", "3", "z"), "gsm8k", {}, time_s=0)
    assert list(found.reasons) == [1, 2]
    assert str(found).startswith(
        "gsm8k can judge no response to 2 of the first 3 of 4 rows (rows 1, 2)"
    )


def exit_code(*arguments):
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code
    return 0


@pytest.fixture
def code_data(tmp_path):
    """A function from tests to a file of rows with them."""

    def write(*tests):
        path = tmp_path / "code.jsonl"
        rows = [
            {"prompt": f"Write add(a, b). {row}", "answer": "see tests", "tests": each}
            for row, each in enumerate(tests)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_stats_and_check_and_the_start_of_a_run_name_the_rows(code_data, tmp_path, capsys):
    data = code_data("assert add(1, 2) == 3", "add(1, 2)", "assert add(2, 2) == 4")
    expected = "code can judge no response to 1 of 3 rows (row 2)"
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(data))
    assert exit_code("data", "stats", data) == 0
    assert f"warning: {expected}" in capsys.readouterr().out
    assert exit_code("check", config) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"warning: data.train: {expected}" in shown
    assert inputs_of(load_config(config, [])).notes == [
        f"data.train: {expected}; row 2: its tests run no assertion on a value of the program"
    ]
    assert exit_code("data", "stats", data, "reward.verifier=math") == 0
    assert "code can judge" not in capsys.readouterr().out


def test_a_run_on_data_without_one_usable_row_is_refused_before_it_begins(
    code_data, tmp_path, capsys
):
    data = code_data("add(1, 2)", "x = 1")
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(data))
    for command in (["train", "--run-dir", tmp_path / "run"], ["check"]):
        assert exit_code(command[0], config, *command[1:]) == 2
        assert (
            "error: data.train: code can judge no response to 2 of 2 rows (rows 1, 2); row 1: its"
            " tests" in (capsys.readouterr().err)
        )
    assert not (tmp_path / "run").exists()
