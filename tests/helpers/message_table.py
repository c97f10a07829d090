"""A table of inputs and the messages that answer them, as a text file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

INDENT = "    "


@dataclass(frozen=True)
class Case:
    """A wrong input and its message."""

    section: str
    input: str
    message: str = field(compare=False, default="")


def read_cases(path: Path) -> list[Case]:
    """The cases: a line `== SECTION`, an input on a line of its own, its message indented below;
    `#` is a comment.
    """
    cases: list[Case] = []
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            section = line.removeprefix("== ")
        elif line.startswith(INDENT):
            last = cases[-1]
            lines = [*last.message.splitlines(), line.removeprefix(INDENT)]
            cases[-1] = Case(last.section, last.input, "\n".join(lines))
        elif line and not line.startswith("# "):
            cases.append(Case(section, line))
    return cases


def write_cases(path: Path, messages: Mapping[Case, str]) -> None:
    """Write the table again with these messages; cases without one keep theirs."""
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    lines = head
    section = ""
    for case in read_cases(path):
        if case.section != section:
            section = case.section
            lines += ["", f"== {section}"]
        lines += [
            "",
            case.input,
            *(INDENT + line for line in messages.get(case, case.message).splitlines()),
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def printable(text: str) -> str:
    """A text with control characters as escapes, except the ends of lines."""
    return "".join(
        each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text
    )
