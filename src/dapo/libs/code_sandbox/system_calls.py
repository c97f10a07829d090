"""Lists the system calls that a confined process may make, as a filter program for seccomp(2).

Every other call fails with EPERM, including those of future kernels. The listed calls compute,
read, and write to files that are already open; none starts a process, communicates, or changes a
file, a process or the system. A filter sees numbers and not the memory behind pointers, so it
cannot tell one path from another: Landlock and namespaces restrict the files that can be read
(`confined/process.py`).

A call by the processor's 32-bit convention kills the process; calls of x32 have numbers that are
not listed.
"""

import struct
import sys
from collections.abc import Iterable
from functools import cache

_ANY = 0xFFFFFFFF
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}

# struct seccomp_data of linux/seccomp.h, on a little-endian processor
_NUMBER = 0
_ARCH = 4
_ARGUMENTS = 16
_ARGUMENT_BYTES = 8
_HALF = 4
# linux/bpf_common.h: load a word of the data, return, jump if equal, and
_LOAD = 0x20
_RETURN = 0x06
_JUMP_IF_EQUAL = 0x15
_AND = 0x54
# linux/seccomp.h; before 4.14 the first kills the thread, and there is only one
_KILL = 0x80000000
_EPERM = 0x00050000 | 1
_ALLOW = 0x7FFF0000

_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, preadv 295 69, lseek 8 62, close 3 57,
close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, ioctl 16 29, poll 7 -, ppoll 271 73,
select 23 -, pselect6 270 72,
open 2 -, openat 257 56, getdents64 217 61, fstat 5 80, newfstatat 262 79, stat 4 -, lstat 6 -, statx 332 291,
access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getcwd 79 17,
mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, brk 12 214, futex 202 98,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, sigaltstack 131 132,
pause 34 -, alarm 37 -, getitimer 36 102, setitimer 38 103, restart_syscall 219 128, sched_yield 24 124,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169,
time 201 -, times 100 153, getrandom 318 278, uname 63 160, sysinfo 99 179, getcpu 309 168,
getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getrusage 98 165, getrlimit 97 163,
prlimit64 302 261, sched_getaffinity 204 123, exit 60 93, exit_group 231 94
"""

# Offset in the data, the bits to compare, and the values that they may have
_Word = tuple[int, int, tuple[int, ...]]


def _argument(index: int, *values: int, bits: int = _ANY) -> _Word:
    """Require one of these values for an argument that the kernel reads as 32 bits."""
    return _ARGUMENTS + _ARGUMENT_BYTES * index, bits, values


def _null(index: int) -> tuple[_Word, _Word]:
    """Require a null pointer."""
    offset = _ARGUMENTS + _ARGUMENT_BYTES * index
    return (offset, _ANY, (0,)), (offset + _HALF, _ANY, (0,))


def _conditions(machine: str) -> dict[str, tuple[_Word, ...]]:
    """Return the requirements on the arguments of calls that are safe only with some of them."""
    # O_DIRECTORY, O_NOFOLLOW and O_LARGEFILE of asm/fcntl.h; no O_WRONLY, O_CREAT, O_TRUNC,
    # O_APPEND, O_PATH ...
    by_machine = {"x86_64": 0x10000 | 0x20000 | 0x8000, "aarch64": 0x4000 | 0x8000 | 0x20000}
    o_nonblock = 0x800
    o_noctty = 0x100
    o_cloexec = 0x80000
    reading = by_machine[machine] | o_nonblock | o_noctty | o_cloexec
    return {
        "open": (_argument(1, 0, bits=_ANY ^ reading),),
        "openat": (_argument(2, 0, bits=_ANY ^ reading),),
        # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; no owner, signal, lock, lease or
        # flags
        "fcntl": (_argument(1, 0, 1, 2, 3, 1030),),
        # TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX
        "ioctl": (_argument(1, 0x5401, 0x5413, 0x541B, 0x5450, 0x5451),),
        # MADV_NORMAL to MADV_DONTNEED, MADV_FREE, MADV_HUGEPAGE; no MADV_REMOVE, which makes holes
        # in files
        "madvise": (_argument(2, 0, 1, 2, 3, 4, 8, 14),),
        # wait, wake, requeue and their kin, shared or private and by either clock; no lock that
        # lends priority
        "futex": (_argument(1, 0, 1, 3, 4, 5, 9, 10, bits=0x7F),),
        # for this process, without a new limit
        "prlimit64": (_argument(0, 0), *_null(2)),
        "sched_getaffinity": (_argument(0, 0),),
    }


@cache
def allowed_numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the allowed calls by name; empty for a machine that `filter_program`
    does not support.
    """
    if machine not in _COLUMN:
        return {}
    rows = (row.split() for row in _ALLOWED.replace("\n", " ").split(","))
    return {
        name: int(numbers[_COLUMN[machine]])
        for name, *numbers in rows
        if numbers[_COLUMN[machine]] != "-"
    }


@cache
def filter_program(machine: str) -> bytes | None:
    """Return the filter for seccomp(2) as instructions of classic BPF; None for an unsupported
    machine.

    Args:
        machine: the value of `platform.machine()`; x86_64 and aarch64 are supported, with 64 bits.
    """
    if machine not in _COLUMN or sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    conditions = _conditions(machine)
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_IF_EQUAL, _AUDIT_ARCH[machine], if_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    for name, number in allowed_numbers(machine).items():
        block = [*_checks(conditions.get(name, ())), _instruction(_RETURN, _ALLOW)]
        program += [_instruction(_JUMP_IF_EQUAL, number, if_false=len(block)), *block]
    return b"".join([*program, _instruction(_RETURN, _EPERM)])


def _checks(words: Iterable[_Word]) -> list[bytes]:
    """Return instructions that reject a call unless every word has one of its values."""
    checks = []
    for offset, bits, values in words:
        checks += [_instruction(_LOAD, offset), _instruction(_AND, bits)]
        checks += [
            _instruction(_JUMP_IF_EQUAL, value, if_true=len(values) - position)
            for position, value in enumerate(values)
        ]
        checks += [_instruction(_RETURN, _EPERM)]
    return checks


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """Pack a struct sock_filter; jumps give the number of instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
