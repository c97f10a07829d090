"""The pool's handle on one worker process that runs user code."""

import contextlib
import io
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dapo.core.errors import DapoError
from dapo.processes.frames import receive
from dapo.processes.spawn import start_module
from dapo.processes.supervisor import Event

_EXIT_S = 1.0
_SUPERVISOR_EXIT_S = 30.0
"""Time for a supervisor to report its worker's end and exit, on a machine busy with others: without
its report, a worker that a signal has killed is not replaced and its task fails.
"""
_SEND_S = 10.0
_MAX_REPORT_BYTES = 1000
_STDERR = 2
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class WorkerProgram:
    """What the processes of a pool run."""

    module: str  # calls `worker.run`
    init_message: bytes
    environment: Mapping[str, str]  # all variables of a process
    kind: str  # names a process in messages
    error: type[DapoError]  # raised if the first process cannot be used


class WorkerLost(Exception):
    """The worker gave no valid answer and was killed; the message gives the reason."""

    def __init__(self, reason: str, *, is_retryable: bool = False) -> None:
        super().__init__(reason)
        self.is_retryable = is_retryable
        """Whether another process may have killed or stopped the worker, so that a retry may
        succeed.
        """


class WorkerProcess:
    """A supervisor and its child, the worker, in a session of their own, without a fork.

    Messages go over a socket pair; its output goes, limited in length, to the descriptor
    `output`. One thread calls; any thread may `interrupt`.
    """

    def __init__(self, program: WorkerProgram, memory_bytes: int, output: int = _STDERR) -> None:
        """Start the program; `begin` sends the first message."""
        self._connection, worker_end = socket.socketpair()
        their_keepalive_pipe, keepalive_pipe = os.pipe()
        report, their_report = os.pipe()
        self._keepalive_pipe = io.FileIO(keepalive_pipe, "wb")
        self._report = io.FileIO(report)
        descriptors = (worker_end.fileno(), their_keepalive_pipe, their_report)
        try:
            self._process = start_module(
                program.module,
                descriptors,
                memory_bytes,
                # a fixed hash seed: the order of sets is the same in every worker and run
                environment={
                    "PYTHONHASHSEED": "0",
                    **program.environment,
                    **dict.fromkeys(_ONE_THREAD, "1"),
                },
                output=output,
            )
        except OSError:
            self._connection.close()
            self._keepalive_pipe.close()
            self._report.close()
            raise
        finally:
            worker_end.close()
            os.close(their_keepalive_pipe)
            os.close(their_report)
        self._init_message = program.init_message
        self._answers = 0
        self._events: list[Event] = []
        self.pid = self._process.pid
        """The worker's process id once it is ready, its supervisor's until then."""
        self.busy = True
        self.ready: Mapping[str, Any] = {}
        """Its answer to the first message, once it is ready."""

    @property
    def is_lost(self) -> bool:
        return self._read_events() or bool(self._events)

    def begin(self) -> None:
        """Send the first message; `wait_ready` raises if the worker cannot use it."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(_SEND_S)
            self._connection.sendall(self._init_message)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for the answer to the first message.

        Raises WorkerLost if it is an error, or if the process ends.
        """
        reply = self._exchange(b"", timeout_s, "the worker process was not ready after")
        if "pid" not in reply:
            raise WorkerLost(reply.get("error", "the worker process sent an invalid first message"))
        self.ready = reply
        self.pid = reply["pid"]

    def call(
        self,
        request: bytes,
        timeout_s: float,
        *,
        slow_s: float | None,
        when_slow: Callable[[], object],
    ) -> Mapping[str, Any]:
        """Send a framed message and wait for the answer; after `slow_s`, call `when_slow`.

        Raises WorkerLost if there is no valid answer; the process was killed.
        """
        self._answers += 1
        answer = self._exchange(
            request, timeout_s, "timed out after", slow_s=slow_s, when_slow=when_slow
        )
        self._read_events()
        # the time limits of the user's code continued meanwhile
        if any(event.is_retryable for event in self._events):
            self._stop_and_raise("the worker process was stopped by a signal")
        if answer.get("number") != self._answers:
            self._stop_and_raise(
                "the worker process sent an invalid answer (the answer to a different request)"
            )
        if answer.get("damage"):
            self._stop_and_raise(f"it {answer['damage']}, so its process was replaced")
        return answer

    def _exchange(
        self,
        request: bytes,
        timeout_s: float,
        late: str,
        *,
        slow_s: float | None = None,
        when_slow: Callable[[], object] = lambda: None,
    ) -> Mapping[str, Any]:
        self.busy = True
        deadline = time.monotonic() + timeout_s
        reason = None
        try:
            self._connection.settimeout(timeout_s)
            # even an empty write fails where the worker has ended, and its answer would stay unread
            if request:
                self._connection.sendall(request)
            if slow_s is not None and not readable(self._connection.fileno(), slow_s):
                when_slow()
            answer = receive(self._connection, deadline)
            if answer is not None:
                return answer
        except TimeoutError:
            reason = f"{late} {timeout_s:g} s"
        except ValueError as error:
            reason = f"the worker process sent an invalid answer ({error})"
        except OSError:
            pass  # it closed its end during the write; its exit status has the reason
        finally:
            self.busy = False
        if reason is None:
            readable(self._report.fileno(), _EXIT_S)
        return self._stop_and_raise(reason)

    def _stop_and_raise(self, reason: str | None) -> NoReturn:
        """Kill the worker. The default reason is its supervisor's report."""
        self.stop(graceful=False)
        if reason is None:
            if self._events:
                reason = self._events[-1].text
            else:
                reason = "the worker process closed its connection"
        raise WorkerLost(reason, is_retryable=any(event.is_retryable for event in self._events))

    def _read_events(self) -> bool:
        """Read the pending reports; returns whether the pipe has ended."""
        if _is_newly_stopped(self._process.pid):
            self._events.append(
                Event("the supervisor of the worker process was stopped by a signal", True)
            )
        while readable(self._report.fileno(), 0):
            lines = os.read(self._report.fileno(), _MAX_REPORT_BYTES).splitlines()
            self._events += [Event(*json.loads(line)) for line in lines]
            if not lines:
                return True
        return False

    def interrupt(self) -> None:
        """Kill the worker and every process that it started; a pending `call` raises WorkerLost."""
        self._keepalive_pipe.close()

    def stop(self, *, graceful: bool = True) -> None:
        """End the worker and free everything; `graceful`: exit handlers get a moment to run."""
        if self._report.closed:
            return
        self._connection.close()
        if graceful:
            readable(self._report.fileno(), _EXIT_S)
        self._read_events()
        self.interrupt()
        # a stopped supervisor must continue to kill the worker
        self._process.send_signal(signal.SIGCONT)
        try:
            if self._process.wait(_SUPERVISOR_EXIT_S):
                self._events.append(Event("the supervisor of the worker process was ended", True))
        # it hangs in a write; the kernel kills the worker with it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read_events()
        self._report.close()


def _is_newly_stopped(pid: int) -> bool:
    """Return True if a signal has stopped or continued this child since the last call."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    with contextlib.suppress(ChildProcessError):  # it has ended
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) is not None
    return False


def readable(descriptor: int, timeout_s: float) -> bool:
    """Return True if data, or the end of the stream, can be read within this time."""
    waiting = select.poll()  # select() refuses descriptors above 1023
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(math.ceil(timeout_s * 1000)))
