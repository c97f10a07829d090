"""Writes a caller's functions as a module for other processes. Imports no torch."""

import builtins
import cmath
import copy
import functools
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import Path, PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

from dapo.api.code_source import (
    Source,
    find_source,
    has_spec,
    importable,
    module_chains,
    needed_names,
)
from dapo.core.errors import RewardError
from dapo.core.files import PRIVATE, atomic_file, make_private_folder
from dapo.core.loading import COPIED_FROM, text_checksum
from dapo.core.source_secrets import find_in_source

_DEFINITIONS = {
    "reward": "a function: def reward(completions, answer, **columns): return [...]",
    "agent": "a function: def solve(problem, *, base_url, api_key): return REWARD",
    "environment": "a class with reset(problem, seed) and step(action)",
    "tool": "a function with types and a docstring: def search(query: str) -> str",
    "loss": "a function: def loss(logprobs, old_logprobs, advantages, mask, weights): return"
    " LOSS, METRICS",
    "filter": "a function: def keep(group): return True or False",
}
"""What the user writes in place of a lambda."""
_PLAIN = (str, bytes, bool, int, type(None), type(Ellipsis))


@dataclass(frozen=True)
class WrittenModule:
    """A module's text, and its name, which ends with a checksum of the text."""

    name: str
    text: str

    def write(self, folder: Path) -> None:
        make_private_folder(folder)
        with atomic_file(folder / f"{self.name}.py", PRIVATE) as temporary:
            temporary.write_text(self.text, encoding="utf-8")


class NameClash(RewardError):
    """Two different things have one name, so that one module cannot hold both."""


