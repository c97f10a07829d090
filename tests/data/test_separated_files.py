"""CSV, TSV and JSON lists: what people have in spreadsheets, as problems, and every way that it can
be broken.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from dapo.core.errors import DataError
from dapo.data.problems import load_problems
from dapo.data.sources.readers import read_rows

EXPECTED = "expected 2 (q, a); put a value that holds ',' into double quotes"
MESSAGES = [{"role": "user", "content": 'Say "hi", please'}]


def rows_of(path: Path, content: bytes | str) -> list[dict[str, Any]]:
    """The rows of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = []
    for _, row in read_rows(path):
        if isinstance(row, DataError):
            raise row
        found.append(row)
    return found


def error_of(path: Path, content: bytes | str) -> str:
    """The message with which the file is refused, without the path."""
    with pytest.raises(DataError) as caught:
        rows_of(path, content)
    return str(caught.value).replace(str(path), "FILE")


def test_a_column_has_the_type_of_all_its_values_and_stays_text_where_digits_would_change(
    tmp_path: Path,
):
    header = "whole,number,yes,zeros,cents,thousands,mixed,empty\n"
    rows = rows_of(
        tmp_path / "a.csv", header + '1,0.5,true,007,1.50,"1,000",3,\n-2,3,false,10,2.25,7,x,\n'
    )
    assert rows == [
        {"whole": 1, "number": 0.5, "yes": True, "zeros": "007", "cents": "1.50", "thousands": "1,000", "mixed": "3",
         "empty": None},
        {"whole": -2, "number": 3.0, "yes": False, "zeros": "10", "cents": "2.25", "thousands": "7", "mixed": "x",
         "empty": None},
    ]  # fmt: skip
    assert [type(row["whole"]) for row in rows] == [int, int]


def test_numbers_that_are_too_long_for_a_type_keep_every_digit(tmp_path: Path):
    digits = "123456789012345678901234567890"
    assert rows_of(tmp_path / "a.csv", f"n,m\n{digits},0.1234567890123456789\n") == [
        {"n": digits, "m": "0.1234567890123456789"}
    ]


def test_an_integer_beside_fractions_keeps_every_digit(tmp_path: Path):
    assert rows_of(tmp_path / "a.csv", "n,m\n12345678901234567,4\n0.5,0.5\n") == [
        {"n": "12345678901234567", "m": 4},
        {"n": "0.5", "m": 0.5},
    ]


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfq,a\r\n", b"\n\nq,a\n", b",q,a\n", b"q, a\n"])
def test_a_mark_blank_lines_windows_line_ends_and_an_index_of_pandas_are_no_matter(
    tmp_path: Path, content: bytes
):
    index = b"0," if content.startswith(b",") else b""
    line_end = b"\r\n" if b"\r" in content else b"\n"
    rows = rows_of(
        tmp_path / "a.csv",
        content + index + b'"1,\n2",x' + line_end + line_end + b",," + line_end[:0],
    )
    assert rows == [{"q": "1,\n2", "a": "x"}]


def test_the_separator_is_what_the_first_line_has_most_of(tmp_path: Path):
    expected = [{"prompt": "1,5 + 1?", "answer": "2,5"}]
    assert rows_of(tmp_path / "a.csv", "prompt;answer\n1,5 + 1?;2,5\n") == expected
    assert rows_of(tmp_path / "b.tsv", "prompt\tanswer\n1,5 + 1?\t2,5\n") == expected
    assert rows_of(tmp_path / "c.csv", "prompt\tanswer\n1,5 + 1?\t2,5\n") == expected


def test_what_the_csv_module_writes_comes_back(tmp_path: Path):
    values = ['"', "a,b", "line\nend", "tab\t", "é", "x" * 200_000, "  spaces  ", '""', "#", "'"]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "n"], *([value, "k"] for value in values)])
    assert [
        row["prompt"] for _, row in read_rows(tmp_path / "a.csv") if isinstance(row, dict)
    ] == values


