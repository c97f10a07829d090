"""Finds the names that tests may take from a program."""

import ast
import builtins
import importlib
import re
import symtable
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .instrument import DataFlow, Names, parameters_of

PROGRAM_MODULES = frozenset(
    {"solution", "main", "__main__", "candidate", "submission", "program", "your_module"}
)
"""Modules from which tests may import the program's names."""

_STARRED_MODULES = (
    "collections",
    "datetime",
    "functools",
    "itertools",
    "math",
    "random",
    "typing",
    "unittest",
)
_HELPERS = {
    "np",
    "numpy",
    "pd",
    "pandas",
    "torch",
    "tf",
    "plt",
    "scipy",
    "pytest",
    "unittest",
    "mock",
}
_HELPERS |= {"approx", "raises", "fixture", "isclose", "allclose"}
_MODULE_NAMES = {
    "__name__",
    "__file__",
    "__doc__",
    "__builtins__",
    "__annotations__",
    "__package__",
    "__spec__",
}


class UnusableTests(ValueError):
    """The tests cannot judge a program; the text starts with "its tests" or "the tests" and names
    the reason.
    """


class NameRequirements:
    """The names that tests require of a program.

    Raises UnusableTests for a name that nobody defines.

    With `entry_point`, they are the names in that expression. Otherwise they are chosen from the
    names that neither the tests nor Python define: those that the prompt mentions, those that are
    imported from the program, and those that an expression of the tests calls without any other
    such name or a value of one. In `assert close(add(1, 2), 3)` only `add` can belong to the
    program. The last undefined name belongs to it, too, unless it is one of a test library.
    """

    def __init__(
        self,
        trees: Sequence[ast.Module],
        texts: Sequence[str],
        entry_point: str | None,
        prompt: str,
    ) -> None:
        self.defined, used = _global_names(texts)
        self.defined |= _starred(trees)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        imported = _imported_from_program(nodes)
        self.modules_imported = imported.modules
        self.aliases = imported.aliases
        checks = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "check"]
        called = {
            node.func.id
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        self.check_parameters: set[str] = set()
        if checks and entry_point is None:
            functions = re.findall(r"\bdef\s+(\w+)\s*\(", prompt)
            if functions:
                entry_point = functions[-1]
        # the expression that `check` is called with; "": the function of the program
        self.check: str | None = None
        if checks and "check" not in called and len(parameters_of(checks[-1])) == 1:
            self.check = entry_point or ""
            self.check_parameters = parameters_of(checks[-1])
        own = _names_in(entry_point)
        unresolved = (
            used - self.defined - {*dir(builtins), *_MODULE_NAMES} | own & used - self.defined
        )
        roots = {
            n.value.id
            for n in nodes
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
        }
        self.standard_modules = {
            name
            for name in unresolved - own - called
            if name in roots and name in sys.stdlib_module_names
        }
        unresolved -= self.standard_modules
        self.names = set(own)
        if entry_point is None:
            mentioned = {
                name for name in unresolved if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt)
            }
            self.names = mentioned | (
                self._select_called(trees, unresolved, called, imported.starred)
                if unresolved - mentioned
                else set()
            )
        self.names |= imported.names
        self.constants = {name for name in self.names - called - roots if name.isupper()}
        if missing := sorted(unresolved - self.names):
            raise UnusableTests(
                f"its tests use {', '.join(missing[:5])}, which neither they nor Python define and"
                " the question does not mention; entry_point names the function of the program"
            )

    @staticmethod
    def _select_called(
        trees: Sequence[ast.Module], unresolved: set[str], called: set[str], starred: bool
    ) -> set[str]:
        """Select the names that some expression calls without a value of another one."""
        helpers = {
            name for name in unresolved if name in _HELPERS or name.lower().startswith("assert")
        }
        if starred or len(unresolved) == 1:
            return unresolved - helpers
        flow = DataFlow(trees)
        reached = {name: flow.reached_from({name}) for name in unresolved}
        mentioned = [Names.of(part) for tree in trees for part in _expressions(tree)]
        return {
            name
            for name in unresolved & called - helpers
            if any(
                name in names.variables
                and not any(names.intersects(r) for other, r in reached.items() if other != name)
                for names in mentioned
            )
        }


@dataclass(frozen=True)
class _Imported:
    """The imports of tests from the program."""

    names: set[str]
    modules: set[str]
    aliases: set[str]
    starred: bool  # all names of the program


def _imported_from_program(nodes: Iterable[ast.AST]) -> _Imported:
    """Find the imports from the program. Raises UnusableTests for an import that cannot succeed."""
    nodes = list(nodes)
    tried = {
        id(part) for n in nodes if isinstance(n, ast.Try) for s in n.body for part in ast.walk(s)
    }
    names = set[str]()
    modules = set[str]()
    aliases = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found: list[tuple[str, str | None]] = [("." * node.level + (node.module or ""), None)]
            if node.module in PROGRAM_MODULES:
                names |= {alias.name for alias in node.names}
                aliases |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found = [(alias.name, alias.asname) for alias in node.names]
            aliases |= {asname or name for name, asname in found if name in PROGRAM_MODULES}
        else:
            continue
        for module, _ in found:
            if module in PROGRAM_MODULES:
                modules.add(module)
            elif (
                module.partition(".")[0] not in {*sys.stdlib_module_names, "pytest"}
                and id(node) not in tried
            ):
                raise UnusableTests(
                    f"its tests import {module!r}, which is not in Python's standard library"
                )
    return _Imported(names - {"*"}, modules, aliases - {"*"}, "*" in names)


def _names_in(expression: str | None) -> set[str]:
    if expression is None:
        return set()
    try:
        return {
            n.id for n in ast.walk(ast.parse(expression, mode="eval")) if isinstance(n, ast.Name)
        }
    except SyntaxError:
        raise UnusableTests(
            f"its entry_point must be the name of a function, got {expression!r:.80}"
        ) from None


def _global_names(texts: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the global names that modules define, and those that they use."""
    defined = set[str]()
    used = set[str]()

    def visit(table: symtable.SymbolTable, is_module: bool) -> None:
        for symbol in table.get_symbols():
            if is_module or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    defined.add(symbol.get_name())
                if symbol.is_referenced():
                    used.add(symbol.get_name())
        for child in table.get_children():
            visit(child, False)

    for text in texts:
        visit(symtable.symtable(text, "tests", "exec"), True)
    return defined, used


def _starred(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names that `from MODULE import *` defines, for standard modules that are often
    imported so.
    """
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = [
        node.module
        for node in nodes
        if node.names[0].name == "*" and node.module in _STARRED_MODULES
    ]
    found = set[str]()
    for module in map(importlib.import_module, filter(None, modules)):
        found |= set(getattr(module, "__all__", dir(module)))
    return found


def _expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the largest expressions of the statements of a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            yield from (
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
            )
            yield from (item.context_expr for item in getattr(node, "items", []))
