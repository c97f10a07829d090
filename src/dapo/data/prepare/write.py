"""Problems to a file of our own rows, which reads back to the same problems."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dapo.config.data_spec import FILE_TYPES
from dapo.core.errors import DataError
from dapo.data.sources.files import read_rows
from dapo.data.sources.rows import problem_from_row
from dapo.types import Problem

_OWN = ("prompt", "answer", "source")
_ROWS_AT_ONCE = 4096


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write `.jsonl` or `.parquet`, one row a problem: prompt, answer, source, then the problem's other fields.

    The file is read back and compared before this returns. Raises DataError for what the format cannot hold, and for
    what would not come back the same.
    """
    suffix = require_file_type(path)
    (_write_jsonl if suffix == ".jsonl" else _write_parquet)(path, problems)
    for number, (problem, (_, row)) in enumerate(zip(problems, read_rows(path), strict=True), start=1):
        back = problem_from_row(row, where=f"row {number} of what was written", source=problem.source)
        if (back.id, back.source) != (problem.id, problem.source):
            raise DataError(
                f"problem {number} (answer {problem.answer!r}) would not read back the same: its answer came back as "
                f"{back.answer!r}, its source as {back.source!r}; rename or drop the columns of that name"
            )


def require_file_type(path: Path) -> str:
    """The ending, in lower case. Raises DataError for one that is not written."""
    suffix = path.suffix.lower()
    if suffix not in FILE_TYPES:
        raise DataError(f"{path}: expected a file that ends in .jsonl or .parquet, got {path.suffix or 'no ending'!r}")
    return suffix


def row_of(problem: Problem) -> dict[str, Any]:
    """A problem as a row; a field that a reader would take for our prompt, answer or source gets another name."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
    row: dict[str, Any] = {"prompt": prompt, "answer": problem.answer, "source": problem.source}
    for name, value in problem.fields.items():
        if name == "reward_model" and isinstance(value, Mapping):
            # its ground truth is our answer: two of them in a row could contradict each other
            value = {key: item for key, item in value.items() if key != "ground_truth"}
            if not value:
                continue
        if name == "source" and value == problem.source:
            continue
        collides = name in _OWN or name == "reward_model.ground_truth"
        row[f"original_{name.replace('.', '_')}" if collides else name] = value
    return row


def _write_jsonl(path: Path, problems: Sequence[Problem]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for problem in problems:
            file.write(json.dumps(row_of(problem), ensure_ascii=False, allow_nan=False) + "\n")


def _write_parquet(path: Path, problems: Sequence[Problem]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.concat_tables(
            [pa.Table.from_pylist(chunk) for chunk in _chunks(problems)], promote_options="permissive"
        )
        pq.write_table(table, path, compression="zstd")
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{path}: these problems do not fit one Parquet table ({' '.join(str(error).split())}); their columns must "
            "have one type each, write .jsonl instead"
        ) from None


def _chunks(problems: Sequence[Problem]) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(problems)
    columns = list(dict.fromkeys(name for problem in problems for name in row_of(problem)))
    while chunk := [{name: row.get(name) for name in columns} for row in map(row_of, islice(remaining, _ROWS_AT_ONCE))]:
        yield chunk
