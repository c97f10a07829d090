"""Runs the programs that a model wrote, in processes that give up their rights before they run anything.

Covered, by independent layers, each as far as the system has it:

- A filter of system calls (Linux on x86_64 and aarch64, every kernel since 3.19, no library) allows a list of calls
  with their arguments (`system_calls`): no sockets, processes, threads, signals, no limits or priorities of others, no
  watches; files are opened for reading only, and modes, owners, times, attributes and locks are not changed.
- Landlock (Linux 5.13 and newer): only Python's own libraries can be read, without the packages installed among them;
  nothing is written, no program started; from 6.2 on nothing truncated, from 6.7 on no TCP, from 6.12 on no signals to
  other processes.
- Namespaces (Linux as root, or where users may create them): no files but Python's libraries, not even their names; no
  network, no abstract sockets, and other processes are invisible.
- Another user: as root the process becomes user 65534, if that user can read Python's library, and keeps no capability.
- Limits (any Unix): CPU time, open files, processes and threads (not for root), no bytes to any file, no core dumps.
  Memory where the system enforces RLIMIT_AS.
- Tests run in another process than the program, and only plain values pass between the two (`rpc`).

A program is confined where the filter and, for what it may read, Landlock or namespaces are in force. The others stand
behind them. Only limits bound time and memory.

Not covered:

- Without namespaces, names, sizes and times of files: `stat` and `readlink` work on every path that the user may reach,
  since imports need them.
- Linux with neither Landlock nor namespaces, and macOS: files can be read. macOS and Linux on other processors have no
  filter, and macOS does not enforce RLIMIT_AS either.
- Faults of the kernel or the interpreter, and side channels (time, caches): there is no virtual machine.

`Sandbox.gaps` runs probes on this machine (`probes.py`) and names what those that succeed show.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import platform
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from dapo.rewards.sandbox.system_calls import filter_program
from dapo.rewards.workers.process import readable

Role = Literal["program", "submission", "test_runner"]
Layer = Literal["system_calls", "landlock", "namespaces", "user", "limits"]

_SANDBOX_SCRIPT = Path(__file__).with_name("process.py")
_PROBES = Path(__file__).with_name("probes.py")
_STOP_TIMEOUT_S = 2.0
_CHUNK = 1 << 16
_MAX_RESULT_BYTES = 1000
_DEBIAN = sysconfig.get_config_var("MULTIARCH")  # its folder of shared libraries, which no package of Python shares
_LIBRARIES = (
    *([f"/usr/lib/{_DEBIAN}", f"/lib/{_DEBIAN}"] if os.path.isdir(f"/usr/lib/{_DEBIAN}") else ["/usr/lib", "/lib"]),
    *("/lib64", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"),
)
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
    require_confinement: bool = False
    """Whether a process ends where system calls or the reading of files are not confined; `gaps` never requires it."""
    layers: Sequence[Layer] = get_args(Layer)
    """What confines the processes; tests leave some out to see what the others hold alone."""
    landlock_abi: int = 1 << 16
    """The newest version of Landlock that is used; tests lower it to see what an older kernel holds."""

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
                self._await_confined(ready, deadline)
                return _read(process, deadline, max_output_bytes)

    def run_tests(self, source: str, tests: Mapping[str, Any], *, deadline: float) -> str:
        """Run tests on a module.

        Args:
            source: Python source of the module.
            tests: what `test_runner.run` gets, as JSON values.
            deadline: when both processes are killed, on the clock of `time.monotonic()`.

        Returns:
            What `test_runner.run` returns; `failed` where it does not come to that.

        Raises:
            SandboxError: a process could not be confined.
        """
        ours, theirs = socket.socketpair()
        with (
            ours,
            theirs,
            self._sandbox_process("submission", [source], deadline, channel=theirs.fileno()) as submission,
            self._sandbox_process("test_runner", [dict(tests)], deadline, channel=ours.fileno()) as runner,
        ):
            # each process sees the exit of the other only if this one holds no copies
            ours.close()
            theirs.close()
            for _, ready in (submission, runner):
                self._await_confined(ready, deadline)
            return _read(runner[0], deadline, _MAX_RESULT_BYTES).output.decode(errors="replace") or "failed"

    def gaps(self) -> list[str]:
        """Descriptions of what a program could do on this machine; empty if it is confined. Raises SandboxError."""
        return list(dict.fromkeys(self.successful_probes().values()))

    def successful_probes(self) -> dict[str, str]:
        """The probes of `probes.py` that succeed in the sandbox, each with what it shows. Raises SandboxError."""
        with _targets() as given:
            stdin = json.dumps({**given, "memory_bytes": self.memory_bytes})
            sandbox = replace(self, require_confinement=False)
            done = sandbox.run(_PROBES.read_text("utf-8"), stdin, deadline=time.monotonic() + 30)
        try:
            return {str(name): str(description) for name, description in json.loads(done.output).items()}
        except (ValueError, AttributeError):
            raise SandboxError("the program that probes the sandbox did not finish") from None

    def _await_confined(self, ready: int, deadline: float) -> None:
        message = os.read(ready, 16) if readable(ready, max(0, deadline - time.monotonic())) else b""
        if not message:
            raise SandboxError("the sandbox's process did not start")
        if self.require_confinement and message != b"confined":
            raise SandboxError("the sandbox's process could not be confined")

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
                "layers": self.layers,
                "landlock_abi": self.landlock_abi,
                "filter_program": (filter_program(platform.machine()) or b"").hex(),
                "readable": [*_python_libraries(), *_LIBRARIES, *shared_libraries(sys.base_prefix)],
            }
            try:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        *["-P", "-s", "-S", "-B", "-X", "utf8"],
                        str(_SANDBOX_SCRIPT),
                        json.dumps(init_message),
                    ],
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


def _python_libraries() -> set[str]:
    return {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}


@functools.cache
def shared_libraries(prefix: str) -> Sequence[str]:
    """The files in `lib` of a Python installation that its modules load: conda brings zlib, SQLite and OpenSSL."""
    files = [file for file in Path(prefix, "lib").glob("lib*.so*") if not file.name.startswith("libpython")]
    if not files or sys.platform != "linux":
        return ()
    command = [sys.executable, "-I", "-S", "-B", "-c", _LOAD_ALL, *_python_libraries()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    loaded = set(done.stdout.splitlines())
    return [str(file) for file in files if str(file.resolve()) in loaded]


_LOAD_ALL = """
import os, sys
for folder in sys.argv[1:]:
    for name in os.listdir(folder + "/lib-dynload") if os.path.isdir(folder + "/lib-dynload") else []:
        try:
            __import__(name.partition(".")[0])
        except Exception:
            pass
for line in open("/proc/self/maps"):
    if ".so" in line:
        print(line.rstrip("\\n").split(None, 5)[5])
"""


@contextlib.contextmanager
def _targets() -> Iterator[dict[str, Any]]:
    """What the probes reach for, as far as this system has it."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "file").write_bytes(bytes(1000))
        (folder / "old").touch()
        (folder / "folder").mkdir()
        with contextlib.suppress(OSError, AttributeError):
            os.setxattr(folder / "file", "user.given", b"1")
        abstract = f"\0{folder}"
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        for kind, address in ((stream, f"{folder}/stream"), (datagram, f"{folder}/datagram"), (datagram, abstract)):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            with contextlib.suppress(OSError):  # a folder whose path is too long for a name
                unix.bind(address)
                unix.listen() if kind == stream else None
        memory = ctypes.create_string_buffer(8)
        yield {
            "folder": str(folder),
            "abstract": abstract,
            "process": os.getpid(),
            "address": ctypes.addressof(memory),
        }
