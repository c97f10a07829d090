"""Every column reaches a reward function with the value that the data has; only the reference
answer is text.
"""

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.api.in_memory_data import write_rows
from dapo.data.prepare.write import write_problems
from dapo.data.problems import load_problems
from dapo.data.sources.rows import other_fields, problem_from_row
from dapo.rewards.audit import audit_reward
from dapo.rewards.combine import InlineJudge
from dapo.rewards.verifiers.function import columns_of, function_verifier
from dapo.runs.manifest import _fingerprint
from dapo.types import Problem
from helpers.loops import loop_over

VALUES = [
    5,
    5.0,
    0.5,
    -7,
    "5",
    "007",
    "2+3=5\n#### 5",
    "x\n#### 1,234",
    True,
    False,
    None,
    [1, 2],
    {"a": [{"b": None}], "c": 1.5},
    10**18,
]
NAMES = [
    "answer",
    "solution",
    "target",
    "ground_truth",
    "id",
    "source",
    "level",
    "class",
    "extra_info",
]
COLUMN_SETS = {
    "JSON Lines": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows)) + "\n"),
    "rows in memory": write_rows,
    "Arrow": lambda path, rows: write_rows(path, pa.Table.from_pylist(rows)),
    "pandas": lambda path, rows: write_rows(path, pd.DataFrame(rows, dtype=object)),
}


def received(problem: Problem, name: str) -> Any:
    """The value of a column that a function in TRL's convention gets."""
    seen = []

    def reward(completions: list[str], **columns: list[Any]) -> list[float]:
        seen.append(columns[name][0])
        return [0.0 for _ in completions]

    function_verifier("m:reward", reward, {}).judge_group(problem, ["5"], [()])
    return seen[0]


def same(found: object, expected: object) -> bool:
    return repr(found) == repr(expected)  # 1, 1.0 and True are equal


@loop_over("name", NAMES)
@loop_over("source", COLUMN_SETS)
def test_a_function_gets_each_value_under_its_columns_own_name(
    source: str, name: str, tmp_path: Path
) -> None:
    for value in VALUES:
        file = tmp_path / "x.jsonl"
        COLUMN_SETS[source](file, [{"prompt": "2+3?", name: value}])
        (problem,) = load_problems(str(file), require_answer=False)
        assert same(received(problem, name), value), value
        assert isinstance(problem.answer, str)


