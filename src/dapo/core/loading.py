"""Loads a user's `module:function` and calls code that may raise any exception."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dapo.core.errors import DapoError, DataError
from dapo.core.text import did_you_mean

T = TypeVar("T")
OUT_OF_MEMORY = "MemoryError (a worker may use reward.memory_gib)"
_MESSAGE_CHARS = 300


def load_callable(path: str, *, error: type[DapoError], option: str = "") -> Callable[..., Any]:
    """Import `module:function` (dots allowed on both sides), looking in the current directory first.

    The current directory stays at the end of the import path, for what the module imports from beside it: there it
    hides no installed module. Raises an `error` with the cause on one line; `option` is `name=` of the option that
    holds the path.
    """
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise error(f"{option}{path!r}: expected module:function, for example my_rewards:brevity")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)
    importlib.invalidate_caches()
    module = try_call(lambda: _import_module(name, directory))
    if isinstance(module, Failure):
        found = try_call(lambda: importlib.util.find_spec(name))
        if found is None or isinstance(found, Failure):
            raise error(f"{option}{path!r}: there is no module {name!r} in {directory} or among the installed packages")
        raise error(f"{option}{path!r}: importing {name} {module.reason}")
    try:
        function: Callable[..., Any] = attrgetter(attribute)(module)
    except AttributeError:
        origin = getattr(module, "__file__", None)
        public = [name for name in dir(module) if not name.startswith("_")]
        suggestion = did_you_mean(attribute, public, otherwise="")
        hint = f"; {suggestion}" if suggestion else f" ({origin})" if origin else ""
        raise error(f"{option}{path!r}: module {name} has no {attribute!r}{hint}") from None
    if not callable(function):
        raise error(f"{option}{path!r} is not callable: it is a {type(function).__name__}")
    return function


def _import_module(name: str, directory: str) -> ModuleType:
    """Import a module whose top-level package is taken from `directory` if it exists there."""
    first = name.partition(".")[0]
    spec = PathFinder.find_spec(first, [directory]) if first not in sys.modules else None
    if spec is not None and spec.loader is not None:
        module = sys.modules[first] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(first, None)
            raise
    return importlib.import_module(name)


def require_package(package: str, *, extra: str, purpose: str) -> None:
    """Raise DataError with the command that installs `package` if it is not installed."""
    if importlib.util.find_spec(package) is None:
        hint = f"pip install 'dapo-rl[{extra}]'"
        raise DataError(f"{purpose} needs the package {package}, which is not installed: {hint}")


@dataclass(frozen=True)
class Failure:
    """The failure of a call."""

    reason: str  # `raised ValueError: its first line (file.py, line 12)`


def try_call(call: Callable[[], T]) -> T | Failure:
    """The result of `call()`, or the reason of its failure."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() and timeouts of some libraries are not Exceptions
        return Failure(f"raised {describe(error)}")


def describe(error: BaseException) -> str:
    """An exception on one line: its type, the first line of its text, the innermost file and line."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # __str__ is user code too
        lines = ["(its text cannot be read)"]
    name = OUT_OF_MEMORY if isinstance(error, MemoryError) else type(error).__name__
    text = name + (f": {lines[0][:_MESSAGE_CHARS]}" if lines else "")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
