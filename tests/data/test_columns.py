"""Every column reaches a reward function with the value that the data has; only the reference
answer is text.
"""

import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.api.in_memory_data import write_rows
from dapo.config import RewardConfig
from dapo.core.errors import DataError
from dapo.data.prepare.write import write_problems
from dapo.data.problems import load_problems
from dapo.data.sources.rows import other_fields, problem_from_row
from dapo.rewards.audit import audit_reward
from dapo.rewards.combine import InlineJudge
from dapo.rewards.pool import VerifierPool
from dapo.rewards.verdicts import problem_of_frame, problem_to_frame, problem_to_json
from dapo.rewards.verifiers.function import columns_of, function_verifier
from dapo.runs.manifest import _fingerprint
from dapo.types import Problem
from helpers.tables import for_each_row

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


@for_each_row("name", NAMES)
@for_each_row("source", COLUMN_SETS)
def test_a_function_gets_each_value_under_its_columns_own_name(
    source: str, name: str, tmp_path: Path
) -> None:
    for value in VALUES:
        file = tmp_path / "x.jsonl"
        COLUMN_SETS[source](file, [{"prompt": "2+3?", name: value}])
        (problem,) = load_problems(str(file), require_answer=False)
        assert same(received(problem, name), value), value
        assert isinstance(problem.answer, str)


