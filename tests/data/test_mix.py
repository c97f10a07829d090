"""Several sources in one data spec: their problems, their names, and a run on them."""

import json
from pathlib import Path

import pytest

from dapo.cli.train import start_run
from dapo.config import build_config, load_config
from dapo.core.errors import DataError
from dapo.data.problems import load_problems
from dapo.evaluation.scores import evaluation_plan
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from helpers.tiny_runs import logged_names, tiny

MIX = {
    "mix": {
        "easy": {"builtin": {"sums": {"high": 9}}, "size": 5},
        "hard": {"builtin": {"sums": {"terms": 5}}, "size": 3},
    }
}


def test_problems_alternate_between_the_parts_and_have_their_names_as_source():
    found = load_problems(MIX)
    assert [problem.source for problem in found] == [
        "easy",
        "hard",
        "easy",
        "hard",
        "easy",
        "hard",
        "easy",
        "easy",
    ]
    alone = load_problems(MIX["mix"]["hard"])
    assert [problem.id for problem in found if problem.source == "hard"] == [
        problem.id for problem in alone
    ]


def test_training_and_evaluation_have_no_question_in_common_in_any_part():
    train, held_out = (load_problems(MIX, split=split) for split in ("train", "eval"))
    assert not {problem.id for problem in train} & {problem.id for problem in held_out}


def test_a_problem_of_two_parts_belongs_to_the_first(tmp_path: Path):
    for name, questions in (("a", "12"), ("b", "23")):
        rows = [{"prompt": f"What is {question}?", "answer": question} for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_problems({"mix": {name: str(tmp_path / f"{name}.jsonl") for name in "ab"}})
    assert [(problem.answer, problem.source) for problem in found] == [
        ("1", "a"),
        ("2", "a"),
        ("2", "a"),
        ("3", "b"),
    ]


def test_the_verifier_is_that_of_all_parts_or_must_be_set():
    def config(train: object, *overrides: str):
        return build_config({"model": "tiny-random", "data": {"train": train}}, list(overrides))

    assert config(MIX).auto_verifier == ("exact", {"extract": "final"})
    assert config(MIX, "environment.name=calculator").auto_verifier == ("environment", {})
    both = {"mix": {"a": "builtin:sums", "b": "gym:gcd"}}
    with pytest.raises(
        DataError, match=r"of different verifiers \(exact, gym\); set reward.verifier"
    ):
        _ = config(both).auto_verifier
    with pytest.raises(DataError, match=r"data.train.*different verifiers"):
        tiny("reward.verifier=auto", f"data.train={json.dumps(both)}", "audit.verifier=math")


def test_a_run_on_a_mix_measures_each_part_and_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = tmp_path / "here"
    there = tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(20)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(here)
    train = "data.train={mix: {file: rows.jsonl, sums: {builtin: sums, size: 20}}}"
    config = tiny(train, f"data.eval={json.dumps(MIX)}", "train.num_steps=1")
    assert evaluation_plan(config, ()).name == "easy+hard"
    run = tmp_path / "run"
    start_run(config, run_dir=run, config_name="tiny")
    names = logged_names(run)
    assert {
        "eval/easy/accuracy",
        "eval/hard/accuracy",
        "eval/easy+hard/accuracy",
        "eval/easy+hard/low",
    } <= names
    monkeypatch.chdir(there)
    assert load_run_config(RunDirectory.open(run)).data.train["mix"]["file"] == str(
        here / "rows.jsonl"
    )
    assert load_config(run / "config.yaml").data.train["mix"]["file"] == "rows.jsonl"
