"""Runs the programs that a model wrote, in processes that give up their rights before they run anything.

Covered, on Linux as far as the system has each part:

- Landlock (5.13 and newer): only Python's own libraries can be read, nothing written, no program started; from 6.7 on
  no TCP, from 6.12 on no signals to other processes.
- Namespaces (as root, or where users may create them): no network, other processes are invisible.
- libseccomp (a package of Debian, Ubuntu and Fedora): no sockets, processes, threads, signals, namespaces.
- Any Unix: limits of CPU time, open files, processes and threads (not for root), and no bytes to any file. Memory where
  the system enforces RLIMIT_AS. As root the process becomes user 65534 if that user can read Python's library.
- Tests run in another process than the program, and only plain values pass between the two (`rpc`).

Not covered:

- macOS and Linux without Landlock: files can be read; macOS does not enforce RLIMIT_AS either.
- Linux without both libseccomp and namespaces: the network and other processes can be reached.
- Faults of the kernel or the interpreter, and side channels (time, caches): there is no virtual machine.

`Sandbox.gaps` runs probes on this machine and names those that succeed.
"""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dapo.rewards.workers.process import readable

Role = Literal["program", "submission", "test_runner"]

_SANDBOX_SCRIPT = Path(__file__).with_name("process.py")
_STOP_TIMEOUT_S = 2.0
_CHUNK = 1 << 16
_MAX_RESULT_BYTES = 1000
_LIBRARIES = ("/usr/lib", "/lib", "/lib64", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
# a fixed hash seed: a program that prints a set prints it in the same order every time
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ProcessResult:
    """Output and exit code of a sandboxed process."""

    output: bytes
    exit_code: int | None  # none: it was killed because its time was over or its output too long


class SandboxError(Exception):
    """The process could not be confined; none of the model's code has run."""


@dataclass(frozen=True)
class Sandbox:
    """Limits under which programs run: one thread, no children, no files to write."""

    memory_bytes: int  # bound on the address space of each process

    def run(self, source: str, stdin: str, *, deadline: float, max_output_bytes: int = 1 << 16) -> ProcessResult:
        """Run a program.

        Args:
            source: Python source of a script.
            stdin: its standard input.
            deadline: when it is killed, on the clock of `time.monotonic()`.
            max_output_bytes: it is killed when it prints more.

        Returns:
            Its standard output and exit code.

        Raises:
            SandboxError: the process could not be confined.
        """
        with tempfile.TemporaryFile() as file:
            file.write(stdin.encode(errors="surrogatepass"))
            file.seek(0)
            with self._sandbox_process("program", [source], deadline, stdin=file.fileno()) as (process, ready):
                _await_confined(ready, deadline)
                return _read(process, deadline, max_output_bytes)

    def run_tests(self, source: str, tests: Sequence[str], entry_point: str | None, *, deadline: float) -> str:
        """Run tests on a module.

        Args:
            source: Python source of the module.
            tests: statements, run in order until one fails.
            entry_point: the only name of the module that they may use; None: any public one.
            deadline: when both processes are killed, on the clock of `time.monotonic()`.

        Returns:
            `passed`, `failed`, or `broken: why` for tests that cannot run.

        Raises:
            SandboxError: a process could not be confined.
        """
        ours, theirs = socket.socketpair()
        with (
            ours,
            theirs,
            self._sandbox_process("submission", [source], deadline, channel=theirs.fileno()) as submission,
            self._sandbox_process("test_runner", [list(tests), entry_point], deadline, channel=ours.fileno()) as runner,
        ):
            # each process sees the exit of the other only if this one holds no copies
            ours.close()
            theirs.close()
            for _, ready in (submission, runner):
                _await_confined(ready, deadline)
            return _read(runner[0], deadline, _MAX_RESULT_BYTES).output.decode(errors="replace") or "failed"

    def gaps(self) -> list[str]:
        """Descriptions of what a program could do on this machine; empty if it is confined. Raises SandboxError."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = f"FOLDER, MEMORY = {folder!r}, {self.memory_bytes}\n"
            done = self.run(arguments + _PROBES, "", deadline=time.monotonic() + 30)
        try:
            return [str(probe) for probe in json.loads(done.output)]
        except ValueError:
            raise SandboxError("the program that probes the sandbox did not finish") from None

    @contextlib.contextmanager
    def _sandbox_process(
        self, role: Role, sources: Sequence[Any], deadline: float, *, stdin: int = subprocess.DEVNULL, channel: int = -1
    ) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
        """A process, killed on leaving the context, and a pipe that is readable once the process is confined."""
        ready, writable = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(sources).encode())
            file.seek(0)
            init_message = {
                "role": role,
                "sources_fd": file.fileno(),
                "ready_fd": writable,
                "channel_fd": channel,
                "cpu_s": max(1, math.ceil(deadline - time.monotonic())),
                "memory_bytes": self.memory_bytes,
                "readable": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_LIBRARIES],
            }
            try:
                process = subprocess.Popen(
                    [sys.executable, *["-s", "-S", "-B", "-X", "utf8"], str(_SANDBOX_SCRIPT), json.dumps(init_message)],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL if role == "submission" else subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[file.fileno(), writable, *([channel] if channel >= 0 else [])],
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError:
                os.close(ready)
                raise
            finally:
                os.close(writable)
            try:
                yield process, ready
            finally:
                os.close(ready)
                _end(process)


def _await_confined(ready: int, deadline: float) -> None:
    if not readable(ready, max(0, deadline - time.monotonic())) or not os.read(ready, 16):
        raise SandboxError("the sandbox's process did not start")


def _read(process: "subprocess.Popen[bytes]", deadline: float, max_bytes: int) -> ProcessResult:
    """The process's output up to `max_bytes` and, if it ended in time, its exit code."""
    assert process.stdout is not None
    output = b""
    while len(output) <= max_bytes and readable(process.stdout.fileno(), max(0, deadline - time.monotonic())):
        part = os.read(process.stdout.fileno(), _CHUNK)
        if not part:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return ProcessResult(output, process.wait(max(deadline - time.monotonic(), 0.01)))
            break
        output += part
    return ProcessResult(output[:max_bytes], None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop both processes: the first kills the one it has forked, whatever that one does about signals."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


_PROBES = """
import json, os, socket, tempfile
gaps = []
def succeeds(description, probe):
    try:
        probe()
    except (OSError, MemoryError):
        return
    gaps.append(description)
def fork():
    if os.fork() == 0:
        os._exit(0)
def signal_parent():
    if os.getppid() == 0:
        raise ProcessLookupError
    os.kill(os.getppid(), 0)
def write():
    open(os.path.join(FOLDER, "written"), "w").close()
succeeds("use the network", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 9)))
succeeds("start processes", fork)
succeeds("send signals to other processes", signal_parent)
succeeds("read files", lambda: os.listdir(os.path.dirname(FOLDER)))
succeeds("see other processes", lambda: os.listdir("/proc"))
succeeds("write files", write)
succeeds("use more memory than the limit", lambda: bytearray(2 * MEMORY))
print(json.dumps(gaps))
"""
