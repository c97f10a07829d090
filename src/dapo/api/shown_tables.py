"""What a notebook and a terminal show of a table: a sentence, and rows that fit on the screen."""

import math
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Protocol

from dapo.core.terminal import printable
from dapo.core.text import one_line, shorten

if TYPE_CHECKING:
    import pandas as pd

SHOWN_ROWS = 10
"""Rows of a long table that are shown: the first and the last ones."""
MAX_CHARS = 200
"""Characters of a text in a cell; a terminal shows fewer."""
_GAP = 2
_LONGEST_WORD = 12
_LEAST_TEXT = 6
LEFT = "text-align:left;vertical-align:top"
WRAPPED = f"{LEFT};white-space:normal;overflow-wrap:anywhere"


class Shown(Protocol):
    """What is shown of an object."""

    def text(self) -> str: ...

    def html(self) -> str: ...


@dataclass(frozen=True)
class ShownTable:
    """A sentence, rows of cells by column, and a remark below them."""

    headline: str
    rows: Sequence[Mapping[Any, Any]] = ()
    remark: str = ""
    dropped: int = 0
    """Rows that are left out in the middle of the table."""

    def text(self) -> str:
        lines = [self.headline]
        if self.rows:
            lines.append(_text_table(self._cells()))
        if self.remark:
            lines.append(_wrapped(self.remark))
        return printable("\n".join(lines))

    def html(self) -> str:
        parts = [f"<p><b>{escape(printable(self.headline))}</b></p>"]
        if self.rows:
            parts.append(html_table(self._cells()))
        if self.remark:
            parts.append(f"<p><small>{escape(printable(self.remark))}</small></p>")
        return "".join(parts)

    def _cells(self) -> list[dict[str, str]]:
        """Return the cells of all rows as text, without columns that are empty."""
        rows = [{str(name): cell_text(cell) for name, cell in row.items()} for row in self.rows]
        names = [name for name in rows[0] if any(row[name] for row in rows)]
        cells = [{name: row[name] for name in names} for row in rows]
        if self.dropped:
            cells.insert(len(cells) // 2, dict.fromkeys(names, "..."))
        return cells


def _wrapped(text: str, label: str = "") -> str:
    """Return a text in lines of the terminal's width, behind a label."""
    width = shutil.get_terminal_size().columns
    indent = " " * len(label)
    lines = textwrap.wrap(
        text, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
    )
    return "\n".join(lines)


def ends_of(frame: "pd.DataFrame") -> tuple["pd.DataFrame", int]:
    """Return the rows of a frame that are shown, and the number of those between them."""
    import pandas as pd

    dropped = len(frame) - SHOWN_ROWS
    if dropped <= 0:
        return frame, 0
    half = SHOWN_ROWS // 2
    # as a plain frame: the subclass would show itself
    return pd.concat([pd.DataFrame(frame[:half]), pd.DataFrame(frame[-half:])]), dropped


def cell_text(value: Any) -> str:
    """Return a value as one line of text; empty for None and a missing number."""
    if value is None or value is Ellipsis:
        return ""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return shorten(one_line(str(value)), MAX_CHARS, keep="ends")


def html_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table whose texts wrap; a long name breaks behind its slashes."""
    head = "".join(
        f"<th style='{LEFT}'>{escape(printable(name)).replace('/', '/<wbr>').replace('_', '_<wbr>')}</th>"
        for name in rows[0]
    )
    body = "".join(f"<tr>{''.join(_html_cell(cell) for cell in row.values())}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_cell(cell: str) -> str:
    # a number or a word stays whole
    style = LEFT if len(cell) <= _LONGEST_WORD else WRAPPED
    return f"<td style='{style}'>{escape(printable(cell))}</td>"


def _text_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table that is not wider than the terminal: long texts are cut."""
    from rich.table import Table

    from dapo.runs.console import SafeConsole

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    width = shutil.get_terminal_size().columns
    for name, column_width in _column_widths(rows, width).items():
        table.add_column(_head(name), no_wrap=True, overflow="ellipsis", width=column_width)
    for row in rows:
        table.add_row(*row.values())
    stream = StringIO()
    console = SafeConsole(
        file=stream, width=width, color_system=None, force_terminal=False, force_jupyter=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _head(name: str) -> str:
    """Return the name of a column in several lines: the names of metrics are long."""
    return re.sub(r"(?<=[/_])", "\n", name)


def _column_widths(rows: Sequence[Mapping[str, str]], width: int) -> dict[str, int]:
    """Return the widths of the columns: numbers and words are whole, texts share what is left."""
    from rich.cells import cell_len

    needed: dict[str, int] = {}
    texts: list[str] = []
    for name in rows[0]:
        cells = [*(row[name] for row in rows), *_head(name).split("\n")]
        needed[name] = max(cell_len(cell) for cell in cells)
        if any(len(row[name]) > _LONGEST_WORD for row in rows):
            texts.append(name)
    widths = dict(needed)
    gaps = _GAP * (len(needed) - 1)
    left = width - gaps - sum(needed[name] for name in needed if name not in texts)
    # the shortest text first: what it does not need is left for the others
    texts.sort(key=lambda name: needed[name])
    for index, name in enumerate(texts):
        share = left // (len(texts) - index)
        widths[name] = min(needed[name], max(_LEAST_TEXT, share))
        left -= widths[name]
    return widths


@dataclass(frozen=True)
class Card:
    """A heading with lines of label and text, which are shown whole."""

    heading: str
    lines: Sequence[tuple[str, str]]
    colour: str = ""


@dataclass(frozen=True)
class ShownCards:
    """A sentence, and a card for each finding below it."""

    headline: str
    cards: Sequence[Card] = field(default_factory=tuple)

    def text(self) -> str:
        lines = [self.headline]
        for card in self.cards:
            lines += ["", card.heading]
            lines += [_wrapped(text, f"  {label:<10}") for label, text in card.lines]
        return printable("\n".join(lines))

    def html(self) -> str:
        parts = [f"<p><b>{escape(printable(self.headline))}</b></p>"]
        for card in self.cards:
            lines = "".join(
                f"<tr><td style='{LEFT};opacity:.65'>{escape(label)}</td>"
                f"<td style='{WRAPPED}'>{escape(printable(text))}</td></tr>"
                for label, text in card.lines
            )
            parts.append(
                f"<div style='border-left:4px solid {card.colour};padding:.1em .8em;margin:.8em"
                f" 0'><b>{escape(printable(card.heading))}</b><table>{lines}</table></div>"
            )
        return "".join(parts)
