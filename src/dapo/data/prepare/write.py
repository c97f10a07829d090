"""Write problems and reports about them; a written file reads back as the same problems."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.core.errors import ConfigError, DataError
from dapo.core.files import fsync
from dapo.core.terminal import printable_json
from dapo.core.typed_values import to_json_values
from dapo.data.sources.readers import read_rows, require_file_type
from dapo.data.sources.rows import (
    CONVERSATION_COLUMNS,
    PROMPT_COLUMNS,
    is_source_of,
    other_fields,
    problem_from_row,
)
from dapo.types import Problem

_CHUNK_ROWS = 4096
WRITTEN_TYPES = (".jsonl", ".parquet")
_READ_AS_PROMPT = frozenset((*PROMPT_COLUMNS, *CONVERSATION_COLUMNS))


def require_new_data(out: Path, *reports: Path, force: bool) -> None:
    """Raise DataError if files of `out`'s type cannot be written; ConfigError as `require_new`."""
    require_file_type(out, WRITTEN_TYPES)
    for path in (out, *reports):
        require_new(path, force=force)


def require_new(path: Path, *, force: bool) -> None:
    """Raise ConfigError if a file cannot be written, or exists already and `force` is not set."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; expected the name of a file to write")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; expected the name of a file to write")
    # raises OSError where a name made from it is too long
    path.with_name(f".{path.name}.12345678.tmp").exists()
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; choose another name, or --force to overwrite it")


def write_data(
    out: Path,
    problems: Sequence[Problem],
    report: Path | None = None,
    lines: Iterable[Mapping[str, Any]] = (),
    *,
    if_empty: str = "",
) -> None:
    """Write a data file and a report of JSON lines beside it; an error leaves both unchanged.

    Args:
        out: the data file, whose ending names its type.
        problems: its rows.
        report: the file of the report; None: there is none.
        lines: the lines of the report.
        if_empty: the reason if there is no problem, for the error.

    Raises:
        ConfigError: the directory cannot be written.
        DataError: there is no problem, or the file cannot store them (`write_problems`).
    """
    if not problems:
        raise DataError(f"nothing would be left: {if_empty}")
    try:
        directory = Path(tempfile.mkdtemp(prefix=".dapo-data-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    try:
        write_problems(directory / out.name, problems)
        paths = [out]
        if report is not None:
            _write_jsonl(directory / report.name, lines)
            paths = [report, out]  # the data file last: if it exists, so does its report
        for path in paths:
            fsync(directory / path.name)
        for path in paths:
            os.replace(directory / path.name, path)
        fsync(out.parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write `.jsonl` or `.parquet`, one row per problem: prompt, answer, source, other fields.

    The file is read back and compared.

    Raises:
        DataError: the format cannot store a problem, or would not read it back the same.
    """
    suffix = require_file_type(path, WRITTEN_TYPES)
    if suffix == ".jsonl":
        _write_jsonl(path, map(row_of, problems))
    else:
        _write_parquet(path, problems)
    pairs = zip(problems, read_rows(path), strict=True)
    for number, (problem, (_, row)) in enumerate(pairs, start=1):
        where = f"row {number} of the written file"
        back = problem_from_row(row, where=where, source=problem.source, require_answer=False)
        if (back.id, back.source) != (problem.id, problem.source):
            raise DataError(
                f"problem {number} (answer {problem.answer!r}) would not read back the same: its"
                f" answer came back as {back.answer!r}, its source as {back.source!r}; rename or"
                " drop the columns of that name"
            )


def row_of(problem: Problem) -> dict[str, Any]:
    """Return a problem's row; fields that would be read as something else become `original_NAME`.

    The answer is written as the data has it, not as the text that verifiers read.
    """
    prompt: str | list[dict[str, Any]]
    if isinstance(problem.prompt, str):
        prompt = problem.prompt
    else:
        prompt = [dict(message) for message in problem.prompt]
    fields = other_fields(problem)
    verl_reward = fields.get("reward_model")
    keeps_verl = False
    if isinstance(verl_reward, Mapping):
        keeps_verl = is_source_of(problem.answer, verl_reward.get("ground_truth"))
    row: dict[str, Any] = {"prompt": prompt}
    if "answer" not in fields and "answer" in problem.fields:
        row["answer"] = problem.fields["answer"]
    elif problem.answer and not keeps_verl:
        row["answer"] = problem.answer
    row["source"] = problem.source
    for original_name, value in fields.items():
        name = original_name
        if name == "reward_model" and isinstance(value, Mapping) and not keeps_verl:
            # its ground truth is our answer, and two answers in one row could conflict
            value = {key: item for key, item in value.items() if key != "ground_truth"}
            if not value:
                continue
        if name == "source" and value == problem.source:
            continue
        if name in _READ_AS_PROMPT and value == problem.prompt:
            continue
        # a dot would be read as a nested column
        if name in row or name == "reward_model.ground_truth":
            name = f"original_{name.replace('.', '_')}"
        # the data may have columns of such names, too
        while name in row or (name != original_name and name in fields):
            name = f"original_{name}"
        row[name] = value
    return row


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            text = json.dumps(to_json_values(row), ensure_ascii=False, allow_nan=False)
            file.write(printable_json(text) + "\n")


def _write_parquet(path: Path, problems: Sequence[Problem]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, None] = {}
    for problem in problems:
        columns.update(dict.fromkeys(row_of(problem)))

    def table_of(chunk: Sequence[Problem]) -> Any:
        rows = []
        for problem in chunk:
            row = row_of(problem)
            # all columns in each row: Arrow takes those of the first
            rows.append({name: row.get(name) for name in columns})
        return pa.Table.from_pylist(rows)

    try:
        starts = range(0, len(problems), _CHUNK_ROWS)
        tables = [table_of(problems[start : start + _CHUNK_ROWS]) for start in starts]
        table = pa.concat_tables(tables, promote_options="permissive")
        pq.write_table(table, path, compression="zstd")
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{path}: these problems do not fit one Parquet table ({' '.join(str(error).split())});"
            " their columns must have one type each, write .jsonl instead"
        ) from None
