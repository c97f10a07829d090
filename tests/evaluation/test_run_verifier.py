"""An evaluation keeps the verifier of the run, whatever its problems are; one that cannot judge
them is an error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.cli.train import start_run
from dapo.core.errors import DataError, RewardError
from helpers.commands import run as run_command
from helpers.tiny_runs import tiny

ONCE: Any = {"eval.temperature": 0, "samples_per_problem": 1}
FINAL = ("reward.verifier=exact", "reward.options.extract=final")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on built-in problems, which `exact` judges."""
    path = tmp_path_factory.mktemp("runs") / "trained"
    start_run(
        tiny("train.num_steps=1", "dynamic_sampling.enabled=false", *FINAL),
        run_dir=path,
        config_name="t",
    )
    return path


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers_of(run: Path) -> list[dict[str, str]]:
    """Questions, each with the answer that the run's model gives at temperature 0."""
    questions = [{"prompt": f"{a} + 1 =", "answer": "?"} for a in range(3)]
    table = dapo.load(run).evaluate(questions, **ONCE).table
    return [
        {"prompt": each["prompt"], "answer": responses[0]["text"]}
        for each, responses in zip(questions, table["responses"], strict=True)
    ]


def test_a_runs_model_is_not_told_how_to_mark_answers_and_a_base_model_is(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{a} + 1 =", "answer": f"{a + 1}"} for a in range(3)]
    file = write(tmp_path / "q.jsonl", *rows)
    options = ("--samples-per-problem", "1", "reward.verifier=gsm8k")
    is_told = {}
    for model in (str(trained), "tiny-random"):
        _, out, err = run_command(capsys, "eval", model, "--data", str(file), *options)
        is_told[model] = "reads an answer marked by" in " ".join((out + err).split())
    assert is_told == {str(trained): False, "tiny-random": True}


def test_a_run_of_exact_answers_is_right_about_a_file_of_its_own_answers(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = answers_of(trained)
    file = write(tmp_path / "q.jsonl", *rows)
    code, out, err = run_command(
        capsys, "eval", str(trained), "--data", str(file), "--json", "eval.temperature=0"
    )
    found = json.loads(out)
    assert (code, found["verifier"], found["accuracy"]) == (0, "exact", 1.0), err
    assert found["step"] == 1
    from_python = dapo.load(trained).evaluate(rows, **ONCE)
    assert from_python.accuracy == 1.0
    same = dapo.load(trained).compare("tiny-random", rows, **ONCE)
    assert (same.first.summary["verifier"], same.second.summary["verifier"]) == ("exact", "exact")


def test_of_two_runs_with_different_verifiers_the_first_one_judges_both(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "other"
    options = ("reward.verifier=regex", r"reward.options.pattern=(\d+)")
    start_run(
        tiny("train.num_steps=1", "dynamic_sampling.enabled=false", *options),
        run_dir=other,
        config_name="t",
    )
    rows = write(tmp_path / "q.jsonl", {"prompt": "2 + 2 =", "answer": "4"})
    found = dapo.load(other).compare(trained, rows, **ONCE)
    assert (found.first.summary["verifier"], found.second.summary["verifier"]) == ("exact", "exact")
    assert (
        f"the verifier of {trained} judges both (exact); {other} was trained with regex"
        in capsys.readouterr().out
    )


def test_a_verifier_that_cannot_judge_the_problems_is_an_error_that_names_the_way_to_another(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    advice = (
        'another one judges with reward.verifier=NAME, in Python with reward={"verifier": "NAME"}'
    )
    no_answers = write(tmp_path / "q.jsonl", {"prompt": "2 + 2 ="}, {"prompt": "3 + 2 ="})
    code, _, err = run_command(capsys, "eval", str(trained), "--data", str(no_answers))
    assert (code, advice in err, "no answer" in err) == (2, True, True)
    assert "An evaluation keeps the run's verifier, here exact" in err
    with pytest.raises(DataError, match="no data file") as missing:
        dapo.load(trained).evaluate(tmp_path / "none.jsonl")
    assert advice not in str(missing.value)
    named = dapo.load(trained).evaluate(
        no_answers, reward={"verifier": "regex", "options": {"pattern": "x"}}
    )
    assert named.summary["verifier"] == "regex"


@pytest.mark.parametrize(
    ("verifier", "lacks"),
    [
        ("gym", "has no field gym_task"),
        ("code", "can judge no response to 1 of 1 rows"),
        ("json_schema", "can judge no response to 1 of 1 rows"),
        ("my_reward:by_column", "needs limit, which row 1"),
    ],
)
def test_each_verifier_that_reads_columns_is_refused_where_they_are_missing(
    verifier: str, lacks: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The options of the run name it; the rows are only a question and its answer."""
    if verifier == "gym":
        pytest.importorskip("reasoning_gym")
    (tmp_path / "my_reward.py").write_text(
        "def by_column(completions, limit):\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    rows = write(tmp_path / "rows.jsonl", {"prompt": "2 + 2 =", "answer": "{"})
    run = dapo.load(trained)
    with pytest.raises((DataError, RewardError), match=lacks):
        run.evaluate(rows, reward={"verifier": verifier})
