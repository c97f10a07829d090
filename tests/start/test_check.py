"""What a run checks before it reads the model: refusals and warnings."""

import json
import re
from pathlib import Path

import pytest

from dapo.analysis.check.summary import data_facts
from dapo.config import build_config
from dapo.config.load import resolve_auto_verifier
from dapo.core.errors import ConfigError
from dapo.start.check import check, read_data, require_model
from dapo.start.rows import load_rows
from helpers.commands import run as command
from helpers.tiny_runs import inputs_of, tiny

TOOLS = ("data.train=environment", "data.eval=null", "environment.tools=[my_tools:add]")


@pytest.mark.parametrize("option", ["data.train", "data.eval"])
def test_problems_of_an_environment_need_one(option: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"^{option}=environment: expected environment[.]name"),
        check(tiny(f"{option}=environment")),
    ):
        pass


def test_prompts_with_different_answers_are_counted_in_a_warning(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 4}+1=", "answer": str(i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny(f"data.train={tmp_path / 'rows.jsonl'}", "reward.verifier=exact")
    (warning,) = load_rows(config.data, config.reward, {}, "train")[1]
    assert warning.startswith("data.train: texts with different answers: 4, so a row rewards")


def test_a_model_that_has_trained_is_not_told_how_to_mark_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny(f"data.train={tmp_path / 'rows.jsonl'}", "reward.verifier=gsm8k")
    notes = {}
    for has_run in (False, True):
        with check(config, has_run=has_run) as checked:
            notes[has_run] = " ".join(read_data(checked).notes)
    assert "reads an answer marked by" in notes[False]
    assert "reads an answer marked by" not in notes[True]


