"""The tests of a row for `code`: read, found usable or not, and compiled for the test runner."""

import ast
import base64
import builtins
import importlib
import json
import marshal
import re
import symtable
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dapo.rewards.sandbox.instrument import Flows, Instrument, Names, parameters_of
from dapo.types import Problem

COLUMNS = ("tests", "test_list", "test")
"""The column with the tests if no other is named; the second is that of MBPP, the third that of HumanEval."""

_SETUP_COLUMNS = ("test_imports", "test_setup_code")
PROGRAM_MODULES = frozenset({"solution", "main", "__main__", "candidate", "submission", "program", "your_module"})
"""Modules from which tests may import the program's names."""

_STARRED_MODULES = ("collections", "datetime", "functools", "itertools", "math", "random", "typing", "unittest")
_UNSEEN = {"assertWarns", "assertWarnsRegex", "assertLogs", "assertNoLogs"}
_HELPERS = {"np", "numpy", "pd", "pandas", "torch", "tf", "plt", "scipy", "pytest", "unittest", "mock"}
_HELPERS |= {"approx", "raises", "fixture", "isclose", "allclose"}
_MODULE_NAMES = {"__name__", "__file__", "__doc__", "__builtins__", "__annotations__", "__package__", "__spec__"}


@dataclass(frozen=True)
class Pairs:
    """Tests of a program: what it reads, and what it must print."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Statements:
    """Tests of a program's functions, compiled with their assertions counted."""

    message: Mapping[str, Any]
    """What the test runner gets, as JSON values; its fields are those of `test_runner.run`."""


def read_tests(problem: Problem, field: str) -> Pairs | Statements:
    """The tests of a row, from its column `field` or the reference. Raises ValueError with what is wrong with them."""
    value = _value_of(problem, field)
    if isinstance(value, str) and value.strip():
        value = [value]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        setup = [problem.fields[name] for name in _SETUP_COLUMNS if problem.fields.get(name)]
        texts = [text for part in setup for text in ([part] if isinstance(part, str) else part)]
        prompt = problem.prompt if isinstance(problem.prompt, str) else "\n".join(m["content"] for m in problem.prompt)
        entry_point = problem.fields.get("entry_point") or None
        if entry_point is not None and not isinstance(entry_point, str):
            raise ValueError(f"its entry_point must be the name of a function, got {entry_point!r:.80}")
        return _compiled(tuple(map(str, [*texts, *value])), entry_point, prompt)
    if isinstance(value, Mapping) and "fn_name" in value:
        raise ValueError("its tests call a function by fn_name; write them as statements: assert NAME(...) == ...")
    if isinstance(value, Mapping) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        value = [{"input": i, "output": o} for i, o in zip(value["inputs"], value["outputs"], strict=True)]
    items = value if isinstance(value, list) else []
    if items and all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in items):
        pairs = [(_text(item["input"]), _text(item["output"])) for item in items]
        if any(output.strip() for _, output in pairs):
            return Pairs(pairs)
        raise ValueError("its tests expect no output at all")
    raise ValueError(
        f"no tests in field {field!r} or in the reference; expected pairs [{{'input': ..., 'output': ...}}], or "
        "statements such as 'assert add(1, 2) == 3'"
    )


def _value_of(problem: Problem, field: str) -> Any:
    names = COLUMNS if field == COLUMNS[0] else (field,)
    found = [problem.fields[name] for name in names if problem.fields.get(name) is not None]
    value = found[0] if found else problem.answer
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"its tests are no JSON ({error})") from None
    return value


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


@lru_cache(256)
def _compiled(texts: Sequence[str], entry_point: str | None, prompt: str) -> Statements:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as: "assertion is always true"
            return _compile(texts, entry_point, prompt)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"its tests cannot run: {type(error).__name__}: {error}") from None


def _compile(texts: Sequence[str], entry_point: str | None, prompt: str) -> Statements:
    trees = [ast.parse(text) for text in texts]
    defined, used = _global_names(texts)
    defined |= _starred(trees)
    asked = _Asked(trees, defined, used, entry_point, prompt)
    flows = Flows(trees)
    of_program = flows.reached_from({*asked.names, *asked.aliases, *asked.check_parameters})
    codes, num_counted = [], 0
    for tree in trees:
        instrument = Instrument(of_program, defined)
        instrumented = ast.fix_missing_locations(instrument.visit(tree))
        codes.append(compile(instrumented, "tests", "exec", dont_inherit=True))
        num_counted += instrument.num_counted
    if not num_counted:
        raise ValueError("its tests run no assertion on a value of the program")
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if unseen := sorted(filter(None, map(_unseen, nodes))):
        raise ValueError(f"its tests use {unseen[0]}, which does not reach into the program's process")
    message = {
        "code": [base64.b64encode(marshal.dumps(code)).decode() for code in codes],
        "names": sorted(asked.names),
        "certain": sorted(asked.certain),
        "standard_modules": sorted(asked.standard_modules),
        "program_modules": sorted(asked.modules_imported),
        "check": asked.check,
        "mentioned": sorted(set(re.findall(r"\w+", prompt))) if asked.check == "" else [],
        "collect": any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in nodes),
        "asynchronous": any("async" in text for text in texts),
        "pytest": any("pytest" in text for text in texts),
        "unittest": any("unittest" in text for text in texts),
    }
    return Statements(message)


