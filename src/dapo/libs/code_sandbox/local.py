"""The sandbox of this machine: one process per program, confined by the kernel (the package lists
how far).
"""

import contextlib
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
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Literal, get_args

from .sandbox import ProcessResult, SandboxError, readable
from .system_calls import filter_program

Role = Literal["program", "submission", "test_runner"]
Layer = Literal["system_calls", "landlock", "namespaces", "user", "limits"]

_CONFINED = Path(__file__).parent / "confined"
_SCRIPT = _CONFINED / "process.py"
_MODULES = ("rpc", "remote", "test_runner", "pytest_subset")
_STOP_TIMEOUT_S = 2.0
_CHUNK = 1 << 16
_MAX_RESULT_BYTES = 1000
# a folder of shared libraries without packages of Python
_DEBIAN = sysconfig.get_config_var("MULTIARCH")
_LIBRARIES = (
    *(
        [f"/usr/lib/{_DEBIAN}", f"/lib/{_DEBIAN}"]
        if os.path.isdir(f"/usr/lib/{_DEBIAN}")
        else ["/usr/lib", "/lib"]
    ),
    "/lib64",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)
# a fixed hash seed: a program that prints a set prints it in the same order every time
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class LocalSandbox:
    """Implements `Sandbox` with processes of this machine that have one thread, no children and no
    files to write.
    """

    memory_bytes: int
    """The limit on the address space of each process."""
    require_confinement: bool = False
    """Raise SandboxError unless system calls are filtered and the files that a program can read are
    restricted.
    """
    layers: Sequence[Layer] = get_args(Layer)
    """The layers that confine the processes; tests leave some out to see what the others hold
    alone.
    """
    landlock_abi: int = 1 << 16
    """The newest version of Landlock to use; tests lower it to see what an older kernel holds."""
    start_timeout_s: float = 30.0
    """The time for the start of a program's processes, which does not count against its deadline;
    beyond it SandboxError is raised.
    """

    def run(
        self, source: str, stdin: str, *, deadline: float, max_output_bytes: int = 1 << 16
    ) -> ProcessResult:
        start = time.monotonic()
        with tempfile.TemporaryFile() as file:
            file.write(stdin.encode(errors="surrogatepass"))
            file.seek(0)
            with self._sandbox_process(
                "program", [source], deadline - start, stdin=file.fileno()
            ) as (process, ready):
                self._await_confined(ready, start + self.start_timeout_s)
                start_s = time.monotonic() - start
                result = _read(process, deadline + start_s, max_output_bytes)
                return replace(result, start_s=start_s)

    def run_tests(self, source: str, tests: Mapping[str, Any], *, deadline: float) -> str:
        start = time.monotonic()
        runner_end, submission_end = socket.socketpair()
        with (
            runner_end,
            submission_end,
            self._sandbox_process(
                "submission", [source], deadline - start, channel=submission_end.fileno()
            ) as submission,
            self._sandbox_process(
                "test_runner", [dict(tests)], deadline - start, channel=runner_end.fileno()
            ) as runner,
        ):
            # each process sees the exit of the other only if this one holds no copies
            runner_end.close()
            submission_end.close()
            for _, ready in (submission, runner):
                self._await_confined(ready, start + self.start_timeout_s)
            deadline += time.monotonic() - start
            result = _read(runner[0], deadline, _MAX_RESULT_BYTES)
            return result.output.decode(errors="replace") or "failed"

    def _await_confined(self, ready: int, end: float) -> None:
        """Wait until a process is confined. Raises SandboxError if it is not at the time `end`."""
        if not readable(ready, max(0, end - time.monotonic())):
            raise SandboxError(
                "the process of the sandbox did not start within"
                f" {self.start_timeout_s:g} s; the machine may be overloaded"
            )
        message = os.read(ready, 16)
        if not message:
            raise SandboxError("the process of the sandbox ended before it could run the program")
        if self.require_confinement and message != b"confined":
            raise SandboxError("the process of the sandbox could not be confined")

    @contextlib.contextmanager
    def _sandbox_process(
        self,
        role: Role,
        sources: Sequence[Any],
        time_s: float,
        *,
        stdin: int = subprocess.DEVNULL,
        channel: int = -1,
    ) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
        """Start a process, killed on leaving the context, and a pipe that is readable once the
        process is confined.
        """
        _cache_bytecode()
        ready, writable = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(sources).encode())
            file.seek(0)
            init_message = {
                "role": role,
                "sources_fd": file.fileno(),
                "ready_fd": writable,
                "channel_fd": channel,
                "cpu_s": max(1, math.ceil(time_s)),
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
                        "-P",
                        "-s",
                        "-S",
                        "-B",
                        "-X",
                        "utf8",
                        str(_SCRIPT),
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
    """Read the output of a process, up to `max_bytes`, and its exit code if it ends in time."""
    assert process.stdout is not None
    output = b""
    while len(output) <= max_bytes and readable(
        process.stdout.fileno(), max(0, deadline - time.monotonic())
    ):
        part = os.read(process.stdout.fileno(), _CHUNK)
        if not part:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return ProcessResult(output, process.wait(max(deadline - time.monotonic(), 0.01)))
            break
        output += part
    return ProcessResult(output[:max_bytes], None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop the process and its child, which it kills whatever signals the child ignores."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@functools.cache
def _cache_bytecode() -> None:
    """Compile the modules that confined processes import, because these processes write no
    files.
    """
    for name in _MODULES:
        SourceFileLoader(name, str(_CONFINED / f"{name}.py")).get_code(name)


def _python_libraries() -> set[str]:
    return {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}


@functools.cache
def shared_libraries(prefix: str) -> Sequence[str]:
    """List the files in `lib` of a Python installation that its modules load, such as conda's zlib
    and OpenSSL.
    """
    files = [
        file
        for file in Path(prefix, "lib").glob("lib*.so*")
        if not file.name.startswith("libpython")
    ]
    if not files or sys.platform != "linux":
        return ()
    command = [sys.executable, "-I", "-S", "-B", "-c", _LOAD_ALL, *_python_libraries()]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
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
