"""From `module:attribute` to the object it names, with an error for each way that fails."""

import difflib
import importlib
import importlib.util
import os
import sys
from functools import reduce
from types import ModuleType
from typing import Any

from dapo.core.errors import RewardError
from dapo.rewards.verdicts import Failure, attempt


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


def _import(name: str, path: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as with `python -m`
    importlib.invalidate_caches()
    module = attempt(lambda: importlib.import_module(name))
    if isinstance(module, ModuleType):
        return module
    if not _exists(name):
        raise RewardError(f"{path!r}: there is no module {name!r} in {directory} or among the installed packages")
    reason = module.reason if isinstance(module, Failure) else "gave no module"
    raise RewardError(f"{path!r}: importing {name} {reason}")


def _exists(name: str) -> bool:
    """Is there such a module, whether or not it can be imported?"""
    found = attempt(lambda: importlib.util.find_spec(name))
    return found is not None and not isinstance(found, Failure)


def _similar(attribute: str, module: ModuleType) -> str:
    names = [name for name in vars(module) if not name.startswith("_")]
    close = difflib.get_close_matches(attribute, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    origin = getattr(module, "__file__", None)
    return f" ({origin})" if origin else ""