def test_csv_json_and_json_lines_give_equal_problems(tmp_path: Path):
    rows = [{"prompt": f"{n} + 1?", "answer": n + 1, "level": n, "kind": "sum"} for n in range(5)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=2))
    with open(tmp_path / "x.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    first = load_problems(str(tmp_path / "x.jsonl"))
    assert (
        load_problems(str(tmp_path / "x.csv")) == load_problems(str(tmp_path / "x.json")) == first
    )
    assert first[3].fields == {"answer": 4, "level": 3, "kind": "sum"}


def test_messages_may_stand_in_a_cell_as_json(tmp_path: Path):
    cell = json.dumps(MESSAGES).replace('"', '""')
    (row,) = rows_of(tmp_path / "a.csv", f'prompt,answer\n"{cell}",hi\n')
    assert row["prompt"] == MESSAGES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q,a\n1,2\n1,2,3\n", f"FILE, line 3: 3 values, {EXPECTED}"),
        ('q,a\n"1\n\n2",2\n1\n', f"FILE, line 5: 1 values, {EXPECTED}"),
        ('q,a\n1,2\n"1,2\n3,4\n', "FILE, line 3: not valid CSV (a double quote that is opened here is not closed)"),
        ('q,a\n"1"x,2\n', "FILE, line 2: not valid CSV (',' expected after '\"')"),
        ("q,q\n1,2\n", "FILE, line 1: there are two columns q; rename or drop one of them"),
        ("q,,a\n1,2,3\n", "FILE, line 1: column 2 has no name; the first line must name the columns"),
        (b"q,a\nGr\xf6\xdfe?,1\n", "FILE, line 2: not UTF-8 (byte 0xf6 at column 3); save the file as UTF-8"),
        ("q,a\n1,2\n".encode("utf-16"), "FILE, line 1: not UTF-8 (byte 0xff at column 1); save the file as UTF-8"),
    ],
)  # fmt: skip
def test_a_broken_csv_file_names_file_line_and_remedy(
    tmp_path: Path, content: bytes | str, message: str
):
    assert error_of(tmp_path / "bad.csv", content) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "q"}', "FILE: expected a list of objects, like {example}, got a dict"),
        ('[{"prompt": "q", "answer": "a"}, 3]',
         'FILE, row 2: expected an object, like {"prompt": "...", "answer": "..."}, got a int'),
        ('[\n{"prompt" 3}]', "FILE, line 2: not valid JSON (Expecting ':' delimiter at column 11); expected a list of "
         "objects, like {example}"),
        ('{"a": 1}\n{"a": 2}', "FILE, line 2: not valid JSON (Extra data at column 1; one object per line is .jsonl); "
         "expected a list of objects, like {example}"),
        ('[{"a": 1, "a": 2}]', "FILE: the key 'a' occurs twice in one object; remove one of them"),
    ],
)  # fmt: skip
def test_a_broken_json_list_names_file_line_and_remedy(tmp_path: Path, content: str, message: str):
    example = '[{"prompt": "...", "answer": "..."}]'
    assert error_of(tmp_path / "bad.json", content) == message.replace("{example}", example)


def test_an_empty_file_and_one_without_rows_are_named(tmp_path: Path):
    for name, content in (("a.csv", ""), ("b.csv", "prompt,answer\n"), ("c.json", "[]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match="is empty; expected at least one problem"):
            load_problems(str(tmp_path / name))


def test_a_missing_reference_in_csv_is_null_and_named(tmp_path: Path):
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1?,2\n2+2?,\n")
    with pytest.raises(
        DataError, match=r"a\.csv, line 3: answer is null; every problem needs a reference answer"
    ):
        load_problems(str(tmp_path / "a.csv"))


def test_finished_conversations_are_refused_with_what_is_needed(tmp_path: Path):
    (tmp_path / "sft.jsonl").write_text(
        json.dumps({"messages": [*MESSAGES, {"role": "assistant", "content": "hi"}]})
    )
    with pytest.raises(
        DataError, match=r"line 1: the column messages holds finished conversations.*needs a prompt"
    ):
        load_problems(str(tmp_path / "sft.jsonl"))


def test_records_with_too_few_values_are_named_together(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer\n1+1,2\n2+2\n3+3\n4+4,8\n")
    errors: list[DataError] = []
    assert [problem.answer for problem in load_problems(str(path), invalid=errors)] == ["2", "8"]
    assert [str(error).split(": ")[0] for error in errors] == [f"{path}, line 3", f"{path}, line 4"]
