"""Verifiers by name: what is found, and what is said of what is not."""

import subprocess
import sys

import pytest

from dapo.core.errors import RewardError
from dapo.rewards import get_verifier
from dapo.types import Problem
from helpers.tables import for_each_row

PROBLEM = Problem("1", "What is 6 * 7?", "42")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A temporary current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["exact", "gsm8k", "math", "math_dapo"])
def test_every_registered_verifier_distinguishes_right_from_wrong(name):
    verifier = get_verifier(name, **({"extract": "answer_line"} if name == "exact" else {}))
    right = verifier(PROBLEM, "So:\nAnswer: 42")
    wrong = verifier(PROBLEM, "So:\nAnswer: 41")
    assert (right.correct, right.score, right.error) == (True, 1.0, None)
    assert (wrong.correct, wrong.score, wrong.error) == (False, -1.0, None)


@for_each_row(
    ("name", "options", "message"),
    [
        ("maths", {}, "unknown verifier 'maths'; did you mean math? known: choice, code, environment, exact, gsm8k,"),
        ("zzz", {}, "unknown verifier 'zzz'; known: choice"),
        ("exact", {"extrct": "none"}, "verifier exact has no option 'extrct'; it has extract, ignore_case"),
        ("exact", {"extract": "first"}, "one of none, answer_line, last_number, final, got 'first'"),
        ("exact", {"ignore_case": 3}, "exact: ignore_case must be true or false, got 3"),
        ("math", {"timeout": 3}, "verifier math has no option 'timeout'; it has none"),
        ("gsm8k", {"flexible": "yes"}, "gsm8k: flexible must be true or false, got 'yes'"),
        ("gym", {"partial_credit": 1}, "gym: partial_credit must be true or false, got 1"),
        (":f", {}, "':f': expected module:function"),
        ("m:", {}, "'m:': expected module:function"),
        ("no_such_module:f", {}, "'no_such_module:f': there is no module 'no_such_module' in /"),
        ("no.such.module:f", {}, "there is no module 'no.such.module'"),
        ("helpers.reward_functions:lenght", {}, "reward_functions has no 'lenght'; did you mean length?"),
        ("helpers.reward_functions:NOT_A_FUNCTION", {}, "NOT_A_FUNCTION' is not callable: it is a int"),
        ("helpers.reward_functions:stranger", {}, "takes (text, reference): expected (problem, response), or keywords"),
        ("helpers.reward_functions:positional", {}, "takes completions by position only"),
        ("builtins:max", {}, "'builtins:max' has no signature that Python can read"),
        ("helpers.reward_functions:tolerant", {"tolerence": 1}, "has no option 'tolerence'; it has tolerance"),
        ("helpers.reward_functions:scaled", {"completions": 1}, "'completions' is an argument of every call"),
        ("helpers.reward_functions:SameLoop", {"bonnus": 1}, "making one with bonnus raised TypeError:"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_its_cause_on_one_line(name, options, message):
    with pytest.raises(RewardError) as caught:
        get_verifier(name, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import surely_not_installed",
            "importing mine raised ModuleNotFoundError: No module named 'surely_not_inst",
        ),
        ("def f(:", "importing mine raised SyntaxError:"),
        ("1 / 0", "importing mine raised ZeroDivisionError: division by zero (mine.py, line 1)"),
        ("raise SystemExit('bye')", "importing mine raised SystemExit: bye (mine.py, line 1)"),
    ],
)
def test_a_module_that_fails_while_importing_is_refused_with_what_it_raised(
    directory, source, message
):
    (directory / "mine.py").write_text(source)
    with pytest.raises(RewardError) as caught:
        get_verifier("mine:f")
    assert message in str(caught.value)


def test_a_module_of_the_current_directory_is_found(directory):
    (directory / "my_rewards.py").write_text(
        "def even(problem, response):\n    return int(response) % 2 == 0\n"
    )
    assert get_verifier("my_rewards:even")(PROBLEM, "4").correct is True


def test_dots_name_packages_and_attributes(directory):
    (directory / "pack").mkdir()
    (directory / "pack" / "inner.py").write_text(
        "class Rules:\n    @staticmethod\n    def even(problem, response):\n        return"
        " int(response) % 2 == 0\n"
    )
    assert get_verifier("pack.inner:Rules.even")(PROBLEM, "3").correct is False


def test_the_table_says_which_verifiers_are_binary_without_importing_torch():
    script = (
        "import sys; from dapo.rewards.verifier import VERIFIERS, is_binary; print([n for n in"
        " VERIFIERS if not is_binary(n)], is_binary('m:f'), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['environment', 'gym', 'reward_model', 'server'] False False"


def test_importing_the_rewards_imports_neither_torch_nor_math_verify():
    script = (
        "import sys, dapo.rewards; print([m for m in ('torch', 'sympy', 'numpy', 'pydantic') if m"
        " in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
