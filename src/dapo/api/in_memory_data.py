"""Data and rewards in the caller's memory: rows become a file, a reward gets a name."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dapo.config.data_spec import KINDS, MIX
from dapo.core.errors import DataError, RewardError
from dapo.core.files import PRIVATE, atomic_file, make_private_folder
from dapo.core.terminal import to_json, warn
from dapo.core.text import quoted
from dapo.core.typed_values import to_json_values
from dapo.data.sources.rows import (
    PROMPT_COLUMNS,
    data_value,
    describe_texts,
    lost_type,
    with_arrow_messages,
)

TRAIN_FILE = "train.jsonl"
HELD_OUT_FILE = "held_out.jsonl"
DEMONSTRATIONS_FILE = "demonstrations.jsonl"
Data: TypeAlias = Any
"""A data source (path, `hub:`, `builtin:`, `gym:`, a mapping), or rows: a list of dicts, a
DataFrame, a Dataset; a mapping of names to several of them.
"""


_SOURCE_KEYS = frozenset({*KINDS, MIX})
_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class StoredData:
    """The data of a call: the source that a run reads, and the rows that are written for it."""

    source: Any
    """The value of the option; None without data."""
    rows: Mapping[Path, Data] = field(default_factory=dict)
    """The rows by the file to write."""
    labels: Mapping[str, Path] = field(default_factory=dict)
    """The same files by what errors call them: `data`, `eval_data['easy']`."""

    def write(self) -> None:
        """Write the rows. Raises DataError, which names the argument and the row."""
        names = {file: label for label, file in self.labels.items()}
        for file, rows in self.rows.items():
            make_private_folder(file.parent)
            write_rows(file, rows, name=names.get(file, "data"))


def stored_data(data: Data, file: Path, *, argument: str) -> StoredData:
    """Return the source of an argument: rows are to be written to `file`, named sets beside it.

    Raises DataError for a data set in several parts where one is expected.

    Example:
        >>> stored_data({"easy": [{"prompt": "1 + 1 ="}]}, Path("held_out.jsonl"), argument="eval_data").source
        {'mix': {'easy': 'held_out-easy.jsonl'}}
    """
    if data is None:
        return StoredData(None)
    data = _rows_of_columns(data, argument)
    _require_no_questions(data, argument)
    sets = _named_sets(data)
    is_dataset_dict = isinstance(data, Mapping) and type(data) is not dict
    if sets is not None and is_dataset_dict and argument != "eval_data":
        if len(sets) > 1:
            first, *others = map(str, sets)
            raise DataError(
                f"{argument}: got several data sets ({', '.join(map(str, sets))}); name those to"
                f" use: {argument}=DATA[{first!r}], eval_data=DATA[{others[0]!r}]"
            )
        data = next(iter(sets.values()))
        sets = None
    if sets is None:
        if is_source(data):
            return StoredData(str(data) if isinstance(data, Path) else data)
        return StoredData(str(file), {file: data}, {argument: file})
    parts: dict[str, Any] = {}
    rows: dict[Path, Data] = {}
    labels: dict[str, Path] = {}
    for name, part in sets.items():
        if not _SET_NAME.fullmatch(str(name)):
            raise DataError(
                f"{argument}: the name of a data set has letters, digits, - and _, got {name!r}"
            )
        parts[str(name)] = str(part) if isinstance(part, Path) else part
        if not is_source(part):
            own_file = file.with_name(f"{file.stem}-{name}{file.suffix}")
            parts[str(name)] = str(own_file)
            rows[own_file] = part
            labels[f"{argument}[{str(name)!r}]"] = own_file
    return StoredData({MIX: parts}, rows, labels)


ARGUMENTS = {
    "data.train": "data",
    "data.eval": "eval_data",
    "data.demonstrations": "demonstrations",
}
"""The arguments whose rows are copied into the run directory, by option."""
_FILES = {
    "data.train": TRAIN_FILE,
    "data.eval": HELD_OUT_FILE,
    "data.demonstrations": DEMONSTRATIONS_FILE,
}


def stored_arguments(
    folder: Path,
    data: Data,
    eval_data: Data,
    options: Mapping[str, Any],
    base: Mapping[str, Any],
) -> tuple[dict[str, StoredData], dict[str, Any]]:
    """Return the data of a call by option, with files in `folder`, and its other keywords.

    Args:
        folder: the folder of the files, which are not written yet.
        data: the training data: demonstrations if the options imitate such.
        eval_data: the held-out data.
        options: the other keywords of the call.
        base: the configuration below them.
    """
    keywords = dict(options)
    demonstrations = keywords.pop("demonstrations", None)
    settings = {**base, **options}
    is_supervised = settings.get("preset") == "sft" or settings.get("schedule") == "supervised"
    if is_supervised and demonstrations is None:
        demonstrations = data
        data = None
    given = {"data.train": data, "data.eval": eval_data}
    if demonstrations is not None:
        given["data.demonstrations"] = demonstrations
        keywords = {"preset": "sft"} | keywords
    stored = {
        option: stored_data(value, folder / _FILES[option], argument=ARGUMENTS[option])
        for option, value in given.items()
    }
    return stored, keywords


def _require_no_questions(data: Data, argument: str) -> None:
    """Raise DataError for a list of questions, which would be taken for files."""
    if not isinstance(data, list | tuple) or not is_source(data):
        return
    if any(re.search(r"\s", str(item)) and not Path(item).exists() for item in data):
        raise DataError(
            f"{argument}: got a list of texts, which are files; rows are dicts,"
            ' {"prompt": QUESTION, "answer": ANSWER}'
        )


_QUESTIONS = (*PROMPT_COLUMNS, "messages")


def _rows_of_columns(data: Data, argument: str) -> Data:
    """Return the rows of a mapping from columns to lists; other data as they are.

    Raises DataError for a single row.
    """
    if type(data) is not dict or data.keys() & _SOURCE_KEYS:
        return data
    columns = [name for name in _QUESTIONS if name in data]
    if not columns:
        return data
    data = {name: _listed(values) for name, values in data.items()}
    question = data[columns[0]]
    is_one_row = isinstance(question, str) or (
        columns[0] != "messages" and bool(question) and _are_rows(question)
    )
    if is_one_row:
        raise DataError(f"{argument}: got one row; rows are a list of dicts: {argument}=[ROW]")
    lengths = {
        name: len(values) if isinstance(values, Sequence) and not isinstance(values, str) else None
        for name, values in data.items()
    }
    if None in lengths.values() or len(set(lengths.values())) > 1:
        shown = ", ".join(
            f"{name}: {'no list' if length is None else length}" for name, length in lengths.items()
        )
        raise DataError(
            f"{argument}: expected a list of dicts, or columns that are lists of one length, got"
            f" {shown}"
        )
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


def _listed(values: Any) -> Any:
    """Return an array, a Series or a column of Arrow as a list, and other values as they are."""
    for method in ("tolist", "to_list", "to_pylist"):
        if hasattr(values, method):
            return getattr(values, method)()
    return values


def _named_sets(data: Data) -> Mapping[str, Data] | None:
    """Return the data sets of a mapping by name, `{"mix": {...}}` or not; None: it has none."""
    if not isinstance(data, Mapping):
        return None
    sets = data[MIX] if data.keys() == {MIX} else data
    if not isinstance(sets, Mapping) or (sets is data and data.keys() & _SOURCE_KEYS):
        return None
    return sets if any(_are_rows(part) for part in sets.values()) else None


def _are_rows(data: object) -> bool:
    """Return True for rows: a table, or a list whose first item is a row."""
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], Mapping)
    return not isinstance(data, str | Path | Mapping) and (
        isinstance(data, Iterator) or any(hasattr(data, name) for name in _TABLE_METHODS)
    )


_TABLE_METHODS = ("column_names", "to_pylist", "to_dicts", "to_dict")


def is_source(data: object) -> bool:
    """Return True if `data` names a data source, False for rows."""
    if (
        isinstance(data, list | tuple)
        and data
        and all(isinstance(item, str | Path) for item in data)
    ):
        return True  # several sources
    return isinstance(data, str | Path | Mapping)


def write_rows(path: Path, data: Data, *, name: str = "data") -> int:
    """Write rows as JSON lines and return their number; dates and decimals keep their types.

    `name` is what errors call the rows: the argument. Raises DataError for values of other types.
    """
    count = 0
    texts: dict[str, str] = {}
    # all mappings of a table's column have the same keys
    is_table = any(hasattr(data, name) for name in _TABLE_METHODS)
    with atomic_file(path, PRIVATE) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for count, row in enumerate(_rows(data, name), start=1):
            where = f"{name}, row {count}"
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{where}: expected a mapping of columns to values, got {type(row).__name__}"
                )
            values = {
                str(column): data_value(value, f"{where}: {column}")
                for column, value in row.items()
            }
            if is_table:
                values = with_arrow_messages(values)
            file.write(to_json(to_json_values(values)) + "\n")
            for column, value in row.items():
                if (kind := lost_type(str(column), value)) is not None:
                    texts.setdefault(str(column), kind)
    if not count:
        raise DataError(f"{name}: no rows")
    if texts:
        warn(f"{name}: {describe_texts(texts)}")
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


def _rows(data: Data, name: str) -> Iterator[Any]:
    for method, arguments in (("to_pylist", ()), ("to_dicts", ()), ("to_dict", ("records",))):
        if hasattr(data, method) and not (method == "to_dict" and hasattr(data, "column_names")):
            yield from getattr(data, method)(*arguments)
            return
    if not isinstance(data, Iterable):
        expected = (
            "a path, hub:NAME, builtin:TASKS, gym:TASKS, a list of dicts, a DataFrame or a Dataset"
        )
        raise DataError(f"{name}: expected {expected}, got {type(data).__name__}")
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
                f" them, got {quoted(verifier)}"
            )
        name = verifier if isinstance(verifier, str) else name_of(verifier)
        if name in weights:
            raise RewardError(
                f"reward: {re.sub(r'^[0-9]*:?', '', name)} is listed twice; list it once, with a weight"
            )
        weights[name] = weight
    return weights


def verifier_option(weights: Mapping[str, float]) -> str | Mapping[str, float]:
    """Return the value of `reward.verifier` for names with their weights."""
    return next(iter(weights)) if list(weights.values()) == [1.0] else weights
