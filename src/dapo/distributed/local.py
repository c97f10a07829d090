"""`launcher: local`: workers are child processes on this machine, called over a socket pair.

The RPC is a few lines here and in worker_main.py, so that a laptop needs no daemon and no further
package.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dapo.core.environment import public_environment
from dapo.core.errors import WorkerDied
from dapo.core.files import PRIVATE, make_private_folder, open_no_link
from dapo.distributed.channel import Channel
from dapo.distributed.launch import import_path, wait_until_ready
from dapo.distributed.protocol import Node, WorkerSpec
from dapo.distributed.weight_files import WeightsFile, WeightsFolder
from dapo.engines.engine import WeightSource
from dapo.processes.output import log_tail
from dapo.processes.spawn import exit_reason, start_module

CLOSE_TIMEOUT_S = 5.0


class LocalWorker:
    """A child process, which answers calls in order."""

    def __init__(self, name: str, spec: WorkerSpec, log: Path) -> None:
        self.name = name
        self.log = log
        # done when the object exists; raises the error of its factory
        self.ready: Future[None] = Future()
        self._lock = threading.Lock()
        self._pending: deque[Future[Any]] = deque([self.ready])
        self._is_dead = False
        variables = {**spec.environment, "PYTHONPATH": import_path(spec)}
        controller_end, worker_end = socket.socketpair()
        with worker_end, open_no_link(log, "ab", permissions=PRIVATE) as output:
            self._process = start_module(
                "dapo.distributed.worker_main",
                [worker_end.fileno()],
                environment=public_environment(spec.secrets) | variables,
                output=output,
                python=spec.python or sys.executable,
            )
        self._channel = Channel(controller_end.detach())
        threading.Thread(target=self._read, name=f"{name}-answers", daemon=True).start()
        self._send((spec.factory, dict(spec.options)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._is_dead:
                future.set_exception(WorkerDied(self._exit_reason()))
            else:
                self._pending.append(future)
                self._send((method, arguments, options))
        return future

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._channel.send_end()  # no call: the worker's reader ends, and the process with it
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _send(self, message: Any) -> None:
        # on failure the reader also sees the end of the connection, and fails the pending calls
        with contextlib.suppress(OSError, ValueError):
            self._channel.send(message)

    def _read(self) -> None:
        cause = ""
        try:
            while True:
                is_ok, value = self._channel.receive()
                future = self._pending.popleft()
                if is_ok:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        except (EOFError, OSError):
            pass
        # an answer that cannot be unpickled: later answers are lost as well
        except Exception as error:
            cause = f"{self.name} sent an unreadable answer ({type(error).__name__}: {error})"
            self._process.kill()
        with self._lock:
            self._is_dead = True
        if self._pending:
            cause = cause or self._exit_reason()
            for future in self._pending:
                future.set_exception(WorkerDied(cause))

    def _exit_reason(self) -> str:
        try:
            code = self._process.wait(CLOSE_TIMEOUT_S)
            ended = exit_reason(code, by_signal="was ended by")
        except subprocess.TimeoutExpired:
            ended = "closed its connection"
        return f"{self.name} {ended}{log_tail(self.log)}"


class LocalLauncher:
    """Starts processes on this machine, which print to `logs/NAME.log`."""

    nodes: Sequence[Node] = ()

    def __init__(self, logs: Path, *, timeout_s: float) -> None:
        self._logs = logs
        self._timeout_s = timeout_s
        self._workers: list[LocalWorker] = []
        self._weights = WeightsFolder()

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[LocalWorker]:
        make_private_folder(self._logs)
        since = time.monotonic()
        workers = [
            LocalWorker(name, spec, self._logs / f"{name}.log")
            for name, spec in zip(names, specs, strict=True)
        ]
        self._workers += workers
        try:
            for worker in workers:
                see = f"its output is in {worker.log}"
                wait_until_ready(
                    worker.ready, since=since, timeout_s=self._timeout_s, what=worker.name, see=see
                )
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        return workers

    def publish_weights(self, weights: WeightSource, version: int) -> WeightsFile:
        return self._weights.write(weights, version)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._weights.close()