@pytest.mark.parametrize(("answer", "is_named"), [("So it is 2.\n#### 2", False), ("2", True)])
def test_demonstrations_that_mark_their_answers_show_how(
    tmp_path: Path, answer: str, is_named: bool
) -> None:
    shown = [{"prompt": f"{i}+2=", "response": answer} for i in range(8)]
    asked = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    for name, rows in (("shown", shown), ("asked", asked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (
        f"data.demonstrations={tmp_path / 'shown.jsonl'}",
        f"data.eval={tmp_path / 'asked.jsonl'}",
    )
    config = build_config({"preset": "sft"}, ["model.name=tiny-random", *sources])
    config = config.changed("reward", verifier="gsm8k")
    with check(config) as checked:
        notes = read_data(checked).notes
        facts, _ = data_facts(checked)
    for warnings in (notes, facts[1].warnings):
        assert ("reads an answer marked by" in " ".join(warnings)) == is_named


@pytest.mark.parametrize(
    ("column", "verifier", "expected"),
    [
        ({"tests": ["assert add(1, 2) == 3"]}, "auto", "which math does not run"),
        ({"test_list": ["assert add(1, 2) == 3"]}, "exact", "which exact does not run"),
        ({"test": "def check(f):\n    assert f(1, 2) == 3"}, "math", "which math does not run"),
        ({"tests": ["assert add(1, 2) == 3"]}, "code", None),
        ({"tests": ["assert add(1, 2) == 3"]}, "dapo.rewards.examples:has_digit", None),
        ({"test": False}, "math", None),
    ],
)
def test_tests_that_no_verifier_runs_are_named(
    tmp_path: Path, column: dict[str, object], verifier: str, expected: str | None
) -> None:
    row = {"prompt": "Write add(a, b).", "answer": "7", **column}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = tiny(f"data.train={tmp_path / 'rows.jsonl'}", f"reward.verifier={verifier}")
    config = resolve_auto_verifier(config)
    notes = " ".join(load_rows(config.data, config.reward, {}, "train")[1])
    if expected is None:
        assert "tests of a program" not in notes
    else:
        assert f"data.train: 1 of 1 rows have tests of a program, {expected};" in notes


@pytest.mark.parametrize(
    ("prompt", "column", "is_unshown"),
    [
        ("Where was it?", {"context": "It was in\nDelft."}, True),
        ("It was in  Delft. Where was it?", {"context": "It was in\nDelft."}, False),
        # HotpotQA's form
        ("Who?", {"context": {"title": ["Who"], "sentences": [["It was Ann.", "So?"]]}}, True),
        ("Add them.", {"input": "3 and 4"}, True),
        ("Add them.", {"input": ""}, False),
        ("Add them.", {"system_prompt": "You are a cat."}, True),
        ("Add them.", {"context": None, "input": 3, "passage": []}, False),
    ],
)
def test_parts_of_questions_that_no_prompt_shows_are_named(
    tmp_path: Path, prompt: str, column: dict[str, object], is_unshown: bool
) -> None:
    row = {"question": prompt, "answer": 1, **column}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = tiny(f"data.train={tmp_path / 'rows.jsonl'}", "reward.verifier=exact")
    notes = " ".join(load_rows(config.data, config.reward, {}, "train")[1])
    name = next(iter(column))
    expected = f"data.train: 1 of 1 rows have a text in the column {name} that their prompts do not"
    assert (expected in notes) == is_unshown
    assert ("have a text" in notes) == is_unshown
    assert ("as a message with the role system" in notes) == (is_unshown and "system" in name)


def test_rows_that_differ_in_columns_alone_are_named_as_copies(tmp_path: Path) -> None:
    rows = [{"prompt": "Solve it.", "answer": "1", "board": board} for board in ("ab", "ab", "ba")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny(f"data.eval={path}", f"data.train={path}", "reward.verifier=exact")
    (warning,) = load_rows(config.data, config.reward, {}, "eval")[1]
    assert warning.startswith(
        "data.eval: 1 of 3 rows have the prompt and the answer of another row, and differ in board:"
    )
    assert load_rows(config.data, config.reward, {}, "train")[1] == []


CHOICES = ["a red fox", "a grey wolf", "a brown bear", "a white hare"]


@pytest.mark.parametrize(
    ("prompt", "column", "num_unshown"),
    [
        ("Which animal howls?", {"choices": CHOICES}, 1),
        ("Which animal howls?", {"choices": {"text": CHOICES, "label": [*"ABCD"]}}, 1),
        ("Which animal howls?", {"options": dict(zip("ABCD", CHOICES, strict=True))}, 1),
        ("Which animal howls?", {"options": json.dumps(CHOICES)}, 1),
        (
            "Which animal howls?",
            {"choices": [{"label": "A", "text": "wolf"}, {"label": "B", "text": "hare"}]},
            1,
        ),
        ("Which animal howls? A) A red  fox B) A grey wolf", {"choices": CHOICES[:2]}, 0),
        ("Which animal howls?", {"options": {"difficulty": "easy", "language": "en"}}, 0),
        ("Which animal howls?", {"options": [1, 2, 3]}, 0),
        ("Which animal howls?", {"options": "none"}, 0),
        ("Which animal howls?", {"choices": []}, 0),
    ],
)
def test_answer_choices_that_no_prompt_shows_are_named(
    tmp_path: Path, prompt: str, column: dict[str, object], num_unshown: int
) -> None:
    row = {"question": prompt, "answer": 1, **column}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = tiny(f"data.train={tmp_path / 'rows.jsonl'}", "reward.verifier=exact")
    notes = " ".join(load_rows(config.data, config.reward, {}, "train")[1])
    (name,) = column
    expected = f"1 of 1 rows have answer choices in the column {name}, of which their prompts"
    assert (expected in notes) == bool(num_unshown)
    assert ("answer choices" in notes) == bool(num_unshown)


def test_a_folder_with_an_adapter_alone_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter, expected a whole model"):
        require_model(str(tmp_path))


def test_the_length_of_evaluated_responses_counts_only_with_problems_to_evaluate() -> None:
    longer = "eval.max_response_tokens=5000"  # than the model's positions
    assert inputs_of(tiny(longer, "data.eval=null")).train
    with pytest.raises(ConfigError, match="a response of 5000 exceed the 4096 positions"):
        inputs_of(tiny(longer))


def test_check_refuses_as_training_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "expected environment.name" in command(capsys, "check", "tiny", "data.train=environment")[2]
    )


def test_the_table_of_data_stats_shows_different_answers_as_dedupe_counts_them(
    tmp_path: Path, capsys
) -> None:
    for answers, shown in (("2", False), ("3", True)):
        rows = [
            {"prompt": "1+1", "answer": "2"},
            {"prompt": "1+1", "answer": answers},
            {"prompt": "2+2", "answer": "4"},
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        printed = command(capsys, "data", "stats", str(tmp_path / "rows.jsonl"))[1]
        assert bool(re.search(r"different answers +│ 1 texts", printed)) == shown


def test_tools_alone_give_no_prompts() -> None:
    with pytest.raises(ConfigError, match=r"expected environment\.name"), check(tiny(*TOOLS)):
        pass
