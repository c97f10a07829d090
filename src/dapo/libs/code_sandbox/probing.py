"""Checks a sandbox by attacking it: `probe` tests the machine, `self_check` the whole
implementation.
"""

import contextlib
import ctypes
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .code_tests import read_tests
from .sandbox import Sandbox, SandboxError

_PROBES = Path(__file__).parent / "confined" / "probes.py"
_PROBE_S = 30.0
_LIMIT_S = 1.0
_GRACE_S = 3.0
_MAX_OUTPUT_BYTES = 1000


def probe(sandbox: Sandbox) -> Mapping[str, str]:
    """Run the probes of `confined/probes.py` in one program; they depend on the machine and take
    0.1 s.

    Example:
        >>> from dapo.libs.code_sandbox import LocalSandbox
        >>> probe(LocalSandbox(memory_bytes=2**30))
        {}
        >>> probe(LocalSandbox(memory_bytes=2**30, layers=["landlock", "limits"]))["fork"]
        'start processes or threads'

    Returns:
        The probes that succeed, each with the weakness that it shows; empty if the sandbox holds.

    Raises:
        SandboxError: the sandbox cannot run the probes, or ends them before their last one.
    """
    with _targets() as targets:
        stdin = json.dumps({**targets, "memory_bytes": sandbox.memory_bytes})
        result = sandbox.run(
            _PROBES.read_text("utf-8"), stdin, deadline=time.monotonic() + _PROBE_S
        )
    try:
        return {str(name): str(weakness) for name, weakness in json.loads(result.output).items()}
    except (ValueError, AttributeError):
        raise SandboxError("the program that probes the sandbox did not finish") from None


def self_check(sandbox: Sandbox) -> Mapping[str, str]:
    """Check everything that a sandbox must hold: `probe`, the limits of time and output, and the
    secrecy of tests.

    Takes about four seconds. Use an implementation of `Sandbox` only if this returns nothing.

    Returns:
        The probes that succeed, each with the weakness that it shows; empty if the sandbox holds.

    Raises:
        SandboxError: the sandbox cannot run the programs of the check.
    """
    successes = dict(probe(sandbox))
    for weakness, probes in {**_LIMITS, **_TESTS}.items():
        successes |= {name: weakness for name, succeeds in probes.items() if succeeds(sandbox)}
    return successes


def _outlasts(preparation: str) -> Callable[[Sandbox], bool]:
    """Return a probe of whether a program that does this first can compute after its deadline."""
    # ends by itself, since a sandbox without a limit would wait for it
    source = f"import time\nend = time.monotonic() + {_LIMIT_S + _GRACE_S}\n{preparation}"
    source += "\nwhile time.monotonic() < end:\n    pass\nprint('end')"

    def succeeds(sandbox: Sandbox) -> bool:
        deadline = time.monotonic() + _LIMIT_S
        return (
            sandbox.run(source, "", deadline=deadline).output != b""
            or time.monotonic() > deadline + _GRACE_S
        )

    return succeeds


def _prints_too_much(sandbox: Sandbox) -> bool:
    source = f"for _ in range(1000):\n    print('x' * {_MAX_OUTPUT_BYTES})"
    deadline = time.monotonic() + _PROBE_S
    result = sandbox.run(source, "", deadline=deadline, max_output_bytes=_MAX_OUTPUT_BYTES)
    return len(result.output) > _MAX_OUTPUT_BYTES


def _verdict_is(expected: bool, source: str) -> Callable[[Sandbox], bool]:
    """Return a probe of whether the tests of a function `answer` give this result on a program."""

    def succeeds(sandbox: Sandbox) -> bool:
        number = 10**17 + secrets.randbelow(10**17)  # stands in the tests only
        tests = read_tests(
            [f"assert answer({number}) == {number}", f"assert -answer({number}) == -{number}"]
        )
        return tests.passed_by(source, sandbox, deadline=time.monotonic() + _PROBE_S) is expected

    return succeeds


_EQUAL = (
    "    __eq__ = __ge__ = __bool__ = lambda *args: True\n    __hash__ = __neg__ = lambda self:"
    " self"
)
_PASSED = (
    "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'passed')\n    except"
    " OSError:\n        pass\n"
)

_LIMITS: Mapping[str, Mapping[str, Callable[[Sandbox], bool]]] = {
    "run longer than its deadline": {
        "compute without end": _outlasts(""),
        "ignore signals": _outlasts(
            "import signal\nfor n in (1, 2, 14, 15):\n    signal.signal(n, signal.SIG_IGN)"
        ),
    },
    "print more than the limit": {"print without end": _prints_too_much},
}
_TESTS: Mapping[str, Mapping[str, Callable[[Sandbox], bool]]] = {
    "fail tests that it solves": {"solve the tests": _verdict_is(False, "def answer(n): return n")},
    "pass tests without solving them": {
        "answer wrong": _verdict_is(True, "def answer(n): return n + 1"),
        "exit before the tests": _verdict_is(True, "import os\nos._exit(0)"),
        "exit within the tests": _verdict_is(True, "import os\ndef answer(n): os._exit(0)"),
        "equal everything": _verdict_is(True, f"class Any:\n{_EQUAL}\ndef answer(n): return Any()"),
        "report the result": _verdict_is(True, f"{_PASSED}def answer(n): return 0"),
        "raise for the tests": _verdict_is(True, "def answer(n): raise SystemExit(0)"),
    },
}


@contextlib.contextmanager
def _targets() -> Iterator[dict[str, Any]]:
    """Things for the probes to attack, as far as this system has them: they belong to this process
    and end with it.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "file").write_bytes(bytes(1000))
        (folder / "old").touch()
        (folder / "folder").mkdir()
        with contextlib.suppress(OSError, AttributeError):
            os.setxattr(folder / "file", "user.given", b"1")
        abstract = f"\0{folder}"
        stream = socket.SOCK_STREAM
        datagram = socket.SOCK_DGRAM
        for kind, address in (
            (stream, f"{folder}/stream"),
            (datagram, f"{folder}/datagram"),
            (datagram, abstract),
        ):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            with contextlib.suppress(OSError):  # a folder whose path is too long for a name
                unix.bind(address)
                unix.listen() if kind == stream else None
        memory = ctypes.create_string_buffer(8)
        variable = f"CODE_SANDBOX_PROBE_{secrets.token_hex(4)}"
        os.environ[variable] = "1"
        stack.callback(os.environ.pop, variable, None)
        yield {
            "folder": str(folder),
            "abstract": abstract,
            "process": os.getpid(),
            "address": ctypes.addressof(memory),
            "variable": variable,
        }