def _unseen(node: ast.AST) -> str | None:
    """What a part of the tests would change or see in the program's process, which is another one."""
    match node:
        case ast.Attribute(attr=name) if name in _UNSEEN:
            return name
        case ast.Attribute(attr="patch", value=ast.Name(id="mock")) | ast.arg(arg="monkeypatch"):
            return "patch"
        case ast.ImportFrom(module="unittest.mock", names=names) if any(alias.name == "patch" for alias in names):
            return "patch"
        case ast.Attribute(attr="stdin", ctx=ast.Store()):
            return "sys.stdin"
    return None


class _Asked:
    """Which names the tests may take from the program. Raises ValueError where they use one that nobody defines.

    With `entry_point` it is the names in that expression. Else, of the names that neither the tests nor Python define:
    those that the prompt mentions, those that are imported from the program, and those that some expression of the
    tests calls without any other such name or a value of one: in `assert close(add(1, 2), 3)` only `add` can be the
    program's. A single name alone is the program's too, unless it is one of a test library.
    """

    def __init__(
        self, trees: Sequence[ast.Module], defined: set[str], used: set[str], entry_point: str | None, prompt: str
    ) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        imported = _imported_from_program(nodes)
        self.modules_imported = imported.modules
        self.aliases = imported.aliases
        checks = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "check"]
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        self.check_parameters: set[str] = set()
        if checks and entry_point is None and (functions := re.findall(r"\bdef\s+(\w+)\s*\(", prompt)):
            entry_point = functions[-1]
        self.check: str | None = None  # the expression that `check` is called with; "": the program's function
        if checks and "check" not in called and len(parameters_of(checks[-1])) == 1:
            self.check = entry_point or ""
            self.check_parameters = parameters_of(checks[-1])
        own = _names_in(entry_point)
        unresolved = used - defined - {*dir(builtins), *_MODULE_NAMES} | own & used - defined
        roots = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        self.standard_modules = {
            name for name in unresolved - own - called if name in roots and name in sys.stdlib_module_names
        }
        unresolved -= self.standard_modules
        if entry_point is not None:
            self.certain = own
            self.names = own
        else:
            self.certain = {name for name in unresolved if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt)}
            self.names = self.certain | (
                self._alone(trees, unresolved, called, imported.starred) if unresolved - self.certain else set()
            )
            if len(unresolved) == 1:
                self.certain = self.names
        self.names = self.names | imported.names
        self.certain = self.certain | imported.names
        if missing := sorted(unresolved - self.names):
            raise ValueError(
                f"its tests use {', '.join(missing[:5])}, which neither they nor Python define and the question does "
                "not ask for; a column entry_point names what it asks for"
            )

    @staticmethod
    def _alone(trees: Sequence[ast.Module], unresolved: set[str], called: set[str], starred: bool) -> set[str]:
        helpers = {name for name in unresolved if name in _HELPERS or name.lower().startswith("assert")}
        if starred or len(unresolved) == 1:
            return unresolved - helpers
        flows = Flows(trees)
        reached = {name: flows.reached_from({name}) for name in unresolved}
        mentioned = [Names.of(part) for tree in trees for part in _expressions(tree)]
        return {
            name
            for name in unresolved & called - helpers
            if any(
                name in names.variables and not any(names.meets(r) for other, r in reached.items() if other != name)
                for names in mentioned
            )
        }


@dataclass(frozen=True)
class _Imported:
    """What tests import from the program."""

    names: set[str]
    modules: set[str]
    aliases: set[str]
    starred: bool  # all of it


def _imported_from_program(nodes: Iterable[ast.AST]) -> _Imported:
    """What the tests import from the program. Raises ValueError where they import what is not there at all."""
    nodes = list(nodes)
    tried = {id(part) for n in nodes if isinstance(n, ast.Try) for s in n.body for part in ast.walk(s)}
    names, modules, aliases = set[str](), set[str](), set[str]()
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
            elif module.partition(".")[0] not in {*sys.stdlib_module_names, "pytest"} and id(node) not in tried:
                raise ValueError(f"its tests import {module!r}, which is not in Python's standard library")
    return _Imported(names - {"*"}, modules, aliases - {"*"}, "*" in names)


def _names_in(expression: str | None) -> set[str]:
    if expression is None:
        return set()
    try:
        return {n.id for n in ast.walk(ast.parse(expression, mode="eval")) if isinstance(n, ast.Name)}
    except SyntaxError:
        raise ValueError(f"its entry_point must be the name of a function, got {expression!r:.80}") from None


def _global_names(texts: Iterable[str]) -> tuple[set[str], set[str]]:
    """The global names that modules define, and those that they use."""
    defined, used = set[str](), set[str]()

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
    """The names that `from MODULE import *` defines, of the standard modules from which that is usual."""
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = [node.module for node in nodes if node.names[0].name == "*" and node.module in _STARRED_MODULES]
    found = set[str]()
    for module in map(importlib.import_module, filter(None, modules)):
        found |= set(getattr(module, "__all__", dir(module)))
    return found


def _expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """The largest expressions of the statements of a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            yield from (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
            yield from (item.context_expr for item in getattr(node, "items", []))
