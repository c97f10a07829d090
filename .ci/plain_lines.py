"""Refuse four forms that pack several statements into one line; `make check` runs it.

1. A tuple assignment whose values are calls: `a, b = f(x), g(y)`. Write two assignments.
2. Literals that are unpacked into a literal: `(*("a", "b"), *("c", "d"))`. Write the tuple, one
   value per line.
3. A conditional expression inside another: `x if a else y if b else z`. Write if, elif, else.
4. A walrus inside a condition of two terms: `if a and (b := f()):`. Assign above the condition.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "benchmarks", "evidence", "examples")


def faults_of(source: str) -> list[tuple[int, str]]:
    """The line and the reason of each refused form."""
    tree = ast.parse(source)
    return sorted({(line, reason) for node in ast.walk(tree) for line, reason in faults_at(node)})


def faults_at(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The faults of one node."""
    if isinstance(node, ast.Assign) and packs_calls(node):
        yield node.lineno, "a tuple assignment of several calls: write one assignment per line"
    if isinstance(node, ast.Tuple | ast.List | ast.Set) and unpacks_literal(node):
        yield node.lineno, "an unpacked literal: write its values, one per line"
    if isinstance(node, ast.IfExp) and any(
        isinstance(part, ast.IfExp) for part in (node.body, node.test, node.orelse)
    ):
        yield node.lineno, "a conditional expression inside another: write if, elif, else"
    # a loop may assign in its condition: `while (token := peek()) is not None and ...`
    if isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.BoolOp):
        walruses = [part for part in ast.walk(node.test) if isinstance(part, ast.NamedExpr)]
        if walruses:
            yield (
                walruses[0].lineno,
                "a walrus in a condition of two terms: assign above the condition",
            )


def packs_calls(node: ast.Assign) -> bool:
    """Return True if at least two values of a tuple assignment are calls or conditional
    expressions.
    """
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    return sum(isinstance(value, ast.Call | ast.IfExp | ast.Await) for value in node.value.elts) > 1


def unpacks_literal(node: ast.Tuple | ast.List | ast.Set) -> bool:
    """Return True if an element is `*(...)` of a tuple, list or set that is written out."""
    return any(
        isinstance(element, ast.Starred)
        and isinstance(element.value, ast.Tuple | ast.List | ast.Set)
        for element in node.elts
    )


def python_files() -> list[Path]:
    """The tracked and new files of FOLDERS."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS]
    names = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in names if name.endswith(".py") and (ROOT / name).exists()]


def main() -> None:
    """Print every fault; the exit code is 1 if there is one."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for path in python_files()
        for line, reason in faults_of(path.read_text(encoding="utf-8"))
    ]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
