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
    "approx",
    "raises",
    "fixture",
    "isclose",
    "allclose",
}
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
        entry_names = _names_in(entry_point)
        undefined = used - self.defined
        # the entry point may have the name of a built-in function
        unresolved = undefined - {*dir(builtins), *_MODULE_NAMES} | entry_names & undefined
        roots = _roots_of_attributes(nodes)
        modules = unresolved - entry_names - called
        self.standard_modules = modules & roots & sys.stdlib_module_names
        unresolved -= self.standard_modules
        self.names = set(entry_names)
        if entry_point is None:
            self.names = {name for name in unresolved if _is_mentioned(name, prompt)}
            if unresolved - self.names:
                self.names |= self._select_called(trees, unresolved, called, imported.starred)
        self.names |= imported.names
        self.constants = {name for name in self.names - called - roots if name.isupper()}
        unknown = sorted(unresolved - self.names)
        if unknown:
            raise UnusableTests(
                f"its tests use {', '.join(unknown[:5])}, which neither they nor Python define and"
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
        expressions = [Names.of(part) for tree in trees for part in _expressions(tree)]
        selected = set[str]()
        for name in unresolved & called - helpers:
            foreign = [names for source, names in reached.items() if source != name]
            if any(_uses_alone(names, name, foreign) for names in expressions):
                selected.add(name)
        return selected


def _uses_alone(names: Names, name: str, foreign: Iterable[Names]) -> bool:
    """Return True if an expression with these names uses one, and no value of the others."""
    return name in names.variables and not any(map(names.intersects, foreign))


def _roots_of_attributes(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names whose attributes are used, such as `math` in `math.pi`."""
    return {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def _is_mentioned(name: str, prompt: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt) is not None


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
    optional = _in_try(nodes)
    names = set[str]()
    modules = set[str]()
    aliases = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            imports = ["." * node.level + (node.module or "")]
            if node.module in PROGRAM_MODULES:
                names |= {alias.name for alias in node.names}
                aliases |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imports = [alias.name for alias in node.names]
            for alias in node.names:
                if alias.name in PROGRAM_MODULES:
                    aliases.add(alias.asname or alias.name)
        else:
            continue
        for module in imports:
            package = module.partition(".")[0]
            if module in PROGRAM_MODULES:
                modules.add(module)
            elif id(node) not in optional and package not in {*sys.stdlib_module_names, "pytest"}:
                raise UnusableTests(
                    f"its tests import {module!r}, which is not in Python's standard library"
                )
    return _Imported(names - {"*"}, modules, aliases - {"*"}, "*" in names)


def _in_try(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the identities of the nodes whose exceptions the tests may handle."""
    identities = set[int]()
    for node in nodes:
        if isinstance(node, ast.Try):
            for statement in node.body:
                identities |= set(map(id, ast.walk(statement)))
    return identities


def _names_in(expression: str | None) -> set[str]:
    if expression is None:
        return set()
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        raise UnusableTests(
            f"its entry_point must be the name of a function, got {expression!r:.80}"
        ) from None
    return Names.of(tree).variables


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
    starred = set[str]()
    for module in map(importlib.import_module, filter(None, modules)):
        starred |= set(getattr(module, "__all__", dir(module)))
    return starred


def _expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the largest expressions of the statements of a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            yield from (
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
            )
            yield from (item.context_expr for item in getattr(node, "items", []))
