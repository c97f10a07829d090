"""From `module:attribute` to the object it names, with an error for each way that fails."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dapo.core.errors import DataError, RewardError
from dapo.core.suggest import did_you_mean


def load_attribute(path: str) -> Any:
    """Import `module:attribute` (dots allowed on both sides), looking in the current directory first.

    Raises RewardError with the cause in one line.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise RewardError(f"{path!r}: expected module:function, for example my_rewards:brevity")
    module = _import(module_name, path)
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise RewardError(f"{path!r}: module {module_name} has no {attribute!r}{_similar(attribute, module)}") from None


def require_package(package: str, *, extra: str, purpose: str) -> None:
    """Raise DataError with the command that installs `package` if it is not installed."""
    if importlib.util.find_spec(package) is None:
        raise DataError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'dapo-rl[{extra}]'"
        )


def _import(name: str, path: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as with `python -m`
    importlib.invalidate_caches()
    module = try_call(lambda: importlib.import_module(name))
    if isinstance(module, ModuleType):
        return module
    if not _exists(name):
        raise RewardError(f"{path!r}: there is no module {name!r} in {directory} or among the installed packages")
    reason = module.reason if isinstance(module, Failure) else "gave no module"
    raise RewardError(f"{path!r}: importing {name} {reason}")


def _exists(name: str) -> bool:
    """Is there such a module, whether or not it can be imported?"""
    found = try_call(lambda: importlib.util.find_spec(name))
    return found is not None and not isinstance(found, Failure)


def _similar(attribute: str, module: ModuleType) -> str:
    names = [name for name in vars(module) if not name.startswith("_")]
    origin = getattr(module, "__file__", None)
    suggestion = did_you_mean(attribute, names, otherwise="")
    return f"; {suggestion}" if suggestion else f" ({origin})" if origin else ""


T = TypeVar("T")


OUT_OF_MEMORY = "MemoryError (a worker may use reward.memory_gib)"


_MESSAGE_CHARS = 300


@dataclass(frozen=True)
class Failure:
    """A call that raised instead of returning."""

    reason: str
    """`raised ValueError: its first line (file.py, line 12)`."""


def try_call(call: Callable[[], T]) -> T | Failure:
    """`call()`, or why it failed."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() and the timeouts of some libraries are no Exceptions
        return Failure(f"raised {describe(error)}")


def describe(error: BaseException) -> str:
    """An exception on one line: type, first line of its text, and the innermost place."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception's own text is user code too
        lines = ["(its text cannot be read)"]
    name = OUT_OF_MEMORY if isinstance(error, MemoryError) else type(error).__name__
    text = name + (f": {lines[0][:_MESSAGE_CHARS]}" if lines else "")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
