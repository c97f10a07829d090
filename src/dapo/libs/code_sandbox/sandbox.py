"""The interface of a sandbox: it runs a program, or tests on a program, and reports what came
out.
"""

import math
import select
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class SandboxError(Exception):
    """The sandbox cannot run a program safely; none of the program's code has run."""


@dataclass(frozen=True)
class ProcessResult:
    """Output and exit code of a program."""

    output: bytes
    exit_code: int | None
    """None if the program was killed because it exceeded its time or the length of its output."""
    start_s: float = field(default=0.0, repr=False, compare=False)
    """Seconds until the program could run, by which its deadline was put off."""


class Sandbox(Protocol):
    """Runs untrusted Python programs: no network, no files to write, one process, bounded time,
    memory and output.

    Every implementation must pass `self_check`.

    Example:
        >>> import time
        >>> from dapo.libs.code_sandbox import LocalSandbox
        >>> sandbox: Sandbox = LocalSandbox(memory_bytes=2**30)
        >>> sandbox.run("print(int(input()) + 1, end='')", "41", deadline=time.monotonic() + 10)
        ProcessResult(output=b'42', exit_code=0)
    """

    @property
    def memory_bytes(self) -> int:
        """The memory limit of a program."""

    def run(
        self, source: str, stdin: str, *, deadline: float, max_output_bytes: int = 1 << 16
    ) -> ProcessResult:
        """Run a program.

        Args:
            source: Python source of a script.
            stdin: its standard input.
            deadline: the time at which it is killed, on the clock of `time.monotonic()`, if the
                program could run at once; the start of its process puts it off.
            max_output_bytes: the program is killed when it prints more.

        Returns:
            Its standard output and exit code.

        Raises:
            SandboxError: the program could not be confined or its process did not start, and it
                has not run.
        """

    def run_tests(self, source: str, tests: Mapping[str, Any], *, deadline: float) -> str:
        """Run tests on a module, in a different process than the module.

        The program must not be able to read the tests, nor to report their result.

        Args:
            source: Python source of the module.
            tests: the message that `confined.test_runner.run` takes, as JSON values.
            deadline: the time at which both processes are killed, on the clock of
                `time.monotonic()`; their start puts it off, as in `run`.

        Returns:
            The result of `confined.test_runner.run`; `failed` if there is none.

        Raises:
            SandboxError: a process could not be confined or did not start.
        """


def readable(descriptor: int, timeout_s: float) -> bool:
    """Return True if the descriptor has data, or the end of its stream, within this time."""
    waiting = select.poll()  # select() refuses descriptors above 1023
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(math.ceil(timeout_s * 1000)))
