"""Finds the source of functions and classes in files and notebooks, and the names in it."""

import __future__

import ast
import contextlib
import importlib.util
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dapo.core.loading import THE_CELL

# annotations are text, so that their names need not exist
_FUTURE_ANNOTATIONS = __future__.annotations.compiler_flag


@dataclass(frozen=True)
class Source:
    """The source of one function or class."""

    name: str
    text: str
    namespace: Mapping[str, Any]
    """The namespace of the definition: globals and closure; empty if it is unknown."""
    has_future_annotations: bool = False
    place: str = ""
    """The line of its first line: `line 2 of the cell`, `line 12 of script.py`."""


def importable(value: Any) -> str | None:
    """Return `module:name` of an importable object; None for one of a script or notebook."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if (
        not isinstance(module, str)
        or not isinstance(name, str)
        or module == "__main__"
        or "<" in name
    ):
        return None
    target: Any = sys.modules.get(module)
    try:
        for part in name.split("."):
            target = getattr(target, part)
    except AttributeError:
        return None
    return f"{module}:{name}" if target is value and has_spec(module) else None


def find_source(value: Any) -> Source | None:
    """Return the source of a function or a class, decorators included; None if it is unknown.

    `linecache` holds scripts and notebook cells alike, under the file name of their code.
    """
    return _class_source(value) if isinstance(value, type) else _function_source(value)


def _function_source(value: Any) -> Source | None:
    inner = inspect.unwrap(value)
    is_decorated = value is not inner and inner.__globals__.get(inner.__name__) is value
    if not is_decorated:  # the wrapper that a decorator returned; its variables hold the rest
        if not isinstance(value, FunctionType):
            return None
        inner = value
    code = inner.__code__
    for node, lines in _definitions(
        code.co_filename, inner.__globals__, (ast.FunctionDef, ast.AsyncFunctionDef)
    ):
        if node.name == code.co_name and _first_line(node) == code.co_firstlineno:
            # a decorator's wrapper refers to the function without its decorators
            is_raw = (
                not hasattr(value, "__wrapped__")
                and inner.__globals__.get(inner.__name__) is not inner
            )
            text = _text_of(node, lines, with_decorators=not is_raw)
            return Source(
                code.co_name,
                text,
                _namespace([inner]),
                bool(code.co_flags & _FUTURE_ANNOTATIONS),
                _place(code.co_filename, node.lineno if is_raw else _first_line(node)),
            )
    return None


def _class_source(value: type) -> Source | None:
    """Return the source of a class: the definition with its functions, or the last one."""
    functions = [
        function for function in map(_function_in, vars(value).values()) if function is not None
    ]
    kinds = (ast.ClassDef,)
    for function in functions:
        code = function.__code__
        for node, lines in _definitions(code.co_filename, function.__globals__, kinds):
            if node.name == value.__name__ and _first_line(node) <= code.co_firstlineno <= (
                node.end_lineno or 0
            ):
                flag = bool(code.co_flags & _FUTURE_ANNOTATIONS)
                members = [
                    member
                    for member in functions
                    if member.__code__.co_filename == code.co_filename
                ]
                return Source(
                    node.name,
                    _text_of(node, lines),
                    _namespace(members),
                    flag,
                    _place(code.co_filename, _first_line(node)),
                )
    main = getattr(sys.modules.get(value.__module__), "__file__", None)
    cells = [
        name
        for name in reversed(linecache.cache)
        if name.startswith("<ipython") or "ipykernel" in name
    ]
    for file in [*cells, *([main] if main else [])]:
        for node, lines in _definitions(file, {}, kinds):
            if node.name == value.__name__:
                place = _place(file, _first_line(node))
                return Source(node.name, _text_of(node, lines), {}, place=place)
    return None


def _place(filename: str, line: int) -> str:
    """Name a line of a script, or of a cell, whose code has a file name that no file has."""
    is_cell = "ipykernel" in filename or not Path(filename).is_file()
    return f"line {line} of {THE_CELL if is_cell else Path(filename).name}"


def _function_in(member: Any) -> FunctionType | None:
    """Return the function behind a member of a class; None if it is generated or no function."""
    inner = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
    is_own = isinstance(inner, FunctionType) and not inner.__code__.co_filename.startswith(
        "<string"
    )
    return inner if is_own else None


def _definitions(
    filename: str, module_globals: dict[str, Any], kinds: tuple[type[Any], ...]
) -> list[tuple[Any, list[str]]]:
    """List definitions of these kinds in a file or a cell, the last one first."""
    lines = linecache.getlines(filename, module_globals)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return []
    return [(node, lines) for node in ast.walk(tree) if isinstance(node, kinds)][::-1]


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min((node.lineno, *(decorator.lineno for decorator in node.decorator_list)))


def _text_of(node: Any, lines: list[str], *, with_decorators: bool = True) -> str:
    first = _first_line(node) if with_decorators else node.lineno
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()


def _namespace(functions: Sequence[FunctionType]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for function in functions:
        names |= function.__globals__
    for function in functions:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # not yet set: a function that calls itself
                names[name] = cell.cell_contents
    return names


def needed_names(source: Source) -> list[str]:
    """Return the sorted names that a definition takes from outside."""
    future = "from __future__ import annotations\n" if source.has_future_annotations else ""
    top = symtable.symtable(future + source.text, "source", "exec")
    names: dict[str, None] = {}
    tables = [top]
    while tables:
        table = tables.pop(0)
        for symbol in table.get_symbols():
            if (
                symbol.is_global() or (table is top and symbol.is_referenced())
            ) and not symbol.is_imported():
                names.setdefault(symbol.get_name())
        tables += table.get_children()
    return sorted(names)


def module_chains(text: str, namespace: Mapping[str, Any]) -> list[str]:
    """List the submodules that a text names by their full path, such as `xml.etree`."""
    chains = []
    for node in ast.walk(ast.parse(text)):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not (parts and isinstance(node, ast.Name)):
            continue
        module = namespace.get(node.id)
        while parts and isinstance(module, ModuleType):
            module = getattr(module, parts.pop(0), None)
            if (
                isinstance(module, ModuleType)
                and module.__name__ in sys.modules
                and "." in module.__name__
            ):
                chains.append(module.__name__)
    return chains


def has_spec(module: str) -> bool:
    """Return True if another process can import a module."""
    try:
        return module in sys.builtin_module_names or importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):
        return False
