"""Gives up the rights of its process, then runs one role of `rpc`: `python process.py
INIT_MESSAGE`.

Imports little of the standard library, because every program waits for it. The package describes
the layers. A layer that this system lacks is skipped; the process reports whether the others
confine it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import sys

TYPE_CHECKING = False  # as in typing, whose import takes a tenth of the start
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

_LINUX = sys.platform == "linux"
_NOBODY = 65534
_NEW_USER = 0x10000000
_NEW_MOUNTS_NETWORK_PROCESSES_IPC = 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000
_MS_READ_ONLY = 1
_MS_REMOUNT = 0x20
_MS_BIND = 0x1000
_MS_RECURSIVE = 0x4000
_MS_PRIVATE = 0x40000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DETACH = 2
_EMPTY_ROOT = "/tmp"  # a folder that exists everywhere and is covered
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_READ_FILE = 1 << 2
_READ_DIRECTORY = 1 << 3
_INSTALLED_PACKAGES = ("site-packages", "dist-packages")
_MAX_FILES = 32
_STACK_BYTES = 1 << 27
"""Enough for a cached function that calls itself 100,000 times in Python 3.11, as judges of
contests allow. Linux keeps so many addresses free below every stack, whatever its first limit was.
"""


def main() -> None:
    """Fork, confine the child and run its role there; this process waits and exits with the code of
    the child.
    """
    # behind the standard library, for the roles only
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import rpc

    init_message: Mapping[str, Any] = json.loads(sys.argv[1])
    with os.fdopen(init_message["sources_fd"], encoding="utf-8", errors="surrogatepass") as file:
        sources = json.load(file)
    rpc.load(init_message["role"], sources)
    del sys.path[-1], sys.modules["rpc"]  # the program imports from the standard library only
    libc = ctypes.CDLL(None, use_errno=True)
    files_hidden = "namespaces" in init_message["layers"] and _separate(
        libc, init_message["readable"]
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until this process can pass it on
    child = os.fork()
    if child:
        _wait_for(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    reading_confined, filtered = _confine(libc, init_message)
    confined = (files_hidden or reading_confined) and filtered
    os.write(init_message["ready_fd"], b"confined" if confined else b"unconfined")
    os.close(init_message["ready_fd"])
    getattr(rpc, init_message["role"])(init_message["channel_fd"], *sources)


def _wait_for(child: int) -> None:
    """Wait for the child and exit with its code; a SIGTERM to this process kills the child."""
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # a reader of the child's output waits until the last writer has closed it
    os.closerange(0, 1 << 16)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _separate(libc: ctypes.CDLL, readable: Sequence[str]) -> bool:
    """Enter new namespaces as far as the system allows; return whether all files except these paths
    are hidden.
    """
    if not _LINUX:
        return False
    user = os.getuid()
    group = os.getgid()
    try:
        if user != 0 or libc.unshare(_NEW_MOUNTS_NETWORK_PROCESSES_IPC) != 0:
            _require(libc.unshare(_NEW_USER | _NEW_MOUNTS_NETWORK_PROCESSES_IPC))
            for name, ids in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(ids)
        _hide_files(libc, readable)
    # without names for its ids, or without mounts, the process is separate in the other respects
    except OSError:
        return False
    return True


def _hide_files(libc: ctypes.CDLL, readable: Sequence[str]) -> None:
    """Replace the file tree by one with only these paths.

    Raises OSError if mounting is not allowed.
    """

    def mount(
        source: str, target: str, kind: bytes | None, flags: int, options: bytes | None = None
    ) -> None:
        _require(libc.mount(source.encode(), os.fsencode(target), kind, flags, options))

    pivot_root = _PIVOT_ROOT.get(os.uname().machine)
    if pivot_root is None:
        raise OSError(errno.ENOSYS, "no number is known for pivot_root")
    opened = {
        path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in readable if os.path.exists(path)
    }
    folders = {path for path in opened if os.path.isdir(path)}
    mount("none", "/", None, _MS_RECURSIVE | _MS_PRIVATE)
    mount("none", _EMPTY_ROOT, b"tmpfs", 0, b"mode=755")
    for path, fd in opened.items():
        target = f"{_EMPTY_ROOT}{path}"
        os.makedirs(target if path in folders else os.path.dirname(target), exist_ok=True)
        if path not in folders:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(f"/proc/self/fd/{fd}", target, None, _MS_BIND | _MS_RECURSIVE)
        os.close(fd)
    os.chdir(_EMPTY_ROOT)
    _require(libc.syscall(pivot_root, b".", b"."))  # the old tree lies upon the new one
    _require(libc.umount2(b".", _DETACH))
    mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_READ_ONLY)
    os.chdir("/")


def _confine(libc: ctypes.CDLL, init_message: Mapping[str, Any]) -> tuple[bool, bool]:
    """Give up rights for good; system calls come last because this function makes many.

    Returns:
        Whether Landlock is in force, and whether the filter of system calls is.
    """
    layers = init_message["layers"]
    if "user" in layers:
        if os.getuid() == 0 and all(_open_to_others(path) for path in init_message["readable"]):
            with contextlib.suppress(PermissionError):  # a root that may not change
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
        if _LINUX:  # version 3 of the call: no capability
            _require(libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()))
    if _LINUX:  # after the change of user, which clears the first
        _require(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        _require(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    readable = init_message["readable"]
    abi = init_message["landlock_abi"]
    reading_confined = _LINUX and "landlock" in layers and _landlock(libc, readable, abi)
    if "limits" in layers:
        _limit(init_message)
    program = bytes.fromhex(init_message["filter_program"])
    filtered = _LINUX and "system_calls" in layers and _filter_system_calls(libc, program)
    return reading_confined, filtered


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _limit(init_message: Mapping[str, Any]) -> None:
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CPU, init_message["cpu_s"]),
        (resource.RLIMIT_AS, init_message["memory_bytes"]),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard_limit = resource.getrlimit(limit)
        bound = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        try:
            resource.setrlimit(limit, (bound, bound))
        except (ValueError, OSError):
            if _LINUX:  # macOS refuses some; the probes find the consequences
                raise


def _open_to_others(path: str) -> bool:
    """Return True if every user can read the path; ignore folders that do not exist."""
    while path != os.path.dirname(path):
        if os.path.isdir(path) and not os.stat(path).st_mode & 0o001:
            return False
        path = os.path.dirname(path)
    return True


def _landlock(libc: ctypes.CDLL, readable: Sequence[str], max_abi: int) -> bool:
    """Allow reading these paths and no other file access, TCP or signal, as far as this kernel
    knows these rights.

    Returns:
        Whether Landlock is in force; older kernels do not have it.
    """
    abi = min(libc.syscall(_LANDLOCK_CREATE, None, 0, 1), max_abi)
    if abi < 1:
        return False
    rights = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    handled = (ctypes.c_uint64 * 3)(rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 * (1 + (abi >= 4) + (abi >= 6))
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(size), 0)
    _require(min(ruleset, 0))
    for path, allowed in _readable_files(readable):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = allowed.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        _require(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(opened)
    _require(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)
    return True


def _readable_files(readable: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield paths and their rights, which extend to everything below; files of installed packages
    get none.
    """
    for path in filter(os.path.exists, readable):
        if not os.path.isdir(path):
            yield path, _READ_FILE
        elif any(os.path.exists(f"{path}/{name}") for name in _INSTALLED_PACKAGES):
            # for imports, although it holds for the packages' folders as well
            yield path, _READ_DIRECTORY
            for entry in os.scandir(path):
                if entry.name not in _INSTALLED_PACKAGES and os.path.exists(entry.path):
                    yield entry.path, _READ_FILE
        else:
            yield path, _READ_FILE | _READ_DIRECTORY


def _filter_system_calls(libc: ctypes.CDLL, program: bytes) -> bool:
    """Load the program of `system_calls.py`.

    Returns:
        Whether it is in force: some systems allow no filters, and some machines have no program.
    """
    if not program:
        return False
    instructions = ctypes.create_string_buffer(program, len(program))
    # a struct sock_fprog: the count in the first 16 bits, and the address
    description = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(instructions))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(description), 0, 0) == 0


if __name__ == "__main__":
    main()
