"""Writes a caller's functions as a module that other processes can import. Imports no torch."""

import __future__

import ast
import builtins
import cmath
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import linecache
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

from dapo.core.errors import RewardError

_PLAIN = (str, bytes, bool, int, type(None), type(Ellipsis))
_FUTURE_ANNOTATIONS = __future__.annotations.compiler_flag  # annotations are text, so that their names need not exist


@dataclass(frozen=True)
class WrittenModule:
    """A module's text, and its name, which ends with a checksum of the text."""

    name: str
    text: str

    def write(self, folder: Path) -> None:
        """Write it where `import NAME` finds it, with `folder` on the import path."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.py").write_text(self.text, encoding="utf-8")


class CodeWriter:
    """Collects functions and their dependencies as the text of one module.

    Importable objects are imported. Functions and classes of a script or a notebook are written as source, with the
    names they use: imports, constants, other functions and classes, and objects of such classes whose attributes are
    constants.

    Example:
        >>> from math import floor
        >>> writer = CodeWriter("reward")
        >>> writer.add(floor)
        'math:floor'
    """

    def __init__(self, kind: str) -> None:
        """`kind` is the beginning of the module's name, and stands in messages."""
        self._kind = kind
        self._imports: dict[str, str] = {}
        self._parts: list[str] = []
        self._values: dict[str, Any] = {}
        """The value of each name of the module."""
        self.folders: set[str] = set()
        """Folders of the caller's own modules, which must be on the import path of a process that loads this one."""
        self._has_future_annotations = False
        self._scope: Mapping[str, Any] = {}
        """The namespace in which the current source was defined."""
        self._user = ""
        """The name of the added function whose dependencies are being written."""

    def add(self, function: Callable[..., Any]) -> str:
        """Add a callable, and return `module:name` if it can be imported, or `:name` in the module written here.

        Raises:
            RewardError: the callable, or one of its dependencies, cannot be written.
        """
        if (path := importable(function)) is not None:
            self._note_folder(path.partition(":")[0])
            return path
        name = getattr(function, "__name__", None) or type(function).__name__.lower()
        if name == "<lambda>":
            raise RewardError(
                f"{self._kind}: a lambda has no source of its own that could be copied into the run; write it as a "
                "function: def reward(completions, answer, **columns): return [...]"
            )
        if isinstance(function, MethodType):
            name = f"{name}_of_{type(function.__self__).__name__.lower()}"
        self._user = name
        called = function if hasattr(function, "__globals__") else type(function).__call__
        self._scope = getattr(getattr(function, "__func__", called), "__globals__", vars(sys.modules["__main__"]))
        self._define(name, function)
        return f":{name}"

    def qualified(self, name: str) -> str:
        """The import path `module:function` of a name that `add` returned, once everything is added."""
        return f"{self.module().name}{name}" if name.startswith(":") else name

    @property
    def is_empty(self) -> bool:
        """Whether nothing had to be written."""
        return not self._parts

    def module(self) -> WrittenModule:
        """The module of everything that was added."""
        future = ["from __future__ import annotations"] if self._has_future_annotations else []
        head = '"""Functions of the session that started this run, for its verifier processes."""'
        imports = sorted(dict.fromkeys(self._imports.values()))
        text = "\n\n".join(filter(None, [head, "\n".join(future), "\n".join(imports)]))
        text += "".join(f"\n\n{'' if _is_constant(part) else chr(10)}{part}" for part in self._parts) + "\n"
        checksum = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        return WrittenModule(f"{self._kind}_{checksum}", text)

    def _define(self, name: str, value: Any) -> None:
        """Write a definition of `name` as `value`, after its dependencies."""
        if name in self._values:
            if self._values[name] is not value and not _equal(self._values[name], value):
                raise RewardError(
                    f"{self._kind} {self._user!r}: two different things are called {name!r} in what it uses; rename one"
                )
            return
        self._values[name] = value
        if isinstance(value, ModuleType):
            self._import(name, value)
        elif (path := importable(value)) is not None:
            self._import_from(name, path)
        elif isinstance(inspect.unwrap(value) if callable(value) else value, FunctionType | type):
            self._write_source(name, value)
        else:
            self._parts.append(f"{name} = {self._expression(name, value)}")

    def _import(self, name: str, module: ModuleType) -> None:
        full = module.__name__
        if full == "__main__" or not _has_spec(full):
            raise self._refused(name, "a module that only this process has,")
        self._note_folder(full)
        if name == full.partition(".")[0] and "." not in full:
            self._imports[name] = f"import {full}"
        else:
            self._imports[name] = f"import {full} as {name}"

    def _import_from(self, name: str, path: str) -> None:
        module, _, attribute = path.partition(":")
        if module == "builtins" and name == attribute:
            return
        self._note_folder(module)
        if "." in attribute:
            self._imports[f"{module}."] = f"import {module}"
            self._parts.append(f"{name} = {module}.{attribute}")
        else:
            self._imports[name] = f"from {module} import {attribute}" + ("" if name == attribute else f" as {name}")

    def _write_source(self, name: str, value: Any) -> None:
        """Write the source of a function or a class, after its dependencies."""
        if getattr(value, "__name__", "") == "<lambda>":
            raise self._refused(name, "a lambda, which has no source of its own: write it as a function with def")
        found = find_source(value)
        if found is None:
            raise RewardError(
                f"{self._kind} {self._user!r}: the source of {name!r} cannot be found, so it cannot be copied "
                "into the run; move it to a file and pass 'module:function', or define it in a notebook "
                "cell or a script"
            )
        own_name, namespace = found.name, found.namespace or self._scope
        if own_name != name and own_name not in self._values:
            self._values[own_name] = value
        self._has_future_annotations |= found.has_future_annotations
        outer, self._scope = self._scope, namespace
        for used in needed_names(found):
            if used == own_name:
                continue
            if used in namespace:
                self._define(used, namespace[used])
            elif not hasattr(builtins, used):
                raise RewardError(f"{self._kind} {self._user!r} uses {used!r}, which is not defined")
        self._scope = outer
        for chain in _module_chains(found.text, namespace):
            self._imports[chain] = f"import {chain}"
        self._parts.append(found.text)
        if own_name != name:
            self._parts.append(f"{name} = {own_name}")

    def _expression(self, name: str, value: Any) -> str:
        """Format a value as an expression. Raises RewardError if it has none."""
        if type(value) in (float, complex):
            return repr(value) if cmath.isfinite(value) else f"{type(value).__name__}({str(value)!r})"
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, Enum):
            return f"{self._reference(name, type(value))}.{value.name}"
        if type(value).__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
            return self._expression(name, value.item())
        if type(value) in (list, tuple, set, frozenset, dict):
            return self._collection(name, value)
        if isinstance(value, re.Pattern | PurePath | Decimal | Fraction | functools.partial):
            return self._made_by_a_call(name, value)
        if isinstance(value, MethodType):
            return f"{self._reference(name, value.__self__)}.{value.__func__.__name__}"
        if isinstance(value, ModuleType | FunctionType | type) or importable(value) is not None:
            return self._reference(name, value)
        return self._object(name, value)

    def _made_by_a_call(self, name: str, value: Any) -> str:
        """A call with constants that makes the value: a pattern, a path, an exact number, a partial function."""
        if isinstance(value, re.Pattern):
            self._define("re", re)
            flags = value.flags & ~re.UNICODE.value if isinstance(value.pattern, str) else value.flags
            return f"re.compile({value.pattern!r}{f', {flags}' if flags else ''})"
        if isinstance(value, functools.partial):
            self._define("functools", functools)
            arguments = [self._reference(name, value.func), *(self._expression(name, each) for each in value.args)]
            arguments += [f"{key}={self._expression(name, item)}" for key, item in value.keywords.items()]
            return f"functools.partial({', '.join(arguments)})"
        kind = type(value) if not isinstance(value, PurePath) else Path if isinstance(value, Path) else PurePath
        self._define(kind.__name__, kind)
        return f"{kind.__name__}({str(value)!r})"

    def _collection(self, name: str, value: Any) -> str:
        if isinstance(value, dict):
            pairs = [f"{self._expression(name, k)}: {self._expression(name, v)}" for k, v in value.items()]
            return f"{{{', '.join(pairs)}}}"
        items = [self._expression(name, item) for item in value]
        if isinstance(value, set | frozenset):
            items = sorted(items)  # the order of a set differs between processes
            return f"{type(value).__name__}([{', '.join(items)}])"
        text = ", ".join(items)
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' if len(items) == 1 else ''})"

    def _object(self, name: str, value: Any) -> str:
        """Restore an object of a caller's class from its attributes, without calling the class."""
        kind = type(value)
        if kind.__module__ == "builtins" or importable(kind) is not None or not hasattr(value, "__dict__"):
            raise self._refused(name, f"of type {kind.__qualname__}, which is no constant")
        self._define(kind.__name__, kind)
        state = {key: self._expression(f"{name}.{key}", item) for key, item in vars(value).items()}
        self._values.setdefault("_restored", _RESTORED)
        if _RESTORED not in self._parts:
            self._parts.append(_RESTORED)
        return f"_restored({kind.__name__}, {{{', '.join(f'{key!r}: {text}' for key, text in state.items())}}})"

    def _reference(self, name: str, value: Any) -> str:
        """An expression for a module, a function, a class or an object."""
        if isinstance(value, FunctionType | type | ModuleType):
            own = value.__name__.replace(".", "_")
            if own == "<lambda>":
                raise self._refused(name, "a lambda, which has no source of its own: write it as a function with def")
            self._define(own, value)
            return own
        if (path := importable(value)) is not None:
            own = path.partition(":")[2].replace(".", "_")
            self._define(own, value)
            return own
        return self._expression(name, value)

    def _note_folder(self, module: str) -> None:
        """Record the folder of a caller's own module, which other processes do not search."""
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec is None or spec.origin is None or spec.origin in ("built-in", "frozen"):
            return
        folder = Path(spec.origin).resolve().parent
        folder = folder.parent if spec.submodule_search_locations else folder
        if str(folder) not in _INSTALLED and str(folder) in {str(Path(entry).resolve()) for entry in sys.path}:
            self.folders.add(str(folder))

    def _refused(self, name: str, what: str) -> RewardError:
        return RewardError(
            f"{self._kind} {self._user!r} uses {name!r}, {what} and cannot be written into the run: "
            "make it inside the function, or put the function into a module and hand it over as 'module:function'"
        )


