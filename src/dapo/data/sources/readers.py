"""Rows of files (JSON Lines, JSON, Parquet, CSV) and Hugging Face data sets, each with its location
for messages.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from dapo.config.data_spec import FILE_TYPES, HubSource
from dapo.core.errors import DataError
from dapo.core.loading import reading_hub, require_package
from dapo.core.typed_values import MARK, of_json_values
from dapo.data.sources.rows import with_arrow_messages
from dapo.data.sources.separated import separated_rows

Rows: TypeAlias = Iterator[tuple[str, dict[str, Any] | DataError]]
"""The location of each row, `FILE, line 3`, and the row, or the error of a row that cannot be read.
"""
_ROWS_AT_ONCE = 1024


def read_rows(path: Path) -> Rows:
    """Yield the rows while the file is read. Raises DataError for a file that cannot be read."""
    _check(path)
    match path.suffix.lower():
        case ".parquet":
            return _parquet_rows(path)
        case ".csv" | ".tsv":
            return separated_rows(path, lambda: (text for _, text in _lines(path)))
        case ".json":
            return _json_rows(path)
        case _:
            return _jsonl_rows(path)


def require_file_type(path: Path, types: Sequence[str] = FILE_TYPES) -> str:
    """Return the suffix of `path` in lower case.

    Raises DataError for a file type that is none of `types`.
    """
    suffix = path.suffix.lower()
    if suffix not in types:
        endings = f"{', '.join(types[:-1])} or {types[-1]}"
        raise DataError(
            f"{path}: expected a file that ends in {endings}, got {path.suffix or 'no ending'!r}"
        )
    return suffix


def read_hub_rows(source: HubSource) -> Rows:
    """Yield (`hub:NAME:SPLIT, row 3`, row).

    Raises DataError without the package `datasets`, or if loading fails.
    """
    label = f"hub:{source.name}:{source.split}"
    require_package("datasets", purpose=label)
    import datasets

    try:
        with reading_hub():
            table = datasets.load_dataset(source.name, source.config, split=source.split)
    except ConnectionError:
        names = [name for name in (source.name, source.config) if name is not None]
        call = f"datasets.load_dataset({', '.join(map(repr, names))})"
        raise DataError(
            f"{label} is not in this machine's cache, and the Hugging Face hub was not reached;"
            f' load it where there is a network: python -c "import datasets; {call}", or name'
            " files that hold it in its place, such as {path: train.jsonl}"
        ) from None
    # errors of network, file system and data set scripts pass through the library
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise DataError(f"{label} cannot be loaded: {type(error).__name__}: {reason}") from None
    for number, row in enumerate(table, start=1):
        yield f"{label}, row {number}", with_arrow_messages(row)


def _check(path: Path) -> None:
    """Raise DataError, with what to do, if a data file cannot be read."""
    try:
        path.exists()
    except OSError as error:
        raise DataError(f"data file {str(path)[:60]}...: {error.strerror}") from None
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected one file: it {_contents(path)[1]}")
    parts = str(path).split(",")
    if not path.exists() and len(parts) > 1 and all(part.endswith(FILE_TYPES) for part in parts):
        raise DataError(f"no data file {path}; several files are typed as a list, '[{path}]'")
    if not path.parent.is_dir():
        raise DataError(f"no data file {path}; the folder {path.parent} does not exist")
    if not path.exists():
        names, contents = _contents(path.parent)
        similar_names = get_close_matches(path.name, names, n=1, cutoff=0.5)
        advice = f"the folder {contents}"
        if similar_names:
            advice = f"did you mean {path.parent / similar_names[0]}?"
        raise DataError(f"no data file {path}; {advice}")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} may not be read by this user; change its permissions")
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file but a pipe, a socket or a device; expected a file of"
            " problems"
        )
    require_file_type(path)


def _contents(folder: Path) -> tuple[list[str], str]:
    """Return the data files in a folder, and the first of them as part of a message."""
    names = sorted(child.name for child in folder.iterdir() if child.suffix.lower() in FILE_TYPES)
    if not names:
        return [], "holds no data file"
    return names, f"holds {', '.join(names[:5])}"


def _jsonl_rows(path: Path) -> Rows:
    expected = 'expected one object per line, like {"prompt": "...", "answer": "..."}'
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                text = _decoded(line, where, first=number == 1)
                if text.strip():
                    row = _require_object(_json(text, where, expected), where, expected)
                    yield where, _with_types(row, where) if MARK in text else row
            except DataError as error:
                yield where, error


def _with_types(row: Any, where: str) -> Any:
    """Return a row of JSON with the values of other types that dapo has written into it."""
    try:
        return of_json_values(row)
    except ValueError as error:
        return DataError(f"{where}: {error}")


def _require_object(row: object, where: str, expected: str) -> dict[str, Any] | DataError:
    if isinstance(row, dict):
        return row
    return DataError(f"{where}: {expected}, got a {type(row).__name__}")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text file with their ends, each with its location."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            yield where, _decoded(line, where, first=number == 1)


def _json_rows(path: Path) -> Rows:
    """Yield the objects of one JSON list."""
    expected = 'expected a list of objects, like [{"prompt": "...", "answer": "..."}]'
    content = "".join(text for _, text in _lines(path))
    rows = _json(content, str(path), expected, is_whole_file=True)
    if not isinstance(rows, list):
        raise DataError(f"{path}: {expected}, got a {type(rows).__name__}")
    expected = 'expected an object, like {"prompt": "...", "answer": "..."}'
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", _require_object(row, f"{path}, row {number}", expected)


def _decoded(line: bytes, where: str, *, first: bool) -> str:
    try:
        # editors on Windows begin a file with a byte-order mark
        return line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {line[error.start]:#04x} at column {error.start + 1}"
        raise DataError(f"{where}: not UTF-8 ({byte}); save the file as UTF-8") from None


def _json(text: str, where: str, expected: str, *, is_whole_file: bool = False) -> Any:
    """Return the value of a JSON text.

    Raises DataError, which names the line of the text if it is a whole file.
    """
    try:
        return _ROW_DECODER.decode(text)
    except json.JSONDecodeError as error:
        if is_whole_file:
            where += f", line {error.lineno}"
        advice = ""
        # a second object behind the first
        if is_whole_file and error.msg == "Extra data":
            advice = "; one object per line is .jsonl"
        reason = f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno}{advice})"
        raise DataError(f"{where}: {reason}; {expected}") from None
    except DuplicateKey as error:
        raise DataError(
            f"{where}: the key {error} occurs twice in one object; remove one of them"
        ) from None
    # a number of thousands of digits, very deep nesting
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read ({error}); {expected}") from None


class DuplicateKey(Exception):
    """A key that occurs twice in a JSON object; JSON readers would silently take the last value."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises DuplicateKey."""
    row = dict(pairs)
    if len(row) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise DuplicateKey(repr(counts.most_common(1)[0][0]))
    return row


# json.loads would make one for each row
_ROW_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _require_distinct_columns(fields: Iterable[Any], path: Path, parent: str = "") -> None:
    """Raise DataError if two columns, or fields of a struct, of an Arrow schema have one name."""
    import pyarrow as pa

    names = set()
    for field in fields:
        name = f"{parent}{field.name}"
        if name in names:
            raise DataError(f"{path}: there are two columns {name}; rename or drop one of them")
        names.add(name)
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            _require_distinct_columns(kind, path, f"{name}.")


def _parquet_rows(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            _require_distinct_columns(file.schema_arrow, path)
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", with_arrow_messages(row)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        position = f" after row {number}" if number else ""
        raise DataError(
            f"{path}: not readable as Parquet{position} ({' '.join(str(error).split())})"
        ) from None
