"""`math` on the rows of Math-Verify's own tests: `python -m benchmarks.math_verify_rows FOLDER
[--list]`.

FOLDER is `tests` of Math-Verify's source distribution (`pip download --no-binary :all: --no-deps
math-verify==0.9.0`).
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dapo.libs.strict_math import extract_answer
from dapo.rewards import get_verifier
from dapo.types import Problem

NOT_ROWS = frozenset({"test_strict.py"})
"""A file whose third column is an option of the comparison."""


class Row(NamedTuple):
    """A reference, a response, and whether Math-Verify's authors count it as right."""

    reference: str
    response: str
    expected: bool


def rows_of(path: Path) -> Iterator[Row]:
    """The literal rows of a test file's parameters; not those that turn a comparison off (`..., 0,
    False`).
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Tuple):
            try:
                row = ast.literal_eval(node)
            except ValueError:
                continue
            is_row = (
                len(row) >= 3
                and isinstance(row[0], str)
                and isinstance(row[1], str)
                and row[2] in (0, 1)
            )
            if is_row and row[3:4] != (False,):
                yield Row(row[0], row[1], bool(row[2]))


def is_right(row: Row) -> bool:
    """The verdict of `math`; a response without a marker becomes an `Answer:` line."""
    reference = row.reference.strip()
    for dollars in ("$$", "$"):
        reference = (
            reference.removeprefix(dollars).removesuffix(dollars)
            if reference.endswith(dollars)
            else reference
        )
    response = (
        row.response if extract_answer(row.response) is not None else f"Answer: {row.response}"
    )
    return get_verifier("math")(Problem("1", "Q", reference), response).correct is True


def main() -> None:
    """Print for each file the number of wrong rows that are accepted and of right rows that are
    refused.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--list", action="store_true", help="print the rows that `math` judges differently"
    )
    arguments = parser.parse_args()
    for path in sorted(arguments.folder.glob("test_*.py")):
        rows = list(rows_of(path)) if path.name not in NOT_ROWS else []
        verdicts = [(row, is_right(row)) for row in rows]
        accepted = [row for row, right in verdicts if right and not row.expected]
        refused = [row for row, right in verdicts if row.expected and not right]
        if rows:
            print(
                f"{path.name}: {len(rows)} rows, {len(accepted)} wrong accepted, {len(refused)}"
                " right refused"
            )
        for title, found in (
            (("accepted", accepted), ("refused", refused)) if arguments.list else ()
        ):
            for row in found:
                print(f"  {title}: {row.reference[:60]!r} <- {row.response[-80:]!r}")


if __name__ == "__main__":
    main()
