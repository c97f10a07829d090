"""Reads the source of a call that is being made: the text of each of its arguments."""

import ast
import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any

MAX_CHARS = 100
"""The longest text of an argument that is repeated."""
UNKNOWN = "..."
"""Stands for an argument that has no short text."""


@dataclass(frozen=True)
class CallSite:
    """The source of a call, and the caller's variables."""

    function: str = ""
    """The text of what is called; empty: the source is not known."""
    keywords: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, ast.expr] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    def text_of(self, value: Any, keyword: str = "") -> str:
        """Return what the caller can type for a value: its text there, or `...`."""
        written = self.keywords.get(keyword, "")
        if written and len(written) <= MAX_CHARS and "\n" not in written:
            return written
        literal = literal_text(value)
        if literal is not None:
            return literal
        for name, variable in self.variables.items():
            if variable is value and name.isidentifier() and not name.startswith("_"):
                return name
        is_short = isinstance(value, list | tuple) and 0 < len(value) <= 8
        # rows of data are never shown
        if is_short and not any(isinstance(item, Mapping) for item in value):
            items = [self.text_of(item) for item in value]
            if UNKNOWN not in items:
                return f"[{', '.join(items)}]"
        return UNKNOWN


def literal_text(value: Any) -> str | None:
    """Return a number, a short text, or a short list or mapping of them, as it is typed."""
    if isinstance(value, list | tuple):
        items = [literal_text(item) for item in value]
        text = None if None in items else f"[{', '.join(map(str, items))}]"
    elif isinstance(value, Mapping):
        pairs = [(literal_text(key), literal_text(item)) for key, item in value.items()]
        text = None
        if not any(None in pair for pair in pairs):
            text = f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
    elif isinstance(value, str):
        quote = '"'
        text = repr(value)
        if quote not in value and "\\" not in text:
            text = f"{quote}{value}{quote}"
    elif value is None or type(value) in (bool, int, float):
        text = repr(value)
    else:
        return None
    if text is None or len(text) > MAX_CHARS:
        return None
    # rows of data are no options
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return None
    return text


def call_site(frame: FrameType | None, *, attribute: bool = False) -> CallSite:
    """Return the call that a frame makes at this moment.

    With `attribute` the frame only looks its function up, as an attribute.
    """
    if frame is None:
        return CallSite()
    variables = {**frame.f_globals, **frame.f_locals}
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    node = _call_in(source, frame, attribute=attribute)
    if node is None:
        return CallSite(variables=variables)
    nodes = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    return CallSite(
        ast.get_source_segment(source, node.func) or "",
        {name: ast.get_source_segment(source, value) or "" for name, value in nodes.items()},
        nodes,
        tuple(ast.get_source_segment(source, value) or "" for value in node.args),
        variables,
    )


def _call_in(source: str, frame: FrameType, *, attribute: bool) -> ast.Call | None:
    """Return the call in a source that a frame makes: no two calls end at the same place."""
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None:
        return None
    end = (positions[1], positions[3])
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        ending = node.func if attribute else node
        if (ending.end_lineno, ending.end_col_offset) == end:
            return node
    return None
