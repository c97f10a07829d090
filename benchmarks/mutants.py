"""Does a test notice each deliberate mistake?

`python -m benchmarks.mutants [NAME ...] [--into FILE --minutes 30]`.

Every entry of `mutants.toml` is one mistake: a function of the package, a text in it, what replaces
it, and the test files that must notice. Each is made in a copy of the repository, where those test
files run until one fails. A mistake that no test notices survives, and the exit status is 1. Before
the first mistake of some test files, they run on the unchanged copy: a test that fails there would
"catch" everything.

All mistakes take hours. `--into FILE` adds each outcome to a file, and leaves out the mistakes that
the file holds. `--minutes 30` begins no mistake that would end later, by the time that its test
files take on the unchanged copy: the same command again is the next piece. `--report FILE` lists
what survives and what has not been run.
"""

import argparse
import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = (
    "src",
    "tests",
    "benchmarks",
    "evidence",
    "examples",
    "configs",
    "docs",
    "pyproject.toml",
    "setup.py",
)
COPIED += ("mkdocs.yml", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md", "LICENSE")
TIMEOUT_S = 600
_STRING = r"""[rbf]{0,2}"(?:[^"\\\n]|\\.)*"|[rbf]{0,2}'(?:[^'\\\n]|\\.)*'"""
_SYMBOL = re.compile(rf"{_STRING}|\w+|\s+|.", re.IGNORECASE)
_SPACE = r"\s|#[^\n]*\n"
_OPENING = "([{"
_CLOSING = ")]}"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A deliberate mistake, and the test files that must notice it."""

    name: str
    file: str  # below src/dapo
    old: str  # stands in the function exactly once, in any layout
    new: str
    tests: tuple[str, ...]  # below tests/: files, or single tests of a slow one
    function: str = ""  # the function or class, such as `Policy.update`; empty: the whole file

    def path(self, root: Path) -> Path:
        """The file in the repository or copy at `root`."""
        return root / "src" / "dapo" / self.file

    def apply(self, root: Path) -> str:
        """Make the mistake in the copy at `root`; returns the file's text as it was.

        Raises ValueError where `old` does not stand exactly once in the function: the table is out
        of date.
        """
        path = self.path(root)
        text = path.read_text(encoding="utf-8")
        place = f"{path.relative_to(root)}:{self.function}".removesuffix(":")
        spans = definitions(text)
        if self.function not in spans:
            raise ValueError(
                f"{self.name}: {place} is gone; name the function that has {self.old!r}"
            )
        start, end = spans[self.function]
        matches = list(code_pattern(self.old).finditer(text, start, end))
        if len(matches) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} stands {len(matches)} times in {place}; expected once"
            )
        start, end = matches[0].span()
        path.write_text(text[:start] + self.new + text[end:], encoding="utf-8")
        return text


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """The span in characters of each function and class by its qualified name, and of the file.

    The file has the name "". Of definitions of one name, such as overloads, the last one counts.
    """
    line_starts = list(accumulate(map(len, source.splitlines(keepends=True)), initial=0))
    spans = {"": (0, len(source))}

    def add(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                name = f"{prefix}{node.name}"
                spans[name] = (line_starts[first_line - 1], line_starts[node.end_lineno or 0])
                add(node.body, f"{name}.")

    add(ast.parse(source).body, "")
    return spans


def code_pattern(code: str) -> re.Pattern[str]:
    """A pattern that finds a piece of code however a formatter has laid it out.

    Between two symbols may stand spaces, line ends and comments where the piece has a space, and
    behind an opening or before a closing bracket; a comma may precede a closing bracket. Strings
    are matched to the character.
    """
    inner = code.strip()
    start = code.index(inner)
    parts = [re.escape(code[:start])]
    for symbol in _SYMBOL.findall(inner):
        if symbol.isspace():
            parts.append(f"(?:{_SPACE})+")
        elif symbol in _OPENING:
            parts.append(f"{re.escape(symbol)}(?:{_SPACE})*")
        elif symbol in _CLOSING:
            parts.append(f"(?:{_SPACE})*,?(?:{_SPACE})*{re.escape(symbol)}")
        else:
            parts.append(re.escape(symbol))
    parts.append(re.escape(code[start + len(inner) :]))
    return re.compile("".join(parts))


@dataclass(frozen=True)
class Outcome:
    """The names of the tests that fail with a mutant; empty if it survives."""

    mutant: Mutant
    failed: tuple[str, ...]
    seconds: float


def read_mutants() -> list[Mutant]:
    """The committed table."""
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def remaining(mutants: Sequence[Mutant], into: Path | None) -> list[Mutant]:
    """The mutants of which a file of outcomes holds none, those of the same test files together."""
    lines = (
        into.read_text(encoding="utf-8").splitlines() if into is not None and into.exists() else []
    )
    done = {json.loads(line)["mutant"] for line in lines}
    return sorted(
        (each for each in mutants if each.name not in done), key=lambda mutant: mutant.tests
    )


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """A folder with a copy of what the tests need, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="dapo-mutants-") as folder:
        for name in COPIED:
            source = ROOT / name
            target = Path(folder) / name
            if source.is_dir():
                shutil.copytree(
                    source,
                    target,
                    ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results"),
                )
            else:
                shutil.copy(source, target)
        yield Path(folder)


