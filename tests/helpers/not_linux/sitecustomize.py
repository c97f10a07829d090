"""Makes the modules of dapo and code_sandbox, in every process that has this folder on its path,
see macOS.

Only they do: other packages are the ones built for this machine. In these modules, `sys.platform`
is darwin, what macOS lacks is missing from `os`, `fcntl`, `select`, `socket` and `resource`, there
are no files below /proc and /dev/shm, and limits of memory are refused. With DAPO_SEEN set, each
process adds its command to that file.
"""

import builtins
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

MISSING = {
    "os": {
        *(
            "memfd_create",
            "posix_fallocate",
            "pidfd_open",
            "eventfd",
            "sched_getaffinity",
            "sched_setaffinity",
        ),
        *(
            "O_TMPFILE",
            "O_PATH",
            "O_DIRECT",
            "setxattr",
            "splice",
            "copy_file_range",
            "unshare",
            "setresuid",
        ),
    },
    "fcntl": {"F_SETLEASE", "F_NOTIFY", "F_SETSIG", "F_SETPIPE_SZ", "F_ADD_SEALS"},
    "select": {"epoll"},
    "socket": {"AF_NETLINK", "AF_VSOCK", "SO_PEERCRED"},
    "resource": {"prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING"},
}
NOT_THERE = ("/proc", "/dev/shm")
OURS = ("dapo",)


def refused(limit: int, bounds: tuple[int, int]) -> None:
    import resource

    if limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        raise ValueError("current limit exceeds maximum limit")
    resource.setrlimit(limit, bounds)


class Seen(types.ModuleType):
    """A standard module as code on macOS sees it."""

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        if real.__name__ == "sys":
            self.__dict__["platform"] = "darwin"
        if real.__name__ == "os":
            self.__dict__["access"] = lambda path, mode: (
                not str(path).startswith(NOT_THERE) and os.access(path, mode)
            )
        if real.__name__ == "resource":
            self.__dict__["setrlimit"] = refused

    def __getattr__(self, name: str) -> Any:
        if name in MISSING.get(self.__name__, ()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


REPLACED = {name: Seen(importlib.import_module(name)) for name in ("sys", *MISSING)}


def import_here(name: str, *arguments: Any, **keywords: Any) -> Any:
    return REPLACED[name] if name in REPLACED else builtins.__import__(name, *arguments, **keywords)


def open_here(file: Any, *arguments: Any, **keywords: Any) -> Any:
    if str(file).startswith(NOT_THERE):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return builtins.open(file, *arguments, **keywords)


class Loader(importlib.machinery.SourceFileLoader):
    """Executes a module with the replaced ones in the place of what it imports."""

    def exec_module(self, module: types.ModuleType) -> None:
        own = {**vars(builtins), "__import__": import_here, "open": open_here}
        module.__dict__["__builtins__"] = own
        super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as usual, and has them loaded by Loader."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        spec = (
            importlib.machinery.PathFinder.find_spec(name, path, target)
            if name.split(".")[0] in OURS
            else None
        )
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def hide(method: Any, absent: Any) -> Any:
    def hidden(self: pathlib.Path, *arguments: Any, **keywords: Any) -> Any:
        if str(self).startswith(NOT_THERE) and sys._getframe(1).f_globals.get(
            "__name__", ""
        ).startswith(OURS):
            if absent is None:
                raise FileNotFoundError(2, "No such file or directory", str(self))
            return absent
        return method(self, *arguments, **keywords)

    return hidden


sys.meta_path.insert(0, Finder())
for method, absent in (
    ("read_text", None),
    ("read_bytes", None),
    ("is_file", False),
    ("is_dir", False),
    ("exists", False),
):
    setattr(pathlib.Path, method, hide(getattr(pathlib.Path, method), absent))
if seen := os.environ.get("DAPO_SEEN"):
    with open(seen, "a") as file:
        file.write(" ".join(sys.orig_argv[1:5]).replace("\n", " ")[:200] + "\n")
