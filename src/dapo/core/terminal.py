"""Prints text of models, data, verifiers and errors so that it cannot control the terminal.

All output goes through `print_text` or a `SafeConsole` (runs/console.py). Control characters
(escape sequences, carriage returns, the C1 set), invisible characters and those that change the
direction of text, line separators and halves of surrogate pairs appear as escapes.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

_INVISIBLE = (
    r"\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
UNSAFE = re.compile(rf"[\x00-\x08\x0b-\x1f{_INVISIBLE}]")
"""Characters of the categories Cc, Cf, Cs, Zl and Zp except line feed and tab."""
_UNSAFE_IN_JSON = re.compile(f"[{_INVISIBLE}]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def printable(text: str, encoding: str = "utf-8") -> str:
    """Escape unsafe characters, and characters that `encoding` lacks."""
    return UNSAFE.sub(_escape, text).encode(encoding, "backslashreplace").decode(encoding)


def printable_json(text: str) -> str:
    """Escape unsafe characters in the strings of JSON text; its value stays equal."""
    return _UNSAFE_IN_JSON.sub(lambda match: json.dumps(match[0])[1:-1], text)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return standard JSON that is safe to print; non-finite numbers become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return printable_json(text)


def print_json(value: Mapping[str, Any], *, on_one_line: bool = False) -> None:
    """Print a JSON object to the standard output, on one line, or indented on a terminal.

    Non-finite numbers become null; characters that the stream's encoding lacks become escapes.
    """
    indent = 2 if sys.stdout.isatty() and not on_one_line else None
    text = to_json(value, indent=indent)
    encoding = sys.stdout.encoding or "utf-8"
    if text.encode(encoding, "replace").decode(encoding) != text:
        text = _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text)
    print(text, flush=True)


@contextmanager
def stdout_to_stderr(wanted: bool = True) -> Iterator[None]:
    """Redirect the standard output to the standard error, so that only JSON follows."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def print_text(text: object = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text with unsafe characters escaped, by default to the standard output."""
    stream = sys.stdout if file is None else file
    # a stream that a caller has replaced may have no encoding
    print(printable(str(text), stream.encoding or "utf-8"), end=end, file=stream, flush=True)


def warn(text: str) -> None:
    """Print a warning to the standard error."""
    print_text(f"warning: {text}", file=sys.stderr)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if ord(character) > 127:
        return character.encode("ascii", "backslashreplace").decode()
    return repr(character)[1:-1]


def _finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
