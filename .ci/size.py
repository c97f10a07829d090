"""Print tokens, lines and density of the package by folder, beside another revision: `make size
BASE=main`.

A token is one of Python's `tokenize`, without comments, line ends and indentation; a line is any
line of the file. The report is for readers of a change. No test asserts it.
"""

import argparse
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    """The size of some Python sources."""

    tokens: int = 0
    lines: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.tokens + other.tokens, self.lines + other.lines)

    @property
    def density(self) -> float:
        """Tokens per line."""
        return self.tokens / max(self.lines, 1)


def size_of(source: str) -> Size:
    """Count one file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return Size(sum(token.type not in LAYOUT_TOKENS for token in tokens), source.count("\n"))


def git(*words: str) -> str:
    """The output of a git command in the repository."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def sizes_now() -> dict[str, Size]:
    """The size of each file of src/ in the working tree, new files included."""
    names = git(
        "ls-files", "--cached", "--others", "--exclude-standard", "--", "src/*.py"
    ).splitlines()
    paths = [(name, ROOT / name) for name in names]
    return {
        name: size_of(path.read_text(encoding="utf-8")) for name, path in paths if path.exists()
    }


def sizes_at(revision: str) -> dict[str, Size]:
    """The size of each file of src/ at a revision."""
    names = git("ls-tree", "-r", "--name-only", revision, "--", "src").splitlines()
    return {
        name: size_of(git("show", f"{revision}:{name}")) for name in names if name.endswith(".py")
    }


def folder_of(name: str) -> str:
    """The row of a file: `src/dapo/cli/check/probe.py` counts for `dapo/cli`, a library for
    itself.
    """
    parts = Path(name).parts[1:-1]
    depth = 2 if parts[0] == "dapo" else 1
    return "/".join(parts[:depth])


def by_folder(files: dict[str, Size]) -> dict[str, Size]:
    """The sum of the files of each folder."""
    totals: dict[str, Size] = {}
    for name, size in files.items():
        folder = folder_of(name)
        totals[folder] = totals.get(folder, Size()) + size
    return totals


def report(now: dict[str, Size], before: dict[str, Size], base: str) -> Iterable[str]:
    """The lines of the table."""
    yield (
        f"{'folder':24}{'tokens':>9}{'against ' + base[:10]:>20}{'lines':>8}{'against':>9}{'tokens per line':>17}"
    )
    folders_now = by_folder(now)
    folders_before = by_folder(before)
    for folder in sorted(folders_now.keys() | folders_before.keys()):
        yield row(folder, folders_now.get(folder, Size()), folders_before.get(folder, Size()))
    yield row("src", sum(now.values(), Size()), sum(before.values(), Size()))
    long_files = {name: size for name, size in now.items() if size.lines > 40}
    yield "densest files: "
    for name, size in sorted(long_files.items(), key=lambda item: -item[1].density)[:5]:
        yield f"  {size.density:.2f}  {name}"


def row(name: str, now: Size, before: Size) -> str:
    """One line of the table."""
    tokens = f"{now.tokens:>9,}{now.tokens - before.tokens:>+20,}"
    lines = f"{now.lines:>8,}{now.lines - before.lines:>+9,}"
    return f"{name:24}{tokens}{lines}{now.density:>9.2f}, was {before.density:.2f}"


def main() -> None:
    """Read the revision and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "base", nargs="?", default="main", help="the revision to compare with (default: main)"
    )
    base = parser.parse_args().base
    try:
        before = sizes_at(base)
    except subprocess.CalledProcessError as error:
        sys.exit(f"git does not know the revision {base}: {error.stderr.strip()}")
    print("\n".join(report(sizes_now(), before, base)))


if __name__ == "__main__":
    main()