class CodeWriter:
    """Collects functions and their dependencies as the text of one module.

    The module imports importable objects. It copies the source of functions and classes of a script
    or a notebook, with the names that they use: imports, constants, functions, classes, and objects
    whose attributes are constants.

    Example:
        >>> from math import floor
        >>> writer = CodeWriter("reward")
        >>> writer.add(floor)
        'math:floor'
    """

    def __init__(self, kind: str) -> None:
        """`kind` starts the module's name and messages."""
        self._kind = kind
        self._imports: dict[str, str] = {}
        self._parts: list[str] = []
        self._values: dict[str, Any] = {}
        """The values by their names in the module."""
        self.folders: set[str] = set()
        """Folders of the caller's own modules, which a process that loads this module must search.
        """
        self._places: dict[str, str] = {}
        """Comments that name the first lines of copied parts, by the text of the part."""
        self._has_future_annotations = False
        self._scope: Mapping[str, Any] = {}
        """The namespace in which the current source was defined."""
        self._user = ""
        """The name of the added function whose dependencies are being written."""

    def add(self, function: Callable[..., Any]) -> str:
        """Add a callable; return `module:name`, or `:name` if its source is written here.

        Raises:
            RewardError: the callable, or one of its dependencies, cannot be written; nothing of it
                is added.
        """
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        try:
            return self._add(function)
        except RewardError:
            vars(self).update(before)
            raise

    def _add(self, function: Callable[..., Any]) -> str:
        if (path := importable(function)) is not None:
            self._note_folder(path.partition(":")[0])
            return path
        name = getattr(function, "__name__", None) or type(function).__name__.lower()
        if name == "<lambda>":
            raise RewardError(
                f"{self._kind}: the source of a lambda cannot be copied into the run; write it as"
                f" {_DEFINITIONS.get(self._kind, 'a function')}"
            )
        if isinstance(function, MethodType):
            name = f"{name}_of_{type(function.__self__).__name__.lower()}"
        self._user = name
        called = function if hasattr(function, "__globals__") else type(function).__call__
        self._scope = getattr(
            getattr(function, "__func__", called), "__globals__", vars(sys.modules["__main__"])
        )
        self._define(name, function)
        if secret := next(find_in_source("\n".join(self._parts)), None):
            raise RewardError(
                f"{self._kind} {name!r}: {' '.join(secret)}, which would be written into the run:"
                " read it inside the function, as in os.environ['NAME']"
            )
        return f":{name}"

    def qualified(self, name: str) -> str:
        """Return the import path `module:function` of a name from `add`, after the last `add`."""
        return f"{self.module().name}{name}" if name.startswith(":") else name

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def module(self) -> WrittenModule:
        future = ["from __future__ import annotations"] if self._has_future_annotations else []
        head = '"""Functions of the session that started this run, for its verifier processes."""'
        imports = sorted(dict.fromkeys(self._imports.values()))
        text = "\n\n".join(filter(None, [head, "\n".join(future), "\n".join(imports)]))
        for part in self._parts:
            is_block = part.startswith(("def ", "class ", "async def ", "@"))
            text += "\n\n\n" if is_block else "\n\n"
            text += f"{self._places.get(part, '')}{part}"
        text += "\n"
        return WrittenModule(f"{self._kind}_{text_checksum(text.encode())}", text)

    def _define(self, name: str, value: Any) -> None:
        """Write `name` with the definition of `value`, after its dependencies."""
        if name in self._values:
            if self._values[name] is not value and not _equal(self._values[name], value):
                raise NameClash(
                    f"{self._kind} {self._user!r}: it uses two different things called {name!r};"
                    " rename one"
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
        if full == "__main__" or not has_spec(full):
            raise self._refused(name, "a module that exists only in this process,")
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
            self._imports[name] = f"from {module} import {attribute}" + (
                "" if name == attribute else f" as {name}"
            )

    def _write_source(self, name: str, value: Any) -> None:
        if getattr(value, "__name__", "") == "<lambda>":
            raise self._refused(
                name, "a lambda, which has no source of its own: write it as a function with def"
            )
        source = find_source(value)
        if source is None:
            raise RewardError(
                f"{self._kind} {self._user!r}: the source of {name!r} cannot be found, so it cannot"
                " be copied into the run; move it to a file and pass 'module:function', or define"
                " it in a notebook cell or a script"
            )
        own_name = source.name
        namespace = source.namespace or self._scope
        if own_name != name and own_name not in self._values:
            self._values[own_name] = value
        self._has_future_annotations |= source.has_future_annotations
        outer = self._scope
        self._scope = namespace
        for symbol in needed_names(source):
            if symbol == own_name:
                continue
            if symbol in namespace:
                self._define(symbol, namespace[symbol])
            elif not hasattr(builtins, symbol):
                raise RewardError(
                    f"{self._kind} {self._user!r} uses {symbol!r}, which is not defined"
                )
        self._scope = outer
        if isinstance(value, type):
            self._write_earlier_definitions(value, source)
        for chain in module_chains(source.text, namespace):
            self._imports[chain] = f"import {chain}"
        self._places[source.text] = f"{COPIED_FROM}{source.place}: {own_name}\n"
        self._parts.append(source.text)
        if own_name != name:
            self._parts.append(f"{name} = {own_name}")

    def _write_earlier_definitions(self, kind: type, source: Source) -> None:
        """Write the bases of a class that have its own name, `class Game(Game)`, before it."""
        for base in kind.__bases__:
            if base.__name__ != source.name or importable(base) is not None:
                continue
            earlier = find_source(base)
            # without functions a class is found by its name alone, which is the later one's, too
            is_known = earlier is not None and earlier.namespace and earlier.text != source.text
            if not is_known:
                raise RewardError(
                    f"{self._kind} {self._user!r}: {source.name!r} extends an earlier class of its"
                    " own name, whose source cannot be found; give the two different names"
                )
            self._write_source(source.name, base)

    def _expression(self, name: str, value: Any) -> str:
        """Format a value as an expression. Raises RewardError if it has none."""
        if type(value) in (float, complex):
            return (
                repr(value) if cmath.isfinite(value) else f"{type(value).__name__}({str(value)!r})"
            )
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, Flag):
            # a combination of members, such as re.I | re.M, is no attribute of its class
            return f"{self._reference(name, type(value))}({value.value!r})"
        if isinstance(value, Enum):
            return f"{self._reference(name, type(value))}.{value.name}"
        if (
            type(value).__module__ == "numpy"
            and hasattr(value, "item")
            and not hasattr(value, "__len__")
        ):
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
        """Return a call that makes a pattern, a path, an exact number or a partial function."""
        if isinstance(value, re.Pattern):
            self._define("re", re)
            flags = (
                value.flags & ~re.UNICODE.value if isinstance(value.pattern, str) else value.flags
            )
            return f"re.compile({value.pattern!r}{f', {flags}' if flags else ''})"
        if isinstance(value, functools.partial):
            self._define("functools", functools)
            arguments = [
                self._reference(name, value.func),
                *(self._expression(name, argument) for argument in value.args),
            ]
            arguments += [
                f"{key}={self._expression(name, item)}" for key, item in value.keywords.items()
            ]
            return f"functools.partial({', '.join(arguments)})"
        if not isinstance(value, PurePath):
            kind = type(value)
        elif isinstance(value, Path):
            kind = Path
        else:
            kind = PurePath
        self._define(kind.__name__, kind)
        return f"{kind.__name__}({str(value)!r})"

    def _collection(self, name: str, value: Any) -> str:
        if isinstance(value, dict):
            pairs = [
                f"{self._expression(name, k)}: {self._expression(name, v)}"
                for k, v in value.items()
            ]
            return f"{{{', '.join(pairs)}}}"
        items = [self._expression(name, item) for item in value]
        if isinstance(value, set | frozenset):
            items = sorted(items)  # the order of a set differs between processes
            return f"{type(value).__name__}([{', '.join(items)}])"
        text = ", ".join(items)
        return (
            f"[{text}]" if isinstance(value, list) else f"({text}{',' if len(items) == 1 else ''})"
        )

    def _object(self, name: str, value: Any) -> str:
        """Return an expression that restores an object from its attributes, without a call."""
        kind = type(value)
        if (
            kind.__module__ == "builtins"
            or importable(kind) is not None
            or not hasattr(value, "__dict__")
            or _has_contents(kind)
        ):
            raise self._refused(name, f"of type {kind.__qualname__}, which is not a constant")
        self._define(kind.__name__, kind)
        state = {key: self._expression(f"{name}.{key}", item) for key, item in vars(value).items()}
        self._values.setdefault("_restored", _RESTORED)
        if _RESTORED not in self._parts:
            self._parts.append(_RESTORED)
        return (
            f"_restored({kind.__name__},"
            f" {{{', '.join(f'{key!r}: {text}' for key, text in state.items())}}})"
        )

    def _reference(self, name: str, value: Any) -> str:
        if isinstance(value, FunctionType | type | ModuleType):
            identifier = value.__name__.replace(".", "_")
            if identifier == "<lambda>":
                raise self._refused(
                    name,
                    "a lambda, which has no source of its own: write it as a function with def",
                )
            self._define(identifier, value)
            return identifier
        if (path := importable(value)) is not None:
            identifier = path.partition(":")[2].replace(".", "_")
            self._define(identifier, value)
            return identifier
        return self._expression(name, value)

    def _note_folder(self, module: str) -> None:
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec is None or spec.origin is None or spec.origin in ("built-in", "frozen"):
            return
        folder = Path(spec.origin).resolve().parent
        folder = folder.parent if spec.submodule_search_locations else folder
        if str(folder) not in _INSTALLED and str(folder) in {
            str(Path(entry).resolve()) for entry in sys.path
        }:
            self.folders.add(str(folder))

    def _refused(self, name: str, what: str) -> RewardError:
        return RewardError(
            f"{self._kind} {self._user!r} uses {name!r}, {what} and cannot be written into the run:"
            " make it inside the function, or put the function into a module and pass"
            " 'module:function'"
        )


_INSTALLED = {str(Path(path).resolve()) for path in sysconfig.get_paths().values()}
_RESTORED = '''def _restored(kind, attributes):
    """An object with the attributes that it had at the start of the run."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made'''


def _has_contents(kind: type) -> bool:
    """Return True for a class that extends a built-in one: a list holds more than attributes."""
    return any(base.__module__ == "builtins" and base is not object for base in kind.__mro__)


def _equal(first: Any, second: Any) -> bool:
    return (
        type(first) is type(second)
        and isinstance(first, (*_PLAIN, float, list, tuple, dict))
        and first == second
    )
