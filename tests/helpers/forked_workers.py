"""Worker processes of `launcher: local` as forks of one process, which has imported torch once.

They are processes of their own as ever: session, log, environment, socket, exit status. What a fork
skips is the start of Python, which test_local_launcher.py and the runs of whole commands keep.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dapo
from helpers.paths import ROOT, TESTS

IMPORTED_ONCE = (
    "dapo.distributed.worker_main",
    "dapo.distributed.engine_specs",
    "dapo.distributed.trainer_worker",
    "dapo.engines.native.engine",
    "transformers.models.llama.modeling_llama",
    "transformers.models.starcoder2.modeling_starcoder2",
)
PYTHONPATH = (str(Path(dapo.__file__).parents[1]), str(TESTS), str(ROOT))
REQUEST_BYTES = 2**17
"""The longest request: an environment, mostly."""
NUMBER = struct.Struct("q")
STARTED: list[int] = []
"""The process ids of all workers that were forked for this process."""


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

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    @staticmethod
    def _number(news: int) -> int:
        (number,) = NUMBER.unpack(os.read(news, NUMBER.size))
        return int(number)


class WorkerForks:
    """The process that forks, which the first start starts; it ends with this one."""

    _connection: socket.socket | None = None

    def _open(self) -> socket.socket:
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "helpers.forked_workers", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(PYTHONPATH)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        return ours

    def start(self, command: Sequence[str], **options: Any) -> "ForkedProcess | subprocess.Popen":
        """Stand in for `subprocess.Popen` in `dapo.distributed.local`."""
        if command[0] != sys.executable:  # another interpreter
            return subprocess.Popen(command, **options)
        assert command[1:4] == ["-P", "-m", "dapo.distributed.worker_main"]
        assert options["start_new_session"]
        assert options["stdout"] is options["stderr"]
        self._connection = self._connection or self._open()
        request = {"environment": options["env"], "folder": str(Path.cwd())}
        reader, writer = os.pipe()
        with os.fdopen(writer, "wb", buffering=0):
            socket.send_fds(
                self._connection,
                [json.dumps(request).encode()],
                [*options["pass_fds"], options["stdout"].fileno(), writer],
            )
        process = ForkedProcess(reader)
        STARTED.append(process.pid)
        return process

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Have the workers of every launcher `local` forked."""
        names = SimpleNamespace(
            Popen=self.start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        with patch("dapo.distributed.local.subprocess", names):
            yield

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._process.wait()


def serve(connection: socket.socket) -> None:
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.freeze()  # the collector of a child would write to every object, and so copy its page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    while True:
        request, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not request:
            return
        assert threading.active_count() == 1
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            start_and_watch(json.loads(request), *files)
        for file in files:
            os.close(file)


def start_and_watch(request: Mapping[str, Any], channel: int, output: int, news: int) -> None:
    """Fork the worker, write its id, and at its end its wait status; does not return."""
    worker = os.fork()
    if worker == 0:
        os.close(news)
        be_the_worker(request, channel, output)
    os.close(channel)
    os.close(output)
    os.write(news, NUMBER.pack(worker))
    _, status = os.waitpid(worker, 0)
    try:
        os.write(news, NUMBER.pack(status))
    except BrokenPipeError:  # the test process has ended
        pass
    finally:
        os._exit(0)


def be_the_worker(request: Mapping[str, Any], channel: int, output: int) -> None:
    """In the worker; does not return."""
    from dapo.distributed.worker_main import main

    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    entries = request["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*entries, *(entry for entry in sys.path if entry not in PYTHONPATH)]
    sys.argv = ["worker_main", str(channel)]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