@for_each_row("source", ["parquet", "Arrow", "pandas"])
def test_a_table_gives_a_template_no_keys_of_other_rows(source: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for key, variables in (("x", {"enable_thinking": False}), ("y", {"effort": "low"})):
        parameters = {"type": "object", "properties": {key: {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": key, "parameters": parameters}}]
        rows.append(
            {"prompt": key, "answer": "1", "tools": tools, "chat_template_kwargs": variables}
        )
    file = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    if source != "parquet":
        table = pq.read_table(file)
        file = tmp_path / "x.jsonl"
        write_rows(file, pd.read_parquet(tmp_path / "x.parquet") if source == "pandas" else table)
    for problem, row in zip(load_problems(str(file)), rows, strict=True):
        assert problem.fields["tools"] == row["tools"]
        assert problem.fields["chat_template_kwargs"] == row["chat_template_kwargs"]


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


TYPED = [
    date(2026, 1, 2),
    datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime(2026, 1, 2, tzinfo=UTC),
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    time(3, 4, 5),
    timedelta(days=-1, microseconds=7),
    Decimal("1.50"),
    Decimal("1E+3"),
    Decimal("NaN"),
    UUID(int=7),
    math.inf,
    -math.inf,
    [Decimal("0.1"), {"day": date(2026, 1, 2)}],
    {"__dapo_type__": "date", "value": "2026-01-02"},  # a mapping of the data that looks like ours
    {"__dapo_type__": 1, "x": [{"__dapo_type__": Decimal(2)}]},
]
"""Values that JSON lacks, or would take for one."""
SINGLE = [value for value in TYPED if not isinstance(value, dict | list) and str(value) != "NaN"]


@pytest.mark.parametrize("source", ["rows in memory", "pandas"])
def test_values_that_json_lacks_keep_their_types_in_python_rows(
    source: str, tmp_path: Path
) -> None:
    for value in TYPED:
        for name in ("x", "answer", "ground_truth"):
            file = tmp_path / "x.jsonl"
            COLUMN_SETS[source](file, [{"prompt": "2+3?", name: value}])
            (problem,) = load_problems(str(file), require_answer=False)
            assert same(received(problem, name), value), value


@pytest.mark.parametrize("value", SINGLE, ids=repr)
def test_values_that_json_lacks_keep_their_types_in_parquet(value: Any, tmp_path: Path) -> None:
    try:
        table = pa.Table.from_pylist([{"prompt": "q", "x": value}])
    except pa.ArrowException:
        pytest.skip(f"this pyarrow has no {type(value).__name__}")
    pq.write_table(table, tmp_path / "x.parquet")
    texts: dict[str, str] = {}
    (problem,) = load_problems(str(tmp_path / "x.parquet"), require_answer=False, texts=texts)
    found = received(problem, "x")
    assert type(found) is type(value)
    assert found == value
    assert texts == {}


@pytest.mark.parametrize("value", SINGLE, ids=repr)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_written_data_set_keeps_them_or_says_that_it_cannot(
    value: Any, suffix: str, tmp_path: Path
) -> None:
    first = problem_from_row({"prompt": "q", "answer": "1", "x": value}, where="r", source="t")
    file = tmp_path / f"x{suffix}"
    if suffix == ".parquet" and isinstance(value, UUID):
        try:
            pa.array([value])
        except pa.ArrowException:
            with pytest.raises(DataError, match=r"write \.jsonl instead"):
                write_problems(file, [first])
            return
    write_problems(file, [first])
    (problem,) = load_problems(str(file))
    assert type(problem.fields["x"]) is type(value)
    assert problem.fields["x"] == value


def test_a_value_of_a_judge_in_another_process_is_the_same_and_a_servers_is_text() -> None:
    problem = Problem("1", "q", "5", "s", {"values": TYPED, "tools": []})
    message = json.loads(json.dumps(problem_to_frame(problem)))
    assert same(problem_of_frame(message), problem)
    plain = Problem("1", "q", "5", "s", {"level": 3})
    assert problem_to_frame(plain)["typed"] is False
    assert same(problem_of_frame(problem_to_frame(plain)), plain)
    texts = problem_to_json(problem)["fields"]["values"]
    assert texts[:2] == ["2026-01-02", "2026-01-02T03:04:05.000006"]
    assert texts[7:9] == ["1.50", "1E+3"]
    assert json.dumps(texts, allow_nan=False)


def test_a_function_in_a_worker_process_gets_the_type() -> None:
    reward = RewardConfig(verifier="helpers.reward_functions:names_types", workers=1, timeout_s=20)
    problem = Problem("1", "q", "5", "s", {"day": date(2026, 1, 2), "price": Decimal("1.50")})
    with VerifierPool(reward) as pool:
        (verdict,) = pool.submit(problem, ["date 2026-01-02 Decimal 1.50"], [()]).result(60)
    assert verdict.error is None
    assert verdict.score == 1.0


def test_a_type_that_is_not_kept_is_named(tmp_path: Path, capsys: Any) -> None:
    nanoseconds = np.datetime64("2026-01-02T00:00:00.000000001", "ns")
    rows = {
        "fine": pd.Timestamp("2026-01-02T00:00:00.000000001"),
        "array": np.array([nanoseconds]),
        "keys": {1: "a"},
        "whole": np.datetime64("2026-01-02", "ns"),
        "day": np.datetime64("2026-01-02"),
        "missing": pd.NaT,
    }
    write_rows(tmp_path / "x.jsonl", [{"prompt": "q", "answer": "1", **rows}])
    captured = capsys.readouterr()
    printed = " ".join((captured.out + captured.err).split())
    columns = "fine (Timestamp), array (datetime64), keys (key of type int)"
    assert f"this type is not kept, so functions get it as text in the column {columns}" in printed
    (problem,) = load_problems(str(tmp_path / "x.jsonl"))
    assert problem.fields == {
        "fine": "2026-01-02T00:00:00.000000001",
        "array": ["2026-01-02T00:00:00.000000001"],
        "keys": {"1": "a"},
        "whole": datetime(2026, 1, 2),
        "day": date(2026, 1, 2),
        "missing": None,
    }


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        ('{"__dapo_type__": "set", "value": []}', "must be one of date, datetime, .*, got 'set'"),
        ('{"__dapo_type__": "date", "value": "tomorrow"}', "'tomorrow' is no date"),
        ('{"__dapo_type__": "date"}', "None is no date"),
        ('{"__dapo_type__": "Decimal", "value": "x"}', "'x' is no Decimal"),
    ],
)
def test_a_mark_that_is_none_of_ours_is_an_error_with_its_line(
    mark: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(f'{{"prompt": "q", "answer": "1", "x": {mark}}}\n')
    with pytest.raises(DataError, match=rf"x\.jsonl, line 1: .*{reason}"):
        load_problems(str(file))


def test_numbers_of_numpy_become_numbers_of_the_same_value() -> None:
    values = {np.int64(5): 5, np.float32(0.5): 0.5, np.bool_(True): True}
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
    # as versions recorded it that read them as text
    typed = {"day": datetime(2026, 1, 2), "price": Decimal("1.50"), "most": math.inf}
    texts = {"day": "2026-01-02T00:00:00", "price": "1.50", "most": "inf"}
    assert _fingerprint([Problem("1", "q", "5", "s", typed)]) == _fingerprint(
        [Problem("1", "q", "5", "s", texts)]
    )
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
