"""The table of judged responses as pandas has it: JSON columns as columns of their values."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dapo.core.errors import DataError
from dapo.core.text import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

PREFIXES = {"fields": "column", "components": "component"}
"""The columns of rollouts/*.parquet whose JSON becomes columns, `column.NAME` for each name in it."""
_OTHER_NAMES = {
    "accuracy": "correct",
    "completion": "response",
    "completions": "response",
    "ground_truth": "answer",
    "label": "answer",
    "length": "response_tokens",
    "logprobs": "engine_logprobs",
    "output": "response",
    "solution": "answer",
    "text": "response",
    "tokens": "response_ids",
}
"""Columns by their names in other systems."""


def expanded(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Replace `fields` by `column.NAME`, `components` by `component.NAME`; read `episode`, `branches`.

    The columns of the data are behind its `answer`, in the order of their first row.
    """
    for name, prefix in PREFIXES.items():
        if name not in frame:
            continue
        position = list(frame.columns).index(name)
        # pandas reads null as None or NaN
        records = [json.loads(text) if isinstance(text, str) else {} for text in frame.pop(name)]
        keys = dict.fromkeys(key for record in records for key in record)
        for offset, key in enumerate(keys):
            values = [record.get(key) for record in records]
            frame.insert(position + offset, f"{prefix}.{key}", values)
    if "episode" in frame:
        frame["episode"] = _read_json(frame["episode"])
    if "branches" in frame:
        stored = _read_json(frame["branches"])
        frame["branches"] = [[] if value is None else value["branches"] for value in stored]
    return frame


def _read_json(texts: Iterable[Any]) -> list[Any]:
    """Return the values of a column; None where it has none."""
    return [json.loads(text) if isinstance(text, str) else None for text in texts]


def stored_columns(columns: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the columns of a file that hold these columns of a frame.

    Args:
        columns: names as `expanded` has them, or as the file has them.
        known: the columns of the file.

    Raises:
        DataError: the file has no such column.
    """
    known = list(known)
    stored = []
    for column in columns:
        name = column
        for json_name, prefix in PREFIXES.items():
            if column.startswith(f"{prefix}."):
                name = json_name
        if name not in known:
            near = did_you_mean(_OTHER_NAMES.get(column, column), known, otherwise="")
            raise DataError(
                f"there is no column {column!r}; {near + ' ' if near else ''}The columns are"
                f" {', '.join(name for name in known if name not in PREFIXES)}, column.NAME for a"
                " column of the data, and component.NAME for one of several rewards"
            )
        stored.append(name)
    return list(dict.fromkeys(stored))


def selected(frame: "pd.DataFrame", columns: Sequence[str]) -> "pd.DataFrame":
    """Return columns of a frame of `expanded`. Raises DataError if no row has one of them."""
    for column in columns:
        if column not in frame:
            names = [str(name) for name in frame]
            own = [name for name in names if name.startswith(column.partition(".")[0])]
            raise DataError(
                f"no response has a column {column!r}; there are {', '.join(own) or 'none'}"
            )
    return frame[list(columns)]
