"""JSON Lines and Parquet files, the released ones included, and every way a file can be broken."""

import json
import re
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.core.errors import DataError
from dapo.data.problems import load_problems, remove_overlap, unique_problems
from helpers.paths import SHARED_DATA
from helpers.released import GSM8K_TEST, GSM8K_TRAIN, aime_parquet, dapo_math_parquet

needs_shared = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason=f"no data folder {SHARED_DATA}")
LINE = b'{"prompt": "1+1?", "answer": "2"}\n'
EXAMPLE = '{"prompt": "...", "answer": "..."}'


def error_message(spec):
    with pytest.raises(DataError) as caught:
        load_problems(spec)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_json_lines_skip_blank_lines_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf" + LINE + b"\n   \r\n" + '{"prompt": "Größe?", "answer": 3}'.encode()
    )
    problems = load_problems(str(file))
    assert [(p.prompt, p.answer, p.source) for p in problems] == [
        ("1+1?", "2", "a"),
        ("Größe?", "3", "a"),
    ]


def test_parquet_and_json_lines_give_equal_problems(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}?"}],
            "reward_model": {"ground_truth": str(n)},
            "n": n,
        }
        for n in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_problems(str(tmp_path / "x.parquet")) == load_problems(str(tmp_path / "x.jsonl"))


