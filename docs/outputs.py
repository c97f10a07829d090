r"""Repeats the commands whose outputs the pages show; `make docs-outputs` renews the outputs.

A block that shows an output stands below a comment that says how it is made:

    <!-- output: dapo train my.yaml --run-dir runs/first
    lines: step +(0|1|8|16)\b
    differs: numbers
    takes: 4 min -->

| line | meaning |
|---|---|
| `output` | The command. A block that begins with `$ ` shows it. |
| `before` | A command that runs first; its output is not shown. |
| `types` | What is typed at each `> ` of the command, with ` | ` between the lines. |
| `lines` | A regular expression: `...` stands for lines in which it finds nothing. |
| `differs` | What differs on other machines: `measures` (times, rates, sizes, dates and paths); |
|           | `numbers`, these included; `text`, what a model writes included: lines with a number |
|           | do not count. Without it, every word must agree. |
| `takes` | The time of an expensive command, which `--cheap` leaves out. |

A page's commands run in its order in one folder, which holds the page's files: the blocks whose
first line is a comment with their name. A terminal of 80 columns shows the outputs.
"""

import argparse
import difflib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 80
FIELDS = ("output", "before", "types", "lines", "differs", "takes")
DIFFERS = ("", "measures", "numbers", "text")
SHOWN = re.compile(
    r"^<!-- (?P<fields>output: .*?) -->\n+```text\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)
NAMED_FILE = re.compile(
    r"^```(?:python|yaml)\n(?P<text># (?P<name>\w+\.\w+)\n.*?)^```", re.DOTALL | re.M
)

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_MEASURED = {
    "DATE": r"\b\d{8}-\d{6}\b|\b\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d)?)?\b",
    "RATE": rf"{_NUMBER} (?:trained )?(?:tok|tokens|steps)/s\b",
    "SIZE": rf"(?:{_NUMBER} of )?{_NUMBER} ?(?:[kKMGT]i?)?B\b",
    "TIME": rf"\b\d+[dhm]\d\d[hms]\b|{_NUMBER} ?(?:ms|s|m|h|seconds?|minutes?|hours?)\b",
    "PATH": r"(?<![\w./])/[\w.-]+(?:/[\w.-]+)+",
}
"""What a machine's speed, disk and clock decide, by the word that stands for it."""
_ANY_NUMBER = re.compile(rf"[+-]?{_NUMBER}\s*%?")
_DRAWN = re.compile(r"[#▁-█━]+|(?<=[─═])[─═]+")
"""Bars and curves, and the rules of a table, which are as long as its numbers are wide."""


@dataclass(frozen=True)
class Shown:
    """A block of a page that shows an output."""

    source: str
    """The comment and the block, as they stand in the page."""
    command: str
    text: str
    """What the page shows, with the command if that stands above it."""
    before: str = ""
    types: str = ""
    lines: str = ""
    differs: str = ""
    takes: str = ""

    def show(self, output: str) -> str:
        """Return what the page shows of an output."""
        lines = [line.rstrip() for line in output.splitlines()]
        if self.lines:
            lines = list(_with_gaps(lines, re.compile(self.lines)))
        text = "\n".join(lines).strip("\n") + "\n"
        if self.text.startswith("$ "):
            text = f"$ {self.command}\n{text}"
        return text


Runner = Callable[[str, str, Path], str]
"""Carries out a command, types lines at its prompts, in a folder; returns its output."""


def shown_in(page: str) -> list[Shown]:
    """Return the blocks of a page that show outputs, in its order.

    Raises ValueError if a comment says something else than in this file's first lines.
    """
    return [_read(match) for match in SHOWN.finditer(page)]


def _read(match: re.Match[str]) -> Shown:
    fields = dict.fromkeys(FIELDS, "")
    for line in match["fields"].splitlines():
        name, _, value = line.partition(": ")
        if name not in fields:
            raise ValueError(f"{line!r}: expected one of {', '.join(FIELDS)}")
        fields[name] = value
    if fields["differs"] not in DIFFERS:
        raise ValueError(f"differs: {fields['differs']!r}: expected one of {DIFFERS[1:]}")
    return Shown(match[0], fields.pop("output"), match["text"], **fields)


def _with_gaps(lines: list[str], wanted: re.Pattern[str]) -> Iterator[str]:
    """Yield the lines in which the pattern is found, with `...` for others between them."""
    last = -1
    for number, line in enumerate(lines):
        if wanted.search(line):
            left_out = lines[last + 1 : number]
            if left_out and last >= 0:
                yield "..." if any(left_out) else ""
            yield line
            last = number


def agreeing_words(text: str, differs: str = "") -> list[str]:
    """Return the words of an output that must agree on another machine; see `differs` above.

    Words and not lines: a longer number breaks a sentence elsewhere.
    """
    if differs == "text":
        text = "\n".join(line for line in text.splitlines() if not re.search(r"\d", line))
    if differs:
        for word, pattern in _MEASURED.items():
            text = re.sub(pattern, word, text)
    if differs in ("numbers", "text"):
        text = _ANY_NUMBER.sub("NUMBER", text)
        text = _DRAWN.sub("", text)
    return text.split()


def outputs_of(
    page: str, folder: Path, run: Runner, *, is_cheap: bool
) -> Iterator[tuple[Shown, str]]:
    """Carry out the commands of a page in a folder; yield each block with what it shows now.

    Args:
        page: the text of the page.
        folder: an empty folder.
        run: carries out a command.
        is_cheap: leave out the expensive commands.
    """
    (folder / "configs").symlink_to(ROOT / "configs")
    for file in NAMED_FILE.finditer(page):
        (folder / file["name"]).write_text(file["text"], encoding="utf-8")
    for shown in shown_in(page):
        if is_cheap and shown.takes:
            continue
        if shown.before:
            run(shown.before, "", folder)
        yield shown, shown.show(run(shown.command, shown.types, folder))


def run_in_terminal(command: str, types: str, folder: Path) -> str:
    """Return what a terminal of 80 columns shows at the end of a command."""
    import pexpect  # absent from an installation without the extra dev

    received = io.StringIO()
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": binaries, "TERM": "xterm", "COLUMNS": str(COLUMNS)}
    child = pexpect.spawn(
        "/bin/sh",
        ["-c", command],
        cwd=str(folder),
        env=os.environ | environment,
        encoding="utf-8",
        dimensions=(50, COLUMNS),
        timeout=3600,
    )
    child.logfile_read = received
    for line in filter(None, types.split(" | ")):
        child.expect("> $")
        child.sendline(line)
    if types:
        child.expect("> $")
        child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    return screen_text(received.getvalue()).rstrip().removesuffix("\n>")


def screen_text(received: str) -> str:
    """Return what is on the screen after a terminal has received text.

    It knows what rich's live display sends: colours, erased lines and the cursor going up.
    """
    rows = [""]
    row = 0
    column = 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", received):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part.endswith("A") and part.startswith("\x1b"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.endswith("K") and part.startswith("\x1b"):
            rows[row] = "" if part == "\x1b[2K" else rows[row][:column]
        elif not part.startswith("\x1b"):
            start = rows[row][:column].ljust(column)
            rows[row] = start + part + rows[row][column + len(part) :]
            column += len(part)
    return "\n".join(rows)


def difference(shown: Shown, text: str) -> str:
    """Return how an output differs from the page where it must agree; empty if it does not."""
    old = agreeing_words(shown.text, shown.differs)
    new = agreeing_words(text, shown.differs)
    if old == new:
        return ""
    lines = difflib.unified_diff(
        shown.text.splitlines(), text.splitlines(), "the page", "now", lineterm="", n=1
    )
    return f"{shown.command}\n" + "\n".join(lines)


def renew(path: Path, folder: Path, *, is_check: bool, is_cheap: bool) -> list[str]:
    """Carry out the commands of a page in a folder, and write the outputs into the page.

    Args:
        path: the page.
        folder: an empty folder.
        is_check: write nothing.
        is_cheap: leave out the expensive commands.

    Returns the differences between the outputs and the page where they must agree.
    """
    page = path.read_text(encoding="utf-8")
    differences = []
    started = time.monotonic()
    for shown, text in outputs_of(page, folder, run_in_terminal, is_cheap=is_cheap):
        seconds = time.monotonic() - started
        print(f"{path.relative_to(ROOT)}: {shown.command}: {seconds:.0f} s", flush=True)
        differences.append(difference(shown, text))
        # after each command, for the next one may take minutes in which somebody edits the page
        if not is_check:
            block = shown.source.replace(f"```text\n{shown.text}```", f"```text\n{text}```")
            path.write_text(path.read_text(encoding="utf-8").replace(shown.source, block), "utf-8")
        started = time.monotonic()
    return [text for text in differences if text]


def pages() -> list[Path]:
    """Return the pages that show outputs."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in candidates if SHOWN.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Renew or compare the outputs of all pages, or of those named."""
    parser = argparse.ArgumentParser(description="Repeat the commands whose outputs pages show.")
    parser.add_argument("pages", nargs="*", type=Path, help="such as docs/view.md; none: all")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if any differs"
    )
    parser.add_argument("--cheap", action="store_true", help="leave out expensive commands")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder for the runs")
    options = parser.parse_args()
    differences = []
    with tempfile.TemporaryDirectory() as temporary:
        parent = (options.keep or Path(temporary)).resolve()
        for path in options.pages or pages():
            folder = parent / path.stem
            folder.mkdir(parents=True)
            differences += renew(
                path.resolve(), folder, is_check=options.check, is_cheap=options.cheap
            )
    print("\n\n".join(differences))
    if options.check and differences:
        sys.exit(1)


if __name__ == "__main__":
    main()
