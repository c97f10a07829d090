"""Read rows of CSV and TSV files: lines as records, and the types of columns.

All values of a column have one type: integer, number, boolean, list of JSON objects (messages), or
text. It is text if converting a value and writing it again would change it: `007`, `1.50` and
`1,000` stay as they are. An empty value is None. pandas and pyarrow.csv would read 007 as 7, and
accept or fill up some broken records.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from dapo.core.errors import DataError

_BOOLEANS = {
    "true": True,
    "false": False,
    "True": True,
    "False": False,
    "TRUE": True,
    "FALSE": False,
}
_MAX_VALUE_CHARS = 2**31 - 1


def separated_rows(
    path: Path, lines: Callable[[], Iterator[str]]
) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """Yield (`FILE, line 3`, row or its error) for each record.

    Raises DataError for a file that cannot be read.

    `.tsv` is separated by tabs, `.csv` by the separator most frequent in its header. Each call of
    `lines` begins anew: they are read twice, because the type of a column depends on all of its
    values.
    """
    types = _column_types(_records(path, lines()))
    for where, names, values in _records(path, lines()):
        if isinstance(values, DataError):
            yield where, values
            continue
        row = {}
        for name, value in zip(names, values, strict=True):
            row[name] = types[name](value) if value else None
        yield where, row


def _records(
    path: Path, lines: Iterator[str]
) -> Iterator[tuple[str, Sequence[str], list[str] | DataError]]:
    """Yield each record's location, columns, and values or error, without an unnamed index."""
    head = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    else:
        return
    delimiter = max((",", ";", "\t"), key=head[-1].count)
    if path.suffix.lower() == ".tsv":
        delimiter = "\t"
    csv.field_size_limit(_MAX_VALUE_CHARS)  # for the whole process; the default is 128 KiB
    names: list[str] | None = None
    has_index = False
    for number, values in _parsed(path, chain(head, lines), delimiter):
        where = f"{path}, line {number}"
        if names is None:
            has_index = values[0].strip() == ""  # pandas writes an index without a name
            names = _header(values[has_index:], where)
            continue
        num_expected = len(names) + has_index
        if len(values) != num_expected:
            text = f"{where}: {len(values)} values, expected {num_expected} ({', '.join(names)})"
            advice = f"put a value that holds {delimiter!r} into double quotes"
            yield where, names, DataError(f"{text}; {advice}")
        else:
            yield where, names, values[has_index:]


def _parsed(path: Path, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line's number and the values of each record that has a value."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        # a value in quotes may have several lines
        first_line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error):
                reason = "a double quote that is opened here is not closed"
            else:
                reason = str(error)
            raise DataError(f"{path}, line {first_line}: not valid CSV ({reason})") from None
        if values is None:
            return
        if any(map(str.strip, values)):
            yield first_line, values


def _header(names: list[str], where: str) -> list[str]:
    """Return the names of the columns. Raises DataError if one is missing or occurs twice."""
    names = [name.strip() for name in names]
    for column, name in enumerate(names, start=1):
        if not name:
            raise DataError(
                f"{where}: column {column} has no name; the first line must name the columns"
            )
        if names.count(name) > 1:
            raise DataError(f"{where}: there are two columns {name}; rename or drop one of them")
    return names


def _column_types(
    records: Iterable[tuple[str, Sequence[str], list[str] | DataError]],
) -> Mapping[str, Callable[[str], Any]]:
    """Return the converter of each column with values: the first of `_TYPES` that reads them."""
    fitting: dict[str, list[int]] = {}  # of each column, the types that read all values so far
    for _, names, values in records:
        if isinstance(values, DataError):
            continue
        for name, value in zip(names, values, strict=True):
            if value:
                candidates = fitting.get(name, _ALL_TYPES)
                fitting[name] = [kind for kind in candidates if _TYPES[kind][1](value)]
    # text is the last type and reads everything
    return {name: _TYPES[kinds[0]][0] for name, kinds in fitting.items()}


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    # 18 digits: int64, which Parquet and other readers have
    return digits.isascii() and digits.isdigit() and len(digits) < 19 and str(int(text)) == text


def _is_number(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    # `nan` and `inf` may be words, and are no numbers of JSON
    if not math.isfinite(number):
        return False
    # an integer of 17 digits may be no number of this type
    return repr(number) == text or (_is_integer(text) and int(number) == int(text))


def _is_json_objects(text: str) -> bool:
    if not text.startswith("["):
        return False
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(content, list) or not content:
        return False
    return all(isinstance(item, dict) for item in content)


_TYPES: tuple[tuple[Callable[[str], Any], Callable[[str], bool]], ...] = (
    (int, _is_integer),
    (float, _is_number),
    (_BOOLEANS.__getitem__, _BOOLEANS.__contains__),
    (json.loads, _is_json_objects),
    (str, lambda text: True),
)
_ALL_TYPES = list(range(len(_TYPES)))
