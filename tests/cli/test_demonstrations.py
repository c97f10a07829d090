"""`dapo data demonstrations`: right responses of runs and evaluations, chosen, decontaminated and
read back.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dapo.cli.train import start_run
from dapo.config.data_spec import parse_spec
from dapo.data.demonstrations import load_demonstrations, turns_of
from dapo.runs.rollout_table import iterate_rows
from helpers.commands import run
from helpers.tiny_runs import tiny

DATA = "data.train={builtin: {sums: {}}, size: 11, seed: 1}"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "a"
    config = tiny(
        DATA,
        "reward.verifier=dapo.rewards.examples:has_digit",
        "rollout.max_response_tokens=24",
        "overlong.mode=off",
        "train.num_steps=4",
        "train.eval_every=2",
        "data.eval={builtin: {sums: {}}, size: 20, seed: 5}",
        "eval.top_p=1",
        "eval.max_response_tokens=80",
    )
    start_run(config, run_dir=path, config_name="t")
    return path


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(run_dir.glob("rollouts/*")) for row in iterate_rows(path)]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_problem_gives_its_shortest_right_responses_that_ended(
    judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "sft.jsonl"
    code, text, _ = run(
        capsys,
        "data",
        "demonstrations",
        str(judged),
        "--output",
        str(output),
        "--per-problem",
        "2",
        "--json",
    )
    assert code == 0
    expected: dict[str, dict[str, int]] = {}
    for row in rows_of(judged):
        if row["correct"] and row["finish"] == "stop":
            expected.setdefault(row["question"], {}).setdefault(
                row["response"], row["response_tokens"]
            )
    found: dict[str, list[str]] = {}
    for row in read(output):
        found.setdefault(row["prompt"], []).append(row["response"])
    assert found.keys() == expected.keys()
    for question, responses in found.items():
        lengths = sorted(expected[question].values())
        assert [expected[question][response] for response in responses] == lengths[:2]
    counts = json.loads(text)["counts"]
    removed = sum(count for name, count in counts.items() if name.startswith("removed_"))
    assert counts["responses"] == len(rows_of(judged)) == removed + counts["written"]
    demonstrations, _ = load_demonstrations(parse_spec(str(output)))
    assert [(each.question, each.answer) for each in demonstrations] == [
        (r["prompt"], r["response"]) for r in read(output)
    ]


def test_the_other_columns_of_a_problem_stay_and_those_for_the_template_are_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    columns = {
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"enable_thinking": False},
        "level": 3,
        "response": "what someone else has answered",
        "system": "what the policy was not told",
        "system_prompt": "nor this",
        "label": False,
        "ground_truth": {"low": 1.5, "tags": ["a"]},
    }
    problems = [{"prompt": f"{n} + 1?", "answer": str(n + 1), **columns} for n in range(4)]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems))
    judged = tmp_path / "run"
    config = tiny(
        f"data.train={data}",
        "data.eval=null",
        "reward.verifier=helpers.reward_functions:length",
        "rollout.max_response_tokens=64",
        "overlong.mode=off",
        "train.num_steps=1",
        "train.eval_every=0",
    )
    start_run(config, run_dir=judged, config_name="t")
    output = tmp_path / "sft.jsonl"
    options = ["--min-score", "0", "--output", str(output)]
    assert run(capsys, "data", "demonstrations", str(judged), *options)[0] == 0
    rows = read(output)
    assert rows
    left_out = ("response", "system", "system_prompt", "label")
    kept = {name: columns[name] for name in columns if name not in left_out}
    for row in rows:
        assert {name: row[name] for name in kept} == kept
        assert row["response"] != columns["response"]
        assert not {"system", "system_prompt", "label"} & row.keys()
        assert row["answer"] == str(int(row["prompt"].split()[0]) + 1)
    for demonstration in load_demonstrations(parse_spec(str(output)))[0]:
        names = ("tools", "chat_template_kwargs")
        assert demonstration.fields == {name: columns[name] for name in names}


def test_random_choice_follows_from_the_seed_and_not_from_the_order_of_the_files(
    judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        output = tmp_path / f"{number}.jsonl"
        options = ["--choose", "random", "--seed", str(seed), "--output", str(output)]
        assert run(capsys, "data", "demonstrations", str(judged), *options)[0] == 0
        found.append(read(output))
    assert found[0] == found[1] != found[2]


def test_an_evaluation_is_a_source_and_held_out_problems_are_removed_and_counted(
    judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    evaluation = sorted(judged.glob("eval/*.json"))[-1]
    assert run(capsys, "data", "demonstrations", str(evaluation), "--output", str(output))[0] == 0
    right = {
        row["question"]
        for row in json.loads(evaluation.read_text())["table"]
        if any(each["correct"] and each["finish"] == "stop" for each in row["responses"])
    }
    assert {row["prompt"] for row in read(output)} == right
    options = ["--output", str(output), "--force", "--against", str(output), "--json"]
    code, text, error = run(capsys, "data", "demonstrations", str(evaluation), *options)
    assert code != 0
    assert "nothing would be written: all problems are held out" in text + error
    assert read(output)  # unchanged
    code, text, _ = run(
        capsys,
        "data",
        "demonstrations",
        str(judged),
        str(evaluation),
        "--output",
        str(output),
        "--force",
        "--json",
    )
    assert code == 0
    assert json.loads(text)["counts"]["removed_held_out"] == len(right)
    assert not {row["prompt"] for row in read(output)} & right


def test_episodes_become_conversations_with_every_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(
        "environment=helpers.environments:Digits",
        "environment.max_observation_tokens=24",
        "rollout.max_response_tokens=48",
        "reward.verifier=auto",
        "overlong.mode=off",
        "data.eval=null",
    )
    start_run(config, run_dir=tmp_path / "e", config_name="t")
    output = tmp_path / "sft.jsonl"
    assert (
        run(
            capsys,
            "data",
            "demonstrations",
            str(tmp_path / "e"),
            "--min-score",
            "-99",
            "--output",
            str(output),
        )[0]
        == 0
    )
    for row, each in zip(
        read(output), load_demonstrations(parse_spec(str(output)))[0], strict=True
    ):
        assert row["messages"][0]["role"] == "user"
        assert list(turns_of(each)) == row["messages"][1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere", "--output", "a.jsonl"],
            "nowhere: there is no such run or result of dapo eval",
        ),
        (["RUN", "--output", "a.csv"], "a.csv"),
        (
            ["RUN", "--output", "a.jsonl", "--min-score", "1e9"],
            "nothing would be written: no response is right",
        ),
        (["RUN", "--output", "no/a.jsonl"], "there is no directory no"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(
    arguments: list[str],
    message: str,
    judged: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, error = run(
        capsys, "data", "demonstrations", *[str(judged) if a == "RUN" else a for a in arguments]
    )
    assert code != 0
    assert message in text + error
    assert not (tmp_path / "a.jsonl").exists()
