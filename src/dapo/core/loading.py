"""Loads a user's `module:function` and calls code that may raise any exception."""

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import logging
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder, SourceFileLoader
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from dapo.core.errors import DapoError, DataError
from dapo.core.text import did_you_mean

T = TypeVar("T")
OUT_OF_MEMORY = "MemoryError (a worker may use reward.memory_gib)"
_MESSAGE_CHARS = 300
CODE_FOLDERS: list[Path] = [
    Path(folder) for folder in os.environ.get("DAPO_CODE", "").split(os.pathsep) if folder
]
"""Folders of modules that runs have written (`RUN/code`).

They are never on `sys.path`: `load_callable` reads the one
module that an option names, `reward_0123abcd`, if its text has the checksum at the end of its name.
"""
_FOREIGN_FOLDERS = tuple(
    f"{Path(folder)}{os.sep}"
    for folder in {
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    }
)
AGENT_PREFIX = "agent:"
"""Before `module:function` of an agent, where an environment is named."""
_WRITTEN_NAME = re.compile(r"\w+_([0-9a-f]{8})")
THE_CELL = "the cell"
COPIED_FROM = "# copied from "
"""Begins the comment above each copied definition of such a module, with its first line:
`# copied from line 2 of the cell: digits`.
"""
_PLACE = re.compile(rf"{COPIED_FROM}line (\d+) of (.+): (\w+)")


def add_code_folder(folder: Path) -> None:
    """Let `load_callable` read modules of a run from this folder, and from no other of the run."""
    absolute = folder.absolute()
    if absolute not in CODE_FOLDERS:
        CODE_FOLDERS.append(absolute)


def import_locations() -> dict[str, list[str]]:
    """Return the folders of this process's modules, for `use_import_locations` in another one."""
    return {
        "path": [entry for entry in sys.path if entry],
        "code_folders": [str(folder) for folder in CODE_FOLDERS],
    }


def use_import_locations(path: Sequence[str], code_folders: Sequence[str]) -> None:
    """Find the modules that another process finds."""
    sys.path.extend(entry for entry in path if entry not in sys.path)
    for folder in code_folders:
        add_code_folder(Path(folder))


def text_checksum(text: bytes) -> str:
    """Return the end of a written module's name, which the places of its definitions do not change:
    a function keeps its name when it moves in its cell.
    """
    lines = text.splitlines(keepends=True)
    code = b"".join(line for line in lines if not line.startswith(COPIED_FROM.encode()))
    return hashlib.blake2b(code, digest_size=4).hexdigest()


def load_callable(path: str, *, error: type[DapoError], option: str = "") -> Callable[..., Any]:
    """Import `module:function` (either may be dotted) from a run's code or the current directory.

    The current directory stays at the end of the import path, for imports of the module: there it
    hides no installed module. A directory inside of a run is not searched.

    Args:
        path: `module:function`.
        error: the type of the error, which has the cause on one line.
        option: `name=` of the option that holds the path, for the error.
    """
    name, _, attribute = path.partition(":")
    if not name or not attribute:
        raise error(f"{option}{path!r}: expected module:function, for example my_rewards:brevity")
    directory = os.getcwd()
    name = module_name(name)
    is_of_a_run = any(
        Path(directory).is_relative_to(folder.resolve().parent) for folder in CODE_FOLDERS
    )
    if not is_of_a_run and directory not in sys.path:
        sys.path.append(directory)
    # the module may have been written since the last import
    importlib.invalidate_caches()
    written_file = None if name in sys.modules else _written_module(name)
    if written_file is not None and text_checksum(written_file.read_bytes()) != name[-8:]:
        raise error(
            f"{option}{path!r}: {written_file} was changed after the run wrote it: its name ends"
            " with its checksum"
        )
    module = try_call(
        lambda: _import_module(name, written_file, None if is_of_a_run else directory)
    )
    if isinstance(module, Failure):
        source: object = written_file or try_call(partial(importlib.util.find_spec, name))
        if source is None or isinstance(source, Failure):
            hint = ""
            if name.endswith(".py") and Path(name).expanduser().is_file():
                hint = (
                    f"; put the folder of the file in PYTHONPATH, and name it {Path(name).stem}:"
                    f"{attribute}"
                )
            raise error(
                f"{option}{path!r}: there is no module {name!r} in {directory} or among the"
                f" installed packages{hint}"
            )
        doing = f"importing {name}" if written_file is None else "importing its copy in the run"
        raise error(f"{option}{own_name(path)!r}: {doing} {module.reason}")
    try:
        function: Callable[..., Any] = attrgetter(attribute)(module)
    except AttributeError:
        origin = getattr(module, "__file__", None)
        public = [name for name in dir(module) if not name.startswith("_")]
        suggestion = did_you_mean(attribute, public, otherwise="")
        if suggestion:
            hint = f"; {suggestion}"
        elif origin:
            hint = f" ({origin})"
        else:
            hint = ""
        raise error(f"{option}{path!r}: module {name} has no {attribute!r}{hint}") from None
    if not callable(function):
        raise error(f"{option}{path!r} is not callable: it is a {type(function).__name__}")
    return function


