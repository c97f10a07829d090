"""Worker processes as forks of processes that have imported their modules once.

They are processes of their own as ever: session, output, environment, descriptors, exit status.
What a fork skips is the start of Python, which test_local_launcher.py, test_verifier_pool.py,
environments/test_pool.py and the runs of whole commands keep.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

from helpers import zygote

USER_CODE = ("dapo.rewards.worker", "dapo.environments.worker")
"""Modules of workers that import no torch: their memory is limited."""
IMPORTED_ONCE = (*USER_CODE, "dapo.libs.strict_math", "dapo.config")
"""By the process that forks workers of this kind; the others are forks of `helpers.zygote`."""
PYTHONPATH = zygote.ENVIRONMENT["PYTHONPATH"].split(os.pathsep)
REQUEST_BYTES = 2**17
"""The longest request: an environment, mostly."""
MAX_FILES = 6
NUMBER = struct.Struct("q")
STARTED: list[int] = []
"""The process ids of all workers of a launcher `local` that were forked for this process."""


class ForkedProcess:
    """What a worker's owner needs of `subprocess.Popen`."""

    def __init__(self, news: int) -> None:
        self.pid = self._number(news)
        self._news = news
        self._lock = threading.Lock()
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        # several threads may wait for one process: the first one reads how it ended
        with self._lock:
            if self._exit_code is None:
                if not select.select([self._news], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked worker", timeout or 0)
                self._exit_code = os.waitstatus_to_exitcode(self._number(self._news))
                os.close(self._news)
            return self._exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ends
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @staticmethod
    def _number(news: int) -> int:
        (number,) = NUMBER.unpack(os.read(news, NUMBER.size))
        return int(number)


class ForkServer:
    """A process that forks workers; it ends with this one."""

    def __init__(self, kind: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if kind == "heavy":
            self._connection = zygote.fork_server("workers")
            return
        theirs, self._connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "helpers.forked_workers", str(theirs.fileno())],
                env=zygote.ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> ForkedProcess:
        reader, writer = os.pipe()
        with os.fdopen(writer, "wb", buffering=0):
            socket.send_fds(self._connection, [json.dumps(request).encode()], [*files, writer])
        return ForkedProcess(reader)

    def close(self) -> None:
        self._connection.close()
        if self._process is not None:
            self._process.wait()


class WorkerForks:
    """The processes that fork, each of which the first start of its kind starts."""

    def __init__(self) -> None:
        self._servers: dict[str, ForkServer] = {}
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], **options: Any) -> "ForkedProcess | subprocess.Popen":
        """Stand in for `subprocess.Popen` in `dapo.processes.spawn`."""
        if command[0] != sys.executable:  # another interpreter
            return subprocess.Popen(command, **options)
        assert command[1:3] == ["-P", "-m"]
        assert options["start_new_session"]
        assert options["stdout"] is options["stderr"]
        module, *arguments = command[3:]
        descriptors = options["pass_fds"]
        request = {
            "module": module,
            "numbers": arguments[len(descriptors) :],
            "environment": options["env"],
            "folder": str(Path.cwd()),
        }
        output = options["stdout"]
        number = output if isinstance(output, int) else output.fileno()
        kind = "light" if module in USER_CODE else "heavy"
        process = self._fork(kind, request, [*descriptors, number, number])
        if kind == "heavy":
            STARTED.append(process.pid)
        return process

    def command(
        self, *arguments: str, output: IO[Any], errors: IO[Any] | None = None
    ) -> ForkedProcess:
        """Start `dapo ARGUMENTS` in the current folder, as a process of its own session.

        `errors` is a file for the standard error alone.
        """
        request = {
            "module": "dapo.__main__",
            "numbers": arguments,
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
        }
        return self._fork("heavy", request, [output.fileno(), (errors or output).fileno()])

    def _fork(self, kind: str, request: Mapping[str, Any], files: Sequence[int]) -> ForkedProcess:
        with self._lock:  # the threads of a pool
            if kind not in self._servers:
                self._servers[kind] = ForkServer(kind)
            return self._servers[kind].fork(request, files)

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Have all workers forked."""
        names = SimpleNamespace(Popen=self.start, DEVNULL=subprocess.DEVNULL)
        with patch("dapo.processes.spawn.subprocess", names):
            yield

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def serve(connection: socket.socket) -> None:
    """Fork the workers that a connection asks for until its other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    while True:
        request, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, MAX_FILES)
        if not request:
            return
        assert threading.active_count() == 1
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            *descriptors, output, errors, news = files
            start_and_watch(json.loads(request), descriptors, [output, errors], news)
        for file in files:
            os.close(file)


def start_and_watch(
    request: Mapping[str, Any], descriptors: Sequence[int], outputs: Sequence[int], news: int
) -> None:
    """Fork the worker, write its id, and at its end its wait status; does not return."""
    worker = os.fork()
    if worker == 0:
        os.close(news)
        be_the_worker(request, descriptors, outputs)
    for file in (*descriptors, *outputs):
        os.close(file)
    os.write(news, NUMBER.pack(worker))
    _, status = os.waitpid(worker, 0)
    try:
        os.write(news, NUMBER.pack(status))
    except BrokenPipeError:  # the test process has ended
        pass
    finally:
        os._exit(0)


def be_the_worker(
    request: Mapping[str, Any], descriptors: Sequence[int], outputs: Sequence[int]
) -> None:
    """In the worker; does not return."""
    os.setsid()
    for number, file in zip((1, 2), outputs, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [entry for entry in sys.path if entry not in PYTHONPATH]
    sys.path[:] = [*filter(None, entries), *others]
    sys.argv = [request["module"], *map(str, descriptors), *request["numbers"]]
    code = 1
    try:
        sys.modules.pop(request["module"], None)  # it runs anew, under its name as a program
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:  # as Python itself ends
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.freeze()  # the collector of a child would write to every object, and so copy its page
    serve(socket.socket(fileno=int(sys.argv[1])))
