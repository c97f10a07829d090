"""The examples run: notebooks from the first cell to the last, scripts with a tiny model in place
of theirs.
"""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from peft import PeftConfig

from dapo.config.data_spec import parse_spec
from dapo.data.problems import load_problems
from dapo.rewards.verifiers.code import CodeVerifier
from examples import code_reward, graded_reward, gsm8k, guess_number, lora
from helpers.paths import ROOT

NOTEBOOKS = ("first_run", "gsm8k", "own_data_and_reward", "own_environment", "own_loss")
TINY: dict[str, Any] = {
    "model": "tiny-random",
    "steps": 1,
    "prompts_per_step": 2,
    "group_size": 4,
    "threads": 1,
}
TINY |= {"max_response_tokens": 8, "workers": 1, "minibatch_groups": 2}
EVERY_GROUP = {"dynamic_sampling.enabled": False}  # a model of random weights solves none of these
PROGRAMS = {
    "add": "def add(a, b):\n    return a + b",
    "last": "def last(items):\n    return items[-1]",
    "is_even": "def is_even(n):\n    return n % 2 == 0",
    "double": "def double(items):\n    return [2 * item for item in items]",
    "count": "def count(text, letter):\n    return text.count(letter)",
    "reverse": "def reverse(text):\n    return text[::-1]",
    "largest": "def largest(items):\n    return max(items)",
    "square": "def square(n):\n    return n * n",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def notebook(name: str) -> Any:
    return nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_outputs_and_says_how_the_tests_run_it(name: str) -> None:
    found = notebook(name)
    nbformat.validate(found)
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert "`DAPO_EXAMPLE=tiny` in the environment" in found.cells[0].source
    assert 'os.environ.get("DAPO_EXAMPLE") == "tiny"' in code[0].source


def test_all_notebooks_run_from_the_first_cell_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one kernel for all, which saves two imports of torch; each notebook begins without the names
    # of the one before
    together = nbformat.v4.new_notebook()
    for name in NOTEBOOKS:
        together.cells += [*notebook(name).cells, nbformat.v4.new_code_cell("%reset -f")]
    monkeypatch.setenv("DAPO_EXAMPLE", "tiny")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = NotebookClient(
        together, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(str(error))
    outputs = [
        output for cell in together.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    shown = "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs
    )
    assert "image/png" in {kind for output in outputs for kind in output.get("data", {})}
    assert "the loss is not a sum over tokens" in shown
    # that of GSM8K trains twice
    assert len(list((tmp_path / "runs").iterdir())) == len(NOTEBOOKS) + 1
    assert (tmp_path / "my-model" / "config.json").is_file()


def test_the_script_with_a_graded_reward_trains_on_scores() -> None:
    assert graded_reward.near_twelve_words(["one two three", "a " * 12, "a " * 30, ""]) == [
        0.25,
        1.0,
        0.4,
        1 / 12,
    ]
    run = graded_reward.train(**TINY)
    assert 0 < run.metrics["reward/score_mean"].iloc[0] < 1
    # short answers of random letters are mostly one word
    assert run.metrics["rollout/groups_trained"].iloc[0] >= 1


def test_the_script_with_a_game_rewards_guesses_that_follow_the_hints_and_runs() -> None:
    game = guess_number.GuessNumber()
    assert "from 1 to 20" in game.reset(None, seed=6)
    answers = [game.step(guess) for guess in ("10", "12", "none", "7")]
    assert [each.reward for each in answers] == [0.2, 0.0, -1.0, 1.0]
    assert answers[2] == game.end()  # no answer is worth less than one that is cut
    assert [each.observation for each in answers[:2]] == [
        f"My number is lower than {n}." for n in (10, 12)
    ]
    assert (answers[3].done, answers[3].correct) == (True, None)
    run = guess_number.train(**TINY, **EVERY_GROUP)
    messages = guess_number.conversation(run)
    assert [message["role"] for message in messages[:2]] == ["assistant", "user"]


def test_the_script_with_adapters_trains_and_exports_them(tmp_path: Path) -> None:
    run = lora.train(**TINY, reward="dapo.rewards.examples:has_digit")
    path = run.export(tmp_path / "adapter", adapter=True)
    assert PeftConfig.from_pretrained(path).r == 16


def test_the_script_with_a_code_reward_accepts_right_programs_and_runs(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in code_reward.ROWS))
    verifier = CodeVerifier()
    for problem, program in zip(
        load_problems(parse_spec(str(file))), PROGRAMS.values(), strict=True
    ):
        assert verifier(problem, f"```python\n{program}\n```").correct is True, program
    run = code_reward.train(**TINY, **EVERY_GROUP)
    assert run.metrics[["reward/accuracy", "rollout/verifier_errors"]].to_numpy().tolist() == [
        [0.0, 0.0]
    ]


def test_the_script_for_gsm8k_is_its_shipped_configuration() -> None:
    rows = [
        {"question": f"{n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(4)
    ]
    run = gsm8k.train(**TINY, **EVERY_GROUP, data=rows, **{"data.eval": None, "buffer_tokens": 2})
    assert run.config.reward.verifier == "gsm8k"
    assert run.config.data.instruction.startswith("Think step by step")
    assert run.metrics["rollout/verifier_errors"].tolist() == [0]
