"""Reads the tables of a run's judged responses: the only reader of rollouts/step_*.parquet beside the page's index."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

TOKEN_COLUMNS = ("response_ids", "engine_logprobs")
CURVES = ("reward", "accuracy", "entropy", "length")
"""What is compared of each step's responses: shaped reward, fraction correct, nats per token, tokens per response."""
_CURVE_COLUMNS = ("problem_id", "outcome", "reward", "correct", "response_tokens")
PREVIEW_CHARS = 400
SHOWN_COLUMNS = [
    *("step", "group_id", "sample", "problem_id", "source", "outcome", "correct", "error", "score", "reward"),
    *("advantage", "response_tokens", "finish", "prompt", "response", "answer"),
]


def read_rollouts(paths: Sequence[Path], columns: Sequence[str] | None = None, *, filters: Any = None) -> pa.Table:
    """Read tables of judged responses as one.

    Args:
        paths: The tables, at least one.
        columns: The columns; None: all but those of tokens.
        filters: Conditions on rows, as `pyarrow.parquet.read_table` takes them.
    """
    wanted = columns
    if wanted is None:
        wanted = [name for name in pq.read_schema(paths[0]).names if name not in TOKEN_COLUMNS]
    return pa.concat_tables([pq.read_table(path, columns=list(wanted), filters=filters) for path in paths])


def all_columns(path: Path) -> list[str]:
    """The names of a table's columns."""
    return list(pq.read_schema(path).names)


def iterate_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table one chunk at a time, so that a reader may stop early.

    Without `columns` all are read but the log-probabilities.
    """
    with pq.ParquetFile(path) as file:
        wanted = list(columns) or [name for name in file.schema_arrow.names if name != "engine_logprobs"]
        for batch in file.iter_batches(1024, columns=wanted):
            yield from batch.to_pylist()


def read_rows(path: str, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Some rows of a table of responses, as the page shows them; only the chunks that hold them are read."""
    records = []
    with pq.ParquetFile(path) as table:
        start = 0
        for chunk in range(table.metadata.num_row_groups):
            end = start + table.metadata.row_group(chunk).num_rows
            if here := [row for row in rows if start <= row < end]:
                taken = table.read_row_group(chunk, columns=SHOWN_COLUMNS).take([row - start for row in here])
                records += [_preview(record, row) for record, row in zip(taken.to_pylist(), here, strict=True)]
            start = end
    return records


def _preview(record: dict[str, Any], row: int) -> dict[str, Any]:
    """A row as the page shows it: with its verdict in a word, and the beginnings of its texts."""
    correct = {True: "correct", False: "wrong", None: "score"}[record.pop("correct")]
    texts = {name: record[name][:PREVIEW_CHARS] for name in ("prompt", "response")}
    verdict = "error" if record["error"] is not None else correct
    return record | texts | {"row": row, "verdict": verdict, "tokens": record.pop("response_tokens")}


def problem_means(table: Path) -> dict[str, dict[str, float]]:
    """For each curve the mean of each problem's decided responses, by problem id, from a step's judged responses.

    The entropy is the mean of -log p over the sampled tokens, whose expectation it is; it is missing where the table
    has no log-probabilities. A problem all of whose verdicts are errors is missing in the rewards.
    """
    names = pq.read_schema(table).names
    rows = pq.read_table(table, columns=[*_CURVE_COLUMNS, *(["engine_logprobs"] if "engine_logprobs" in names else [])])
    rows = rows.filter(pc.not_equal(rows["outcome"], "excess"))
    problems = rows["problem_id"].to_numpy(zero_copy_only=False)
    ids, index = np.unique(problems.astype(str), return_inverse=True)
    tokens = rows["response_tokens"].to_numpy().astype(np.float64)
    values = {
        "reward": _means(rows["reward"].to_numpy(zero_copy_only=False), index, len(ids)),
        "accuracy": _means(_as_numbers(rows["correct"]), index, len(ids)),
        "entropy": _surprisal(rows, index, tokens, len(ids)),
        "length": _means(tokens, index, len(ids)),
    }
    return {
        name: {str(ids[i]): float(mean) for i, mean in enumerate(means) if np.isfinite(mean)}
        for name, means in values.items()
    }


def _as_numbers(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """A column of booleans as 0 and 1; null becomes NaN."""
    return np.asarray(column.cast(pa.int8()).to_numpy(zero_copy_only=False), np.float64)


def _means(values: NDArray[np.float64], index: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """The mean of the values of each index; NaN without any."""
    kept = np.isfinite(values)
    return _ratio(np.bincount(index[kept], values[kept], count), np.bincount(index[kept], minlength=count))


def _surprisal(
    rows: pa.Table, index: NDArray[np.int64], tokens: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    """The mean of -log p over the tokens of each index; NaN where none are stored."""
    if "engine_logprobs" not in rows.column_names or rows["engine_logprobs"].null_count:
        return np.full(count, np.nan)
    column = rows["engine_logprobs"].combine_chunks()
    logprobs = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(np.float64)
    owner = np.repeat(index, tokens.astype(np.int64))
    return _ratio(-np.bincount(owner, logprobs, count), np.bincount(index, tokens, count))


def _ratio(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    found = np.full(len(sums), np.nan)
    np.divide(sums, counts, out=found, where=counts > 0)
    return found
