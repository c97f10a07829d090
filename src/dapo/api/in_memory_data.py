"""Data and rewards in the caller's memory: rows become a file, a reward gets a name."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from dapo.core.errors import DataError, RewardError
from dapo.core.files import PRIVATE, atomic_file
from dapo.core.terminal import to_json, warn
from dapo.core.typed_values import to_json_values
from dapo.data.sources.rows import data_value, describe_texts, lost_type, with_arrow_messages

TRAIN_FILE = "train.jsonl"
HELD_OUT_FILE = "held_out.jsonl"
DEMONSTRATIONS_FILE = "demonstrations.jsonl"
Data: TypeAlias = Any
"""A data source (path, `hub:`, `builtin:`, `gym:`, a mapping), or rows: a list of dicts, a
DataFrame, a Dataset.
"""


def is_source(data: object) -> bool:
    """Return True if `data` names a data source, False for rows."""
    if isinstance(data, Mapping) and any(hasattr(value, "column_names") for value in data.values()):
        raise DataError(
            f"data: got several data sets ({', '.join(map(str, data))}); expected one:"
            " data={...}[NAME]"
        )
    if (
        isinstance(data, list | tuple)
        and data
        and all(isinstance(item, str | Path) for item in data)
    ):
        return True  # several sources
    return isinstance(data, str | Path | Mapping)


def write_rows(path: Path, data: Data) -> int:
    """Write rows as JSON lines and return their number; dates and decimals keep their types.

    Raises DataError for values of other types.
    """
    count = 0
    texts: dict[str, str] = {}
    with atomic_file(path, PRIVATE) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for count, row in enumerate(_rows(data), start=1):
            where = f"data, row {count}"
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{where}: expected a mapping of columns to values, got {type(row).__name__}"
                )
            values = {
                str(name): data_value(value, f"{where}: {name}") for name, value in row.items()
            }
            file.write(to_json(to_json_values(values)) + "\n")
            for name, value in row.items():
                if (kind := lost_type(str(name), value)) is not None:
                    texts.setdefault(str(name), kind)
    if not count:
        raise DataError("data: no rows")
    if texts:
        warn(f"data: {describe_texts(texts)}")
    return count


@contextmanager
def row_errors(files: Mapping[str, object]) -> Iterator[None]:
    """Name the argument's row in errors of the block, instead of the line of a file."""
    try:
        yield
    except DataError as error:
        text = str(error)
        for argument, file in files.items():
            text = text.replace(f"{file}, line ", f"{argument}, row ").replace(str(file), argument)
        error.args = (
            re.sub(r"name yours with \{path: FILE, (\w+): COLUMN\}", r"rename yours to \1", text),
        )
        raise


def _rows(data: Data) -> Iterator[Any]:
    for method, arguments in (("to_pylist", ()), ("to_dicts", ()), ("to_dict", ("records",))):
        if hasattr(data, method) and not (method == "to_dict" and hasattr(data, "column_names")):
            rows = getattr(data, method)(*arguments)
            yield from map(with_arrow_messages, rows) if method == "to_pylist" else rows
            return
    if hasattr(data, "column_names"):  # a data set of the package datasets
        yield from map(with_arrow_messages, data)
        return
    if not isinstance(data, Iterable):
        expected = (
            "a path, hub:NAME, builtin:TASKS, gym:TASKS, a list of dicts, a DataFrame or a Dataset"
        )
        raise DataError(f"data: expected {expected}, got {type(data).__name__}")
    yield from data


Reward: TypeAlias = Any
"""A verifier's name, `module:function`, a function or another callable; a list of them, or a
mapping to weights.
"""


def weights_by_name(reward: Reward, name_of: Callable[[Any], str]) -> dict[str, float]:
    """Return the weights of a reward, one verifier or several, by name; `name_of` names a function.

    Raises RewardError for an element that is neither a name nor a function, and for a name that
    occurs twice.
    """
    if isinstance(reward, Mapping):
        weighted = list(reward.items())
    else:
        several = reward if isinstance(reward, list | tuple) else [reward]
        weighted = [
            verifier if isinstance(verifier, tuple) else (verifier, 1.0) for verifier in several
        ]
    weights: dict[str, float] = {}
    for verifier, weight in weighted:
        if not isinstance(verifier, str) and not callable(verifier):
            raise RewardError(
                "reward: expected a verifier's name, module:function, a function, or several of"
                f" them, got {verifier!r}"
            )
        name = verifier if isinstance(verifier, str) else name_of(verifier)
        if name in weights:
            raise RewardError(
                f"reward: {name.removeprefix(':')} is listed twice; list it once, with a weight"
            )
        weights[name] = weight
    return weights


def verifier_option(weights: Mapping[str, float]) -> str | Mapping[str, float]:
    """Return the value of `reward.verifier` for names with their weights."""
    return next(iter(weights)) if list(weights.values()) == [1.0] else weights
