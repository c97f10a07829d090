"""Formats tables, numbers, counts and values of options for the commands."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text, TextType

from dapo.core.terminal import printable

if TYPE_CHECKING:
    from dapo.runs.console import SafeConsole

_ANY_WIDTH = 1000
TITLE: Mapping[str, Any] = {"title_style": "bold", "title_justify": "left"}


def say(
    console: "SafeConsole", text: str, *, label: str = "", indent: int = 0, style: str = ""
) -> None:
    """Print a text whose lines break between words at the width of the terminal.

    A path or a command that is longer than a line stays whole, to be copied.

    Args:
        console: prints the lines.
        text: the text, of which each line is wrapped.
        label: what stands before the first line.
        indent: the column in which all lines begin, at least behind the label.
        style: rich's style of the lines.
    """
    first = label.ljust(indent)
    following = " " * indent
    for paragraph in printable(text, console.encoding).split("\n"):
        lines = wrap(
            paragraph,
            console.width,
            initial_indent=first,
            subsequent_indent=following,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines or [first.rstrip()]:
            console.print(Text(line, style=style), soft_wrap=True)
        first = following


def right(*names: str, **options: Any) -> list[Column]:
    """Right-aligned columns, for numbers."""
    return [Column(name, justify="right", **options) for name in names]


def titled_table(title: TextType, *columns: str | Column, **options: Any) -> Table:
    """Return a table with a bold title above its left edge."""
    return Table(*columns, title=title, **TITLE, **options)


def ruled_table(first: Column, *numbers: str, **options: Any) -> Table:
    """Return a table with one rule below its head, of names and numbers."""
    return Table(first, *right(*numbers, no_wrap=True), box=SIMPLE_HEAD, pad_edge=False, **options)


def print_ruled(console: "SafeConsole", table: Table) -> None:
    """Print a `ruled_table`; on a narrow terminal in parts with some of the columns each.

    A number that is cut is another number.
    """
    left = list(range(1, len(table.columns)))
    while left:
        count = len(left)
        part = _columns_of(table, left)
        while count > 1 and not _fits(console, part):
            count -= 1
            part = _columns_of(table, left[:count])
        if left[0] > 1:
            part.title = None
        console.print(part)
        left = left[count:]


def _columns_of(table: Table, indices: Sequence[int]) -> Table:
    """Return a table of the first column of another one and of those at `indices`."""
    part = copy(table)
    chosen = [table.columns[index] for index in (0, *indices)]
    part.columns = [replace(column, _index=i) for i, column in enumerate(chosen)]
    return part


def _fits(console: "SafeConsole", table: Table) -> bool:
    """Return True if a table fits on the terminal, where words of the first column may wrap."""
    wide = console.options.update_width(_ANY_WIDTH)
    first = table.columns[0]
    names = [Measurement.get(console, wide, text) for text in (first.header, *first.cells)]
    widest = max(name.maximum for name in names)
    least = max(first.min_width or 0, *(name.minimum for name in names))
    spare = max(0, widest - least)
    return Measurement.get(console, wide, table).maximum - spare <= console.width


def number(value: float | None, style: str, missing: str = "") -> str:
    """Return a number in a format such as `.1%`; `missing` for None."""
    return missing if value is None else f"{value:{style}}"
