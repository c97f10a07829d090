"""Starts jails, bounds their time and output, and finds out what this machine's jails keep in."""

import contextlib
import json
import math
import os
import select
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

Role = Literal["program", "submission", "test_runner"]

_SANDBOX_SCRIPT = Path(__file__).with_name("jail.py")
_STOP_TIMEOUT_S = 2.0
_CHUNK = 1 << 16
_MAX_RESULT_BYTES = 1000
_LIBRARIES = ("/usr/lib", "/lib", "/lib64", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
# a fixed hash seed, so that a program that prints a set prints it alike every time
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ProcessResult:
    """How a jailed process ended."""

    output: bytes
    exit_code: int | None
    """None: it was ended, for its time was over or its output too long."""


class SandboxError(Exception):
    """The process could not be confined; nothing of the model's has run."""


@dataclass(frozen=True)
class _SandboxProcess:
    process: "subprocess.Popen[bytes]"
    ready: int
    """Where it says that it is confined."""

    def await_confined(self, deadline: float) -> None:
        """Raises JailBroken if it never is."""
        if not _wait(self.ready, deadline) or not os.read(self.ready, 16):
            raise SandboxError("the sandbox's process did not start")


@dataclass(frozen=True)
class Sandbox:
    """Limits under which programs run; a process has no more than one thread, no children, and no files to write."""

    memory_bytes: int
    """Address space of each process."""

    def run(self, source: str, stdin: str, *, deadline: float, max_output_bytes: int = 1 << 16) -> ProcessResult:
        """A program, from standard input to standard output. `deadline` is a reading of `time.monotonic()`.

        Raises JailBroken.
        """
        with tempfile.TemporaryFile() as file:
            file.write(stdin.encode(errors="surrogatepass"))
            file.seek(0)
            with self._sandbox_process("program", [source], deadline, stdin=file.fileno()) as sandboxed:
                sandboxed.await_confined(deadline)
                return _read(sandboxed.process, deadline, max_output_bytes)

    def run_tests(self, source: str, tests: Sequence[str], entry_point: str | None, *, deadline: float) -> str:
        """Run tests on a module: `passed`, `failed`, or `broken: why`, for tests that cannot run. Raises JailBroken."""
        ours, theirs = socket.socketpair()
        with (
            ours,
            theirs,
            self._sandbox_process("submission", [source], deadline, channel=theirs.fileno()) as submission,
            self._sandbox_process(
                "test_runner", [list(tests), entry_point], deadline, channel=ours.fileno()
            ) as test_runner,
        ):
            # so that each sees the end of the other
            ours.close()
            theirs.close()
            submission.await_confined(deadline)
            test_runner.await_confined(deadline)
            return _read(test_runner.process, deadline, _MAX_RESULT_BYTES).output.decode(errors="replace") or "failed"

    def gaps(self) -> list[str]:
        """Deeds that a program could do on this machine, in words; empty if it is confined. Raises JailBroken."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = f"FOLDER, MEMORY = {folder!r}, {self.memory_bytes}\n"
            done = self.run(arguments + _PROBES, "", deadline=time.monotonic() + 30)
        try:
            return [str(probe) for probe in json.loads(done.output)]
        except ValueError:
            raise SandboxError("a program that looks for holes did not come to its end") from None

    @contextlib.contextmanager
    def _sandbox_process(
        self,
        role: Role,
        sources: Sequence[Any],
        deadline: float,
        *,
        stdin: int | None = None,
        channel: int | None = None,
    ) -> Iterator["_SandboxProcess"]:
        """A process that confines itself before it runs anything, and is ended on leaving."""
        readable, writable = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(sources).encode())
            file.seek(0)
            init_message = {
                "role": role,
                "sources_fd": file.fileno(),
                "ready_fd": writable,
                "channel_fd": -1 if channel is None else channel,
                "cpu_s": max(1, math.ceil(deadline - time.monotonic())),
                "memory_bytes": self.memory_bytes,
                "readable": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_LIBRARIES],
            }
            try:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-s",
                        "-S",
                        "-P",
                        "-B",
                        "-X",
                        "utf8",
                        str(_SANDBOX_SCRIPT),
                        json.dumps(init_message),
                    ],
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=subprocess.DEVNULL if role == "submission" else subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[file.fileno(), writable, *([] if channel is None else [channel])],
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError:
                os.close(readable)
                raise
            finally:
                os.close(writable)
            try:
                yield _SandboxProcess(process, readable)
            finally:
                os.close(readable)
                _end(process)


def _read(process: "subprocess.Popen[bytes]", deadline: float, max_bytes: int) -> ProcessResult:
    """All output, and the exit code, unless it is too much or too late."""
    assert process.stdout is not None
    output = b""
    while len(output) <= max_bytes and _wait(process.stdout.fileno(), deadline):
        part = os.read(process.stdout.fileno(), _CHUNK)
        if not part:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return ProcessResult(output, process.wait(max(deadline - time.monotonic(), 0.01)))
            break
        output += part
    return ProcessResult(output[:max_bytes], None)


def _wait(descriptor: int, deadline: float) -> bool:
    """Is there something to read, or the end, before the deadline?"""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(max(0, math.ceil(1000 * (deadline - time.monotonic())))))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The jail's first process kills the second, whatever that one does about signals."""
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
holes = []
def succeeds(words, deed):
    try:
        deed()
    except (OSError, MemoryError):
        return
    holes.append(words)
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
print(json.dumps(holes))
"""