_INSTALLED = {str(Path(path).resolve()) for path in sysconfig.get_paths().values()}
_RESTORED = '''def _restored(kind, attributes):
    """An object with these attributes, as it was when the run began."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made'''


@dataclass(frozen=True)
class Source:
    """The source of one function or class."""

    name: str
    text: str
    namespace: Mapping[str, Any]
    """The namespace of the definition: globals and closure; empty if it is unknown."""
    has_future_annotations: bool = False


def importable(value: Any) -> str | None:
    """`module:name` of an importable object; None if a script, a notebook or a function defines it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return f"{module}:{name}" if found is value and _has_spec(module) else None


def find_source(value: Any) -> Source | None:
    """The source of a function or a class, decorators included; None if it is unknown.

    A notebook's cells are found as scripts are: both stand in `linecache`, under the file name of their code.
    """
    return _class_source(value) if isinstance(value, type) else _function_source(value)


def _function_source(value: Any) -> Source | None:
    inner = inspect.unwrap(value)
    is_decorated = value is not inner and inner.__globals__.get(inner.__name__) is value
    if not is_decorated:  # what a call of a decorator gave: the wrapper itself, whose variables hold the rest
        if not isinstance(value, FunctionType):
            return None
        inner = value
    code = inner.__code__
    for node, lines in _definitions(code.co_filename, inner.__globals__, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.name == code.co_name and _first_line(node) == code.co_firstlineno:
            # inside of what its decorators have made of it, a function stands without them
            is_raw = not hasattr(value, "__wrapped__") and inner.__globals__.get(inner.__name__) is not inner
            text = _text_of(node, lines, with_decorators=not is_raw)
            has_future_annotations = bool(code.co_flags & _FUTURE_ANNOTATIONS)
            return Source(code.co_name, text, _namespace([inner]), has_future_annotations)
    return None


def _class_source(value: type) -> Source | None:
    """The source of a class: where one of its functions stands, or its last definition in the script or the cells."""
    functions = [function for function in map(_function_in, vars(value).values()) if function is not None]
    kinds = (ast.ClassDef,)
    for function in functions:
        code = function.__code__
        for node, lines in _definitions(code.co_filename, function.__globals__, kinds):
            if node.name == value.__name__ and _first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0):
                flag = bool(code.co_flags & _FUTURE_ANNOTATIONS)
                own = [each for each in functions if each.__code__.co_filename == code.co_filename]
                return Source(node.name, _text_of(node, lines), _namespace(own), flag)
    main = getattr(sys.modules.get(value.__module__), "__file__", None)
    cells = [name for name in reversed(linecache.cache) if name.startswith("<ipython") or "ipykernel" in name]
    for file in [*cells, *([main] if main else [])]:
        for node, lines in _definitions(file, {}, kinds):
            if node.name == value.__name__:
                return Source(node.name, _text_of(node, lines), {})
    return None


def _function_in(member: Any) -> FunctionType | None:
    """The function behind a member of a class; None for others, and for what `dataclass` and the like have made."""
    inner = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
    is_own = isinstance(inner, FunctionType) and not inner.__code__.co_filename.startswith("<string")
    return inner if is_own else None


def _definitions(
    filename: str, module_globals: dict[str, Any], kinds: tuple[type[Any], ...]
) -> list[tuple[Any, list[str]]]:
    """The definitions of these kinds in a file or a cell, the last one first, with the lines of the whole."""
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
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not yet set: a function that calls itself
                names[name] = cell.cell_contents
    return names


def needed_names(source: Source) -> list[str]:
    """The sorted names that a definition takes from outside."""
    future = "from __future__ import annotations\n" if source.has_future_annotations else ""
    top = symtable.symtable(future + source.text, "source", "exec")
    needed: dict[str, None] = {}
    tables = [top]
    while tables:
        table = tables.pop(0)
        for symbol in table.get_symbols():
            if (symbol.is_global() or (table is top and symbol.is_referenced())) and not symbol.is_imported():
                needed.setdefault(symbol.get_name())
        tables += table.get_children()
    return sorted(needed)


def _module_chains(text: str, namespace: Mapping[str, Any]) -> list[str]:
    """The submodules that a text names by their full path, `xml.etree.ElementTree`: `import xml` alone has them not."""
    found = []
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
            if isinstance(module, ModuleType) and module.__name__ in sys.modules and "." in module.__name__:
                found.append(module.__name__)
    return found


def _has_spec(module: str) -> bool:
    try:
        return module in sys.builtin_module_names or importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):
        return False


def _equal(first: Any, second: Any) -> bool:
    """Whether two constants are equal; other objects are compared by identity."""
    return type(first) is type(second) and isinstance(first, (*_PLAIN, float, list, tuple, dict)) and first == second


def _is_constant(part: str) -> bool:
    return not part.startswith(("def ", "class ", "async def ", "@"))