def test_nested_values_of_parquet_arrive_as_arrow_holds_them(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "q",
            "reward_model": {"ground_truth": 5, "style": "rule"},
            "extra_info": {"index": 3, "tags": ["a"]},
        },
        {
            "prompt": "r",
            "reward_model": {"ground_truth": 6, "style": "rule"},
            "extra_info": {"index": 4, "tags": []},
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    seen = []

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        seen.append((ground_truth, extra_info))
        return 0.0

    for problem in load_problems(str(tmp_path / "x.parquet")):
        function_verifier("m:compute_score", compute_score, {}).judge(problem, "5")
        assert problem.answer == str(problem.fields["reward_model"]["ground_truth"])
    assert seen == [(5, {"index": 3, "tags": ["a"]}), (6, {"index": 4, "tags": []})]


def test_a_column_answer_beside_verls_ground_truth_keeps_its_own_value() -> None:
    row = {"prompt": "q", "answer": "the essay", "reward_model": {"ground_truth": 5}}
    columns = columns_of(problem_from_row(row, where="row 1", source="t"))
    assert (columns["answer"], columns["ground_truth"]) == ("the essay", 5)


def test_types_that_json_lacks_become_text_or_numbers_of_the_same_value() -> None:
    values = {np.int64(5): 5, np.float32(0.5): 0.5, np.bool_(True): True, Decimal("1.50"): "1.50"}
    values |= {
        date(2026, 1, 2): "2026-01-02",
        np.datetime64("2026-01-02", "ns"): "2026-01-02T00:00:00.000000000",
    }
    for value, expected in values.items():
        problem = problem_from_row(
            {"prompt": "q", "answer": "1", "x": value}, where="row 1", source="t"
        )
        assert same(problem.fields["x"], expected), value
    assert (
        problem_from_row({"prompt": "q", "answer": np.int64(5)}, where="row 1", source="t").answer
        == "5"
    )


def test_the_checksum_of_the_data_does_not_depend_on_the_type_of_the_answer() -> None:
    # as versions recorded it that left the column out
    old = Problem("1", "q", "5", "s", {"level": 3})
    for answer in (5, 5.0, "x\n#### 5", "5"):
        new = Problem(
            "1", "q", "5", "s", {"answer": answer, "level": 3} if answer != "5" else {"level": 3}
        )
        assert _fingerprint([new]) == _fingerprint([old]), answer
    other = Problem("1", "q", "5", "s", {"answer": "another column", "level": 3})
    assert _fingerprint([other]) != _fingerprint([old])
    assert other_fields(other) == other.fields


def test_copies_whose_values_differ_only_in_type_stay_apart(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": value} for value in (5, 5.0)]
    rows += [{"prompt": "q", "answer": "5", "flag": value} for value in (1, True, 1.0)]
    COLUMN_SETS["JSON Lines"](tmp_path / "x.jsonl", rows)
    problems = load_problems(str(tmp_path / "x.jsonl"))
    assert repr([columns_of(problem)["answer"] for problem in problems]) == repr(
        [5, 5.0, "5", "5", "5"]
    )
    assert repr([problem.fields.get("flag") for problem in problems[2:]]) == repr([1, True, 1.0])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("answer", [5, 0.5, "2+3=5\n#### 5", "1/2"])
def test_a_written_data_set_keeps_the_answers_type(
    answer: Any, suffix: str, tmp_path: Path
) -> None:
    for row in (
        {"prompt": "q", "answer": answer},
        {"prompt": "q", "reward_model": {"ground_truth": answer}},
    ):
        first = problem_from_row(row, where="row 1", source="t")
        write_problems(tmp_path / f"out{suffix}", [first])
        (again,) = load_problems(str(tmp_path / f"out{suffix}"))
        name = "answer" if "answer" in row else "ground_truth"
        assert same(columns_of(again)[name], answer)
        assert again.id == first.id


def test_a_broken_reference_of_the_audit_reaches_a_function_under_the_columns_name() -> None:
    seen = set()

    def reward(completions: list[str], answer: list[Any]) -> list[float]:
        seen.add(repr(answer[0]))
        return [0.0 for _ in completions]

    judge = InlineJudge("m:reward", functions={"m:reward": reward})
    audit_reward(judge, problem_from_row({"prompt": "q", "answer": 5}, where="row 1", source="t"))
    assert "5" in seen
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["5", "7"], [5, 7]),
        (["5", "1.5"], [5.0, 1.5]),
        (["true", "false"], [True, False]),
        (["5", "true"], ["5", "true"]),
        (["true", "5"], ["true", "5"]),
        (["1.5", "x"], ["1.5", "x"]),
        (["5", '[{""a"": 1}]'], ["5", '[{"a": 1}]']),
        (["nan", "1.5"], ["nan", "1.5"]),
        (["inf", "1.5"], ["inf", "1.5"]),
        (["007", "8"], ["007", "8"]),
    ],
)
def test_a_column_of_a_csv_file_has_one_type_whatever_its_name(
    texts: list[str], expected: list[Any], tmp_path: Path
) -> None:
    for name in ("answer", "level"):
        lines = [f'q{i},"{text}"' for i, text in enumerate(texts)]
        (tmp_path / "x.csv").write_text("\n".join([f"prompt,{name}", *lines]) + "\n")
        problems = load_problems(str(tmp_path / "x.csv"), require_answer=False)
        assert same([received(problem, name) for problem in problems], expected)
