"""The judged responses of a step as a Parquet table, to query with DuckDB, pandas or pyarrow."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.core.files import atomic_file

_FIELD_CHARS = 200
ROWS_PER_CHUNK = 1024  # bounds memory: at the paper's lengths a whole step is gigabytes of ids


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


ROLLOUT_SCHEMA = pa.schema(
    [
        _required("step", pa.int64()),
        _required("group_id", pa.int64()),  # the problem's position in the stream
        _required("problem_id", pa.string()),
        _required("source", pa.string()),
        _required("sample", pa.int32()),  # index in the group
        _required("prompt", pa.string()),
        _required("response", pa.string()),
        _required("answer", pa.string()),
        pa.field("fields", pa.string()),  # the problem's other short columns as JSON; null: it has none
        pa.field("correct", pa.bool_()),  # null: the verifier only gives a score, or no verdict
        pa.field("score", pa.float64()),  # null: no verdict
        pa.field("components", pa.string()),  # the score of each verifier as JSON; null: there is one verifier only
        pa.field("error", pa.string()),  # why there is no verdict; null: there is one
        pa.field("reward", pa.float64()),  # shaped; null: no verdict
        pa.field("advantage", pa.float64()),  # null: did not train
        _required("prompt_tokens", pa.int32()),
        _required("response_tokens", pa.int32()),
        _required("finish", pa.string()),
        _required("outcome", pa.string()),
        _required("response_ids", pa.list_(pa.int32())),
        pa.field("engine_logprobs", pa.list_(pa.float32())),  # null: `log.rollouts: no-logprobs`
        _required("version", pa.int64()),
        pa.field("audit_correct", pa.bool_()),  # by audit.verifier; null: not audited, or it gives only a score
        pa.field("audit_score", pa.float64()),  # null: not audited, or no verdict
        pa.field("audit_error", pa.string()),  # why the audit has no verdict; null: it has one, or was not asked
    ]
)
"""One row per response. Tables of runs before there was an audit lack AUDIT_COLUMNS."""
AUDIT_COLUMNS = ("audit_correct", "audit_score", "audit_error")

# the values of the others are distinct: building a dictionary would be wasted time
_DICTIONARIES = [n for n in ROLLOUT_SCHEMA.names if n not in ("response", "response_ids", "engine_logprobs")]


def write_rollouts(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with exactly the columns of ROLLOUT_SCHEMA, of which AUDIT_COLUMNS may be missing.

    Equal rows give equal bytes (with one pyarrow version).
    Lone surrogates, which a tokenizer may decode to and UTF-8 cannot hold, become U+FFFD. The file is written
    atomically. Raises ValueError for a row with other columns.
    """
    with (
        atomic_file(Path(path)) as temporary,
        pq.ParquetWriter(temporary, ROLLOUT_SCHEMA, compression="zstd", use_dictionary=_DICTIONARIES) as writer,
    ):
        remaining = iter(rows)
        while chunk := list(islice(remaining, ROWS_PER_CHUNK)):
            writer.write_table(_table(chunk))


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    for row in rows:
        # pyarrow would silently drop unknown columns and fill missing ones with nulls
        if odd := sorted((row.keys() | set(AUDIT_COLUMNS)) ^ set(ROLLOUT_SCHEMA.names)):
            raise ValueError(f"a rollout row must have exactly the columns of ROLLOUT_SCHEMA; these differ: {odd}")
    columns = [column_of([row.get(field.name) for row in rows], field.type) for field in ROLLOUT_SCHEMA]
    return pa.Table.from_arrays(columns, schema=ROLLOUT_SCHEMA)


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of a table. Rows of numbers are copied as they lie in memory, without a Python object for each."""
    if kind == pa.string():
        values = [None if value is None else storable(value) for value in values]
    if not pa.types.is_list(kind) or any(value is None for value in values):
        return pa.array(values, kind)
    numbers = np.concatenate([np.asarray(row, kind.value_type.to_pandas_dtype()) for row in values])
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(numbers), type=kind)


def rows_of(column: pa.ListArray) -> list[NDArray[Any]]:
    """The rows of a column of lists without nulls, as views."""
    numbers, ends = column.values.to_numpy(), column.offsets.to_numpy()
    return [numbers[start:end] for start, end in pairwise(ends)]


def short_fields(fields: Mapping[str, Any], *, known: Sequence[str]) -> str | None:
    """The columns of a problem that are numbers or short texts, as JSON; None without any.

    A text that is among the `known` ones (the answer, the prompt) has a column of its own in the table.
    """
    kept = {
        name: value
        for name, value in fields.items()
        if isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) <= _FIELD_CHARS and value not in known)
    }
    return json.dumps(kept) if kept else None


def storable(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD, which UTF-8 can encode."""
    if text.isascii():  # a flag of the string: costs nothing
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