def test_parquet_times_are_times(tmp_path):
    table = pa.table(
        {
            "prompt": ["q"],
            "answer": [2.0],
            "when": [datetime(2024, 5, 6, 7)],
            "none": [float("nan")],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    (problem,) = load_problems(str(tmp_path / "x.parquet"))
    assert (problem.answer, problem.fields) == (
        "2",
        {"answer": 2.0, "when": datetime(2024, 5, 6, 7), "none": None},
    )


def test_size_takes_the_first_rows_and_reads_no_further(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(LINE + LINE.replace(b"1+1", b"2+2") + b"broken\n")
    assert [p.prompt for p in load_problems({"path": str(file), "size": 2})] == ["1+1?", "2+2?"]


def test_columns_are_named_in_a_mapping(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"frage": "q", "antwort": "a", "prompt": "p"}\n')
    (problem,) = load_problems(
        {"path": str(tmp_path / "a.jsonl"), "prompt": "frage", "answer": "antwort"}
    )
    assert (problem.prompt, problem.answer, problem.fields) == (
        "q",
        "a",
        {"frage": "q", "antwort": "a", "prompt": "p"},
    )


def test_equal_copies_are_one_object_and_stay_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(3 * LINE + LINE.replace(b"}", b', "n": 1}'))
    problems = load_problems(str(tmp_path / "a.jsonl"))
    assert problems[0] is problems[1] is problems[2]
    assert problems[3].fields == {"n": 1}
    assert [(p.prompt, copies) for p, copies in unique_problems(problems)] == [("1+1?", 4)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", " is empty; expected at least one problem with prompt and answer"),
        (b"\n \n", " is empty; expected at least one problem with prompt and answer"),
        (
            LINE + b'{"prompt": "q" "answer": 1}\n',
            ", line 2: not valid JSON (Expecting ',' delimiter at column 16); "
            f"expected one object per line, like {EXAMPLE}",
        ),
        (b'{"prompt": "a\tb"}\n', ", line 1: not valid JSON (Invalid control character at column 14); "
         f"expected one object per line, like {EXAMPLE}"),
        (
            b"\n" + LINE + b'["q", "a"]\n',
            f", line 3: expected one object per line, like {EXAMPLE}, got a list",
        ),
        (
            b'{"prompt": "Gr\xf6\xdfe?", "answer": 1}\n',
            ", line 1: not UTF-8 (byte 0xf6 at column 15); save the file as UTF-8",
        ),
        (LINE + b'{"prompt": "q", "answer": null}\n', ", line 2: answer is null; every problem needs a reference "
         "answer: fill it in or drop the row"),
    ],
)  # fmt: skip
def test_a_broken_json_lines_file_names_file_line_and_remedy(tmp_path, content, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    assert error_message(str(file)) == f"{file}{message}"


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"prompt": "q", "answer": ' + b"9" * 5000 + b"}"]
)
def test_json_beyond_what_python_reads_is_a_data_error(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(line)
    assert error_message(str(tmp_path / "a.jsonl")).startswith(
        f"{tmp_path}/a.jsonl, line 1: JSON that cannot be read ("
    )


def test_a_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(LINE)
    (tmp_path / "notes.txt").write_text("x")
    assert (
        error_message(str(tmp_path / "trian.jsonl"))
        == f"no data file {tmp_path}/trian.jsonl; did you mean {tmp_path}/train.jsonl?"
    )
    assert (
        error_message(str(tmp_path / "aime.parquet"))
        == f"no data file {tmp_path}/aime.parquet; the folder holds train.jsonl"
    )
    assert (
        error_message(str(tmp_path / "no" / "x.jsonl"))
        == f"no data file {tmp_path}/no/x.jsonl; the folder {tmp_path}/no does not exist"
    )


def test_a_folder_or_another_kind_of_file_is_refused(tmp_path):
    assert (
        error_message(str(tmp_path))
        == f"{tmp_path} is a folder; expected one file: it holds no data file"
    )
    (tmp_path / "b.jsonl").write_bytes(LINE)
    assert (
        error_message(str(tmp_path))
        == f"{tmp_path} is a folder; expected one file: it holds b.jsonl"
    )
    (tmp_path / "c.xlsx").write_text("prompt,answer")
    assert (
        error_message(str(tmp_path / "c.xlsx"))
        == f"{tmp_path}/c.xlsx: expected a file that ends in .jsonl, .parquet, .csv, .tsv or .json,"
        " got '.xlsx'"
    )


def test_broken_parquet_is_a_data_error(tmp_path):
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1 this is none PAR1")
    assert error_message(str(file)).startswith(f"{file}: not readable as Parquet (")
    file.write_bytes(b"")
    assert error_message(str(file)).startswith(f"{file}: not readable as Parquet (")
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), file
    )
    assert (
        error_message(str(file))
        == f"{file} is empty; expected at least one problem with prompt and answer"
    )


def test_parquet_rows_are_counted_from_one(tmp_path):
    pq.write_table(pa.table({"prompt": ["q", "r"], "answer": ["1", None]}), tmp_path / "x.parquet")
    assert error_message(str(tmp_path / "x.parquet")).startswith(
        f"{tmp_path}/x.parquet, row 2: answer is null;"
    )


def test_rows_in_the_form_of_aime_are_problems_with_copies(tmp_path):
    problems = load_problems(str(aime_parquet(tmp_path)))
    unique = unique_problems(problems)
    assert (len(problems), len(unique), {copies for _, copies in unique}) == (12, 3, {4})
    assert len({id(problem) for problem in problems}) == 3
    first = problems[0]
    assert (first.answer, first.source, first.prompt[0]["role"]) == ("56", "math_dapo", "user")
    assert first.fields["extra_info"]["index"] == 2


def test_rows_in_the_form_of_dapo_math_may_be_copies_and_contradictions(tmp_path):
    problems = load_problems(str(dapo_math_parquet(tmp_path)))
    assert (len(problems), len(unique_problems(problems))) == (10, 9)
    assert len({problem.prompt[0]["content"] for problem in problems}) == 8
    assert [problem.answer for problem in problems[:4]] == ["12", "-15", "40320", "-3"]
    assert {problem.source for problem in problems} == {"dapo_math"}


def test_rows_in_the_form_of_gsm8k_have_the_number_behind_the_mark_as_answer():
    train = load_problems(str(GSM8K_TRAIN))
    test = load_problems(str(GSM8K_TEST))
    assert remove_overlap(train, test) == (train, 0)
    assert remove_overlap([*train, test[0]], test) == (train, 1)
    assert [problem.answer for problem in train] == ["1200", "57", "8", "-5"]
    assert [problem.answer for problem in test] == ["100", "15", "2880"]
    assert train[0].fields["solution"].endswith("#### 1,200")


@needs_shared
def test_aime_2024_is_30_problems_of_32_copies():
    problems = load_problems(str(SHARED_DATA / "aime-2024.parquet"))
    unique = unique_problems(problems)
    assert (len(problems), len(unique), {copies for _, copies in unique}) == (960, 30, {32})
    assert len({id(problem) for problem in problems}) == 30
    first = problems[0]
    assert (first.answer, first.source, first.prompt[0]["role"]) == ("540", "math_dapo", "user")
    assert first.fields["extra_info"]["index"] == 2


@needs_shared
def test_dapo_math_17k_has_copies_and_contradictions():
    problems = load_problems(str(SHARED_DATA / "dapo-math-17k.parquet"))
    assert len(problems) == 17_917
    assert len(unique_problems(problems)) == 17_405
    assert len({problem.prompt[0]["content"] for problem in problems}) == 17_398
    assert problems[0].answer == "34"


@needs_shared
def test_gsm8k_train_and_test_share_no_question():
    train = load_problems(str(SHARED_DATA / "gsm8k" / "train.jsonl"))
    test = load_problems(str(SHARED_DATA / "gsm8k" / "test.jsonl"))
    assert (len(train), len(test)) == (7_473, 1_319)
    assert remove_overlap(train, test) == (train, 0)
    assert (train[0].answer, test[0].answer) == ("72", "18")
    assert all("," not in problem.answer for problem in train)
    assert train[0].fields["solution"].endswith("#### 72")


def test_two_parquet_columns_of_one_name_are_refused_also_inside_a_column(tmp_path):
    twice = pa.table([["q"], ["1"], ["2"]], names=["prompt", "answer", "answer"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"a\.parquet: there are two columns answer; rename or drop one of them"
    ):
        load_problems(str(tmp_path / "a.parquet"))
    info = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(
        pa.table({"prompt": ["q"], "answer": ["1"], "info": info}), tmp_path / "b.parquet"
    )
    with pytest.raises(
        DataError, match=r"b\.parquet: there are two columns info\.x; rename or drop one of them"
    ):
        load_problems(str(tmp_path / "b.parquet"))


BAD_ROWS = [
    '{"prompt": "1+1", "answer": "2"}',
    '{"prompt": ',
    '{"prompt": "", "answer": "2"}',
    "[1]",
    "\udcff",
]


def test_all_rows_that_cannot_be_used_are_named_at_once(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes("\n".join(BAD_ROWS * 4).encode(errors="surrogateescape"))
    with pytest.raises(DataError) as raised:
        load_problems(str(path))
    lines = str(raised.value).splitlines()
    assert lines[0] == "16 rows cannot be used:"
    assert [re.search(r"line (\d+)", line)[1] for line in lines[1:11]] == [  # type: ignore[index]
        "2", "3", "4", "5", "7", "8", "9", "10", "12", "13"
    ]  # fmt: skip
    assert lines[11:] == [
        "  and 6 more",
        "Mend them, or leave them out: dapo data import SOURCE OUT.jsonl --drop-invalid",
    ]
    errors: list[DataError] = []
    assert [problem.answer for problem in load_problems(str(path), invalid=errors)] == ["2"] * 4
    assert len(errors) == 16
    assert len(load_problems({"path": str(path), "size": 1})) == 1  # the first row is right


def test_a_file_without_a_valid_row_is_described_by_one_of_them(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "1"}\n' * 30)
    with pytest.raises(DataError, match=r"line 1: [^\n]*$"):
        load_problems(str(path))
    errors: list[DataError] = []
    with pytest.raises(DataError, match="line 1: "):
        load_problems(str(path), invalid=errors)
