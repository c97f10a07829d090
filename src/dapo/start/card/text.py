"""Texts of a run as Markdown that anyone may read: escaped, without folders, users and secrets."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dapo.config.data_spec import MIX, FileSource, parse_spec
from dapo.config.option_fields import option_text
from dapo.core.secrets import mask_options, mask_text
from dapo.core.terminal import printable
from dapo.core.text import one_line

SERVER = "a server"
"""What stands for the address of a server, which is that of a private machine."""
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~&])")
_BACKTICKS = re.compile(r"`+")
_FOLDER = r"[^\s/'\"`<>|*?\\{}()\[\]]+/"
# a folder begins a word: `Qwen/Qwen3-4B` is a name, and `</answer>` a mark
_FOLDERS = re.compile(rf"(?<![\w/<.~-])(?:(?:~[\w.-]*|\.{{1,2}})/(?:{_FOLDER})*|/(?:{_FOLDER})+)")
_PIPE = re.compile(r"(?<!\\)\|")
_ADDRESS = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]*://[^\s'"`,;)\]}]+""")


def escaped(text: str) -> str:
    """Return a text of one line that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", printable(one_line(text)))


def code(text: str) -> str:
    """Return a text of one line as code."""
    content = printable(one_line(text)) or " "
    fence = "`" * (1 + _longest_fence(content))
    # a space separates the text's own backticks from the fence, and is not shown
    space = " " if "`" in content else ""
    return f"{fence}{space}{content}{space}{fence}"


def block(text: str, language: str) -> str:
    """Return lines of code, whose own backticks cannot end it."""
    lines = [printable(line) for line in text.split("\n")]
    fence = "`" * max(3, 1 + _longest_fence(text))
    return "\n".join([f"{fence}{language}", *lines, fence])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown texts."""
    lines = [_row(head), _row(["---"] * len(head))]
    lines += map(_row, rows)
    return "\n".join(lines)


def public(value: Any) -> Any:
    """Copy the value of an option: no secret, no folder, no address of a server."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    return _without_places(mask_options(value))


def public_text(text: str) -> str:
    """Return a text without secrets, folders and addresses; each file keeps its name."""
    text = _ADDRESS.sub(SERVER, mask_text(text))
    # with the folder of the user first: its name may have a space
    for folder in (str(Path.cwd()), str(Path.home())):
        if len(folder) > 1:
            text = text.replace(f"{folder}/", "").replace(folder, "~")
    return _FOLDERS.sub("", text)


def public_data(spec: str | Mapping[str, Any]) -> Any:
    """Return the specification of a data source in which a file has its name, without folders."""
    if isinstance(spec, str):
        source = parse_spec(spec)
        return source.path.name if isinstance(source, FileSource) else public_text(spec)
    copy = dict(public(spec))
    if isinstance(spec.get("path"), str):
        copy["path"] = Path(spec["path"]).name
    if isinstance(spec.get(MIX), Mapping):
        copy[MIX] = {name: public_data(part) for name, part in spec[MIX].items()}
    return copy


def value_text(value: Any) -> str:
    """Return the value of an option as a configuration writes it, fit to be published."""
    value = public(value)
    return option_text(list(value) if isinstance(value, tuple) else value)


def _row(cells: Sequence[str]) -> str:
    # a table is split into cells before anything else is read, code too
    joined = " | ".join(_PIPE.sub(r"\\|", cell) for cell in cells)
    return f"| {joined} |"


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in value]
    return public_text(value) if isinstance(value, str) else value


def _longest_fence(text: str) -> int:
    return max(map(len, _BACKTICKS.findall(text)), default=0)