def call_text(name: str, function: Callable[..., Any]) -> str:
    """Return a function with its parameters, without types.

    >>> def reward(completions: list[str], limit: int = 3, **columns) -> float: ...
    >>> call_text("reward", reward)
    'reward(completions, limit=3, **columns)'
    """
    signature = inspect.signature(function)
    parameters = [
        str(parameter.replace(annotation=parameter.empty))
        for parameter in signature.replace(return_annotation=signature.empty).parameters.values()
    ]
    return f"{name}({', '.join(parameters)})"


def own_name(path: str) -> str:
    """Return the name that the user gave to a function or class.

    >>> own_name("reward_0123abcd:exact"), own_name("my_rewards:exact")
    ('exact', 'my_rewards:exact')
    >>> own_name("agent:agent_0123abcd:solve")
    'solve'
    """
    module, _, attribute = path.removeprefix(AGENT_PREFIX).partition(":")
    return attribute if attribute and _WRITTEN_NAME.fullmatch(module) else path


def _written_module(name: str) -> Path | None:
    """Return the file of a module in CODE_FOLDERS."""
    if not _WRITTEN_NAME.fullmatch(name):
        return None
    for folder in CODE_FOLDERS:
        file = folder / f"{name}.py"
        if file.is_file():
            return file
    return None


def module_name(name: str) -> str:
    """Return the dotted name of a module that is given as a file in the current directory.

    Any other name stays as it is.

    >>> module_name("recipe/gen/rewards.py"), module_name("recipe.gen.rewards")
    ('recipe.gen.rewards', 'recipe.gen.rewards')
    """
    if not name.endswith(".py"):
        return name
    file = Path(name).expanduser()
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    parts = file.with_suffix("").parts
    if not all(part.isidentifier() for part in parts):
        return name
    return ".".join(parts)


def module_file(name: str) -> Path | None:
    """Find the file of a module that `load_callable` would import, without importing it."""
    name = module_name(name)
    written_file = _written_module(name)
    if written_file is not None:
        return written_file
    folders = [os.getcwd(), *sys.path]
    spec = None
    for part in name.split("."):
        # without its parents' names: the finder would import those that have no __init__.py
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        # none of a module without submodules, in which nothing is found
        folders = list(spec.submodule_search_locations or ())
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return Path(spec.origin)


class _TextLoader(SourceFileLoader):
    """Compiles the text of a file: bytecode beside it may be of another text."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import_module(name: str, written_file: Path | None, directory: str | None) -> ModuleType:
    """Import a module from `written_file`, or else with its top-level package from `directory`.

    A package that is not in `directory` is searched as usual.
    """
    first = name.partition(".")[0]
    spec = None
    if written_file is not None:
        spec = importlib.util.spec_from_file_location(
            name, written_file, loader=_TextLoader(name, str(written_file))
        )
    elif directory is not None and first not in sys.modules:
        spec = PathFinder.find_spec(first, [directory])
    if spec is not None and spec.loader is not None:
        module = sys.modules[first] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(first, None)
            raise
    return importlib.import_module(name)


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub's client, which prints each attempt, within the block; errors still raise."""
    logger = logging.getLogger("huggingface_hub")
    with contextlib.ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        yield