def failures(root: Path, tests: Sequence[str], *, thorough: bool = False) -> tuple[str, ...]:
    """The tests that fail in the copy at `root`: the first one, or with `thorough` all of them."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}{os.pathsep}{root}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    command += [*([] if thorough else ["-x"]), *(f"tests/{name}" for name in tests)]
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return (f"no end within {TIMEOUT_S} s",)
    if done.returncode == 0:
        return ()
    return tuple(_FAILED.findall(done.stdout)) or (
        f"pytest exits with {done.returncode}: {done.stdout[-200:]!r}",
    )


def judge(mutant: Mutant, root: Path, *, thorough: bool) -> Outcome:
    """Make the mistake in the copy, run the tests, and undo it."""
    began = time.perf_counter()
    text = mutant.apply(root)
    try:
        failed = failures(root, mutant.tests, thorough=thorough)
    finally:
        mutant.path(root).write_text(text, encoding="utf-8")
    return Outcome(mutant, failed, time.perf_counter() - began)


def main() -> int:
    """Run the mutants named on the command line, or all, and print which tests catch them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="mutants whose name contains this; none: all of them",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="copies in which mutants run at the same time"
    )
    parser.add_argument(
        "--thorough", action="store_true", help="name every test that fails, not the first one only"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end within this time; needs --into"
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="add the outcomes to a file, and leave out those in it",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="only list the survivors of such a file"
    )
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    if arguments.report is not None:
        return report(arguments.report, console)
    if arguments.minutes < math.inf and arguments.into is None:
        parser.error("--minutes needs --into FILE, which tells the next piece what is done")
    chosen = [
        m
        for m in read_mutants()
        if not arguments.names or any(name in m.name for name in arguments.names)
    ]
    chosen = remaining(chosen, arguments.into)
    console.print(f"{len(chosen)} mutants to run")
    ends = time.monotonic() + 60 * arguments.minutes
    outcomes = _run(
        chosen,
        console,
        jobs=arguments.jobs,
        thorough=arguments.thorough,
        into=arguments.into,
        ends=ends,
    )
    table = Table(title=f"{len(outcomes)} mutants", title_justify="left")
    for column in ("mutant", "file", "caught by", "s"):
        table.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    for outcome in outcomes:
        found = "\n".join(name.removeprefix("tests/") for name in outcome.failed) or "SURVIVES"
        table.add_row(outcome.mutant.name, outcome.mutant.file, found, f"{outcome.seconds:.0f}")
    Console(width=160).print(table)
    survivors = [outcome.mutant.name for outcome in outcomes if not outcome.failed]
    console.print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} caught")
    console.print(f"survive: {'; '.join(survivors) or 'none'}")
    return 1 if survivors else 0


def report(path: Path, console: Console) -> int:
    """Print which of the table's mutants survive by a file of outcomes, and which it does not
    hold.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    failed = {each["mutant"]: each["failed"] for each in map(json.loads, lines)}
    names = [mutant.name for mutant in read_mutants()]
    survivors = [name for name in names if failed.get(name) == []]
    missing = [name for name in names if name not in failed]
    console.print(f"{len(names) - len(survivors) - len(missing)} of {len(names)} caught")
    for word, found in (("survive", survivors), ("not run", missing)):
        console.print(f"{word}: {'; '.join(found) or 'none'}")
    return 1 if survivors or missing else 0


def _run(
    mutants: Sequence[Mutant],
    console: Console,
    *,
    jobs: int,
    thorough: bool,
    into: Path | None,
    ends: float,
) -> list[Outcome]:
    copies: SimpleQueue[Path] = SimpleQueue()
    unchanged: dict[tuple[str, ...], float] = {}

    def one(mutant: Mutant) -> Outcome | None:
        root = copies.get()
        try:
            if mutant.tests not in unchanged and time.monotonic() < ends:
                began = time.monotonic()
                if failed := failures(root, mutant.tests):
                    raise SystemExit(f"these tests fail without any mutant: {', '.join(failed)}")
                unchanged[mutant.tests] = time.monotonic() - began
            if time.monotonic() + unchanged.get(mutant.tests, 0.0) >= ends:
                return None
            outcome = judge(mutant, root, thorough=thorough)
        finally:
            copies.put(root)
        console.print(
            f"{'caught' if outcome.failed else 'SURVIVES'}: {mutant.name} ({outcome.seconds:.0f} s)"
        )
        if into is not None:
            with into.open("a", encoding="utf-8") as file:
                line = {
                    "mutant": mutant.name,
                    "failed": outcome.failed,
                    "seconds": round(outcome.seconds),
                }
                file.write(json.dumps(line) + "\n")
        return outcome

    def with_copies(count: int) -> list[Outcome]:
        if count:
            with copy_of_repository() as root:
                copies.put(root)
                return with_copies(count - 1)
        with ThreadPoolExecutor(jobs) as pool:
            return [outcome for outcome in pool.map(one, mutants) if outcome is not None]

    return with_copies(jobs)


if __name__ == "__main__":
    sys.exit(main())