@contextlib.contextmanager
def reading_hub() -> Iterator[None]:
    """Read from the hub within the block, silently; without a network from its cache, at once.

    The hub's client tries for 25 seconds, and again for each file, to reach a host without address.
    """
    from huggingface_hub import constants

    with quiet_hub():
        was_offline = constants.HF_HUB_OFFLINE
        if not _has_address(constants.ENDPOINT):
            constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = was_offline


def _has_address(url: str) -> bool:
    """Return False if the host of `url` has no address here, and no proxy would know it."""
    parts = urlsplit(url)
    if getproxies().get(parts.scheme):
        return True
    try:
        socket.getaddrinfo(parts.hostname, parts.port)
    except OSError:
        return False
    return True


def require_package(package: str, *, purpose: str, error: type[DapoError] = DataError) -> None:
    """Raise an `error` with the command that installs `package` if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # without origin: a folder of that name, such as W&B's
        hint = f"pip install {package.replace('_', '-')}"
        raise error(f"{purpose} needs the package {package}, which is not installed: {hint}")


@dataclass(frozen=True)
class Failure:
    """The failure of a call."""

    reason: str  # `raised ValueError: its first line (file.py, line 12)`


def try_call(call: Callable[[], T], *, cpu_s: float = 0) -> T | Failure:
    """Return the result of `call()`, or the reason of its failure.

    With `cpu_s` in the main thread, a call that needs more processor time than these seconds fails.
    """
    try:
        with _cpu_limit(cpu_s):
            return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() and timeouts of some libraries are not Exceptions
        return Failure(f"raised {describe(error)}")


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took over {seconds:g} s of processor time")

    # which Python's regular expressions notice, too
    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous or signal.SIG_DFL)


def describe(error: BaseException) -> str:
    """Describe an exception on one line: type, first line of the text, file and line.

    The place is the innermost one in the user's own code; if there is none, the innermost one.
    """
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # __str__ is user code too
        lines = ["(its text cannot be read)"]
    text = OUT_OF_MEMORY if isinstance(error, MemoryError) else type(error).__name__
    if lines:
        text += f": {lines[0][:_MESSAGE_CHARS]}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        # user code also fails in what it calls: in json, in numpy, or in a function of dapo
        own = [frame for frame in frames if _is_users(frame.filename)]
        frame = own[-1] if own else frames[-1]
        text += place_in(frame.filename, frame.lineno)
    return text


def place_in(filename: str, line: int | None) -> str:
    """Return the end of a message that names a line of user code.

    A line of a function that was copied into a run is named as the user wrote it: `(digits, line 3
    of the cell)`, or `(script.py, line 12)`.
    """
    if line is not None and _WRITTEN_NAME.fullmatch(Path(filename).stem):
        text = linecache.getlines(filename)[:line]
        for distance, comment in enumerate(reversed(text), start=-1):
            place = _PLACE.fullmatch(comment.rstrip())
            if place is None:
                continue
            written_line = int(place[1]) + distance
            if place[2] == THE_CELL:
                return f" ({place[3]}, line {written_line} of {THE_CELL})"
            return f" ({place[2]}, line {written_line})"
    return f" ({Path(filename).name}, line {line})"


def place_of(function: object) -> str:
    """Return the end of a message that names the first line of a function or a method of the user.

    It is empty for code that no file has.
    """
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return "" if code is None else place_in(code.co_filename, code.co_firstlineno)


def _is_users(filename: str) -> bool:
    """Return True if a file is neither of dapo, nor of Python, nor of an installed package."""
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return not is_installed and not filename.startswith(("<frozen", *_FOREIGN_FOLDERS))
