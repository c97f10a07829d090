"""The process between the pool and one worker: kills every process that the worker started and
limits its output.

User code can crash its process, leave processes behind and flood a console, so cleaning up needs a
process without user code. On Linux a supervisor adopts the orphans of its worker, so that no
process escapes through its own session or parent; elsewhere it kills the worker's process group.

It reports to the pool in lines of JSON, `[text, is_retryable]`: a signal that stopped the worker,
and the reason for its end.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from dapo.core.terminal import UNSAFE
from dapo.processes.proc_files import children_of, read_bytes
from dapo.processes.spawn import exit_reason

MAX_PROCESSES = 256  # of a worker; more are a leak or a fork bomb
SHOWN_BYTES = 8192  # of a worker's output, at once and then per minute
_POLL_INTERVAL_MS = 250
_STOP_TIMEOUT_S = 3.0
_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def supervise(
    worker: int,
    *,
    keepalive_pipe: int,
    output: int,
    report: int,
    memory_bytes: int,
    max_processes: int = MAX_PROCESSES,
) -> None:
    """Wait until the worker exits, exceeds a limit or the pool is gone; then kill everything below.

    Does not return.

    Args:
        worker: The process id of the child.
        keepalive_pipe: The pool closes its other end, by itself or by exiting.
        output: The pipe with the output of the worker.
        report: Gets the worker's events but no end that the pool requested.
        memory_bytes: The bound on the private memory of the worker with its descendants.
        max_processes: The bound on their number.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    console = Console(sys.stderr.fileno(), worker)
    bounds = _Bounds(memory_bytes, max_processes)
    for event in _monitor(worker, keepalive_pipe, output, console, bounds):
        with contextlib.suppress(OSError):  # the pool itself may be gone
            os.write(report, json.dumps(event).encode() + b"\n")
    _kill_all(worker)
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        console.show(os.read(output, 1 << 16))
    console.close()
    os._exit(0)


def exit_with_supervisor(supervisor_pid: int) -> None:
    """Have the kernel kill this worker process when its supervisor exits."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        os._exit(1)


class Event(NamedTuple):
    """An event of a worker, as reported to the pool."""

    text: str
    is_retryable: bool = False
    """Whether another process may be the cause: a signal does not name its sender."""


class Console:
    """Prints up to SHOWN_BYTES of a worker's output per minute, without waiting, counts the rest.

    Unsafe characters become `?`.
    """

    def __init__(self, descriptor: int, worker: int) -> None:
        self._descriptor = descriptor
        self._worker = worker
        self._left = float(SHOWN_BYTES)
        self._since = time.monotonic()
        self._hidden = 0

    def show(self, data: bytes) -> None:
        now = time.monotonic()
        self._left = min(SHOWN_BYTES, self._left + (now - self._since) * SHOWN_BYTES / 60)
        self._since = now
        num_written = min(len(data), int(self._left))
        if self._hidden and num_written == len(data):
            self.close()
        for start in range(0, num_written, select.PIPE_BUF):
            if not self._try_write(data[start : min(start + select.PIPE_BUF, num_written)]):
                num_written = start
                break
        self._hidden += len(data) - num_written

    def close(self) -> None:
        if self._hidden:
            self._try_write(
                b"\n[worker process %d: %d bytes of output not shown]\n"
                % (self._worker, self._hidden)
            )
            self._hidden = 0

    def _try_write(self, data: bytes) -> bool:
        with contextlib.suppress(OSError):
            if select.select([], [self._descriptor], [], 0)[1]:
                os.write(
                    self._descriptor,
                    UNSAFE.sub("?", data.decode(errors="surrogateescape")).encode(),
                )
                self._left -= len(data)
                return True
        return False


def _monitor(
    worker: int, keepalive_pipe: int, output: int, console: Console, bounds: "_Bounds"
) -> Iterator[Event]:
    """Wait until the worker or the pool ends or the worker exceeds a limit.

    Yields the first signal that stops the worker, and an end that the pool did not request.
    """
    wakeup, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    waiting = select.poll()
    for descriptor in (keepalive_pipe, output, wakeup):
        waiting.register(descriptor, select.POLLIN)
    last_check = time.monotonic()
    is_wanted = was_stopped = False
    while not is_wanted:
        for descriptor, event in waiting.poll(_POLL_INTERVAL_MS):
            is_wanted = is_wanted or descriptor == keepalive_pipe
            data = os.read(descriptor, 1 << 16) if event & select.POLLIN else b""
            if descriptor == output and data:
                console.show(data)
            elif not data:
                waiting.unregister(descriptor)
        for status in _changes_of(worker):
            if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                yield _end(status)
                return
            if not was_stopped:
                was_stopped = True
                yield Event("the worker process was stopped by a signal", is_retryable=True)
        if time.monotonic() - last_check > _POLL_INTERVAL_MS / 1000:
            if reason := _limit_exceeded(bounds):
                yield Event(reason)
                return
            last_check = time.monotonic()


def _changes_of(worker: int) -> Iterator[int]:
    with contextlib.suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
            if status[0] == worker:
                yield status[1]


def _end(status: int) -> Event:
    code = os.waitstatus_to_exitcode(status)
    reason = exit_reason(code, by_signal="was killed by")
    hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
    return Event(f"the worker process {reason}{hint}", is_retryable=code < 0)


class _Bounds(NamedTuple):
    """What a worker with its descendants may use."""

    memory_bytes: int
    max_processes: int


def _limit_exceeded(bounds: _Bounds) -> str | None:
    """Return the limit that the worker's processes or their memory exceed, or None."""
    processes = _descendants(os.getpid())
    if len(processes) > bounds.max_processes:
        return (
            f"the worker process had more than {bounds.max_processes} processes running, itself"
            " included"
        )
    if len(processes) > 1 and sum(map(_memory_of, processes)) > bounds.memory_bytes:
        limit = f"{bounds.memory_bytes / 2**30:g} GiB (reward.memory_gib)"
        return f"the worker process and its descendants used more than {limit}"
    return None


def _descendants(pid: int) -> list[int]:
    descendants = []
    new = [pid]
    while new:
        new = [child for parent in new for child in children_of(parent)]
        descendants += new
    return descendants


def _memory_of(pid: int) -> int:
    """Return the bytes of a process's private and shared memory, without files."""
    try:
        lines = read_bytes(f"/proc/{pid}/status").splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) * 1024
        for line in lines
        if line.startswith((b"RssAnon:", b"RssShmem:"))
    )


def _kill_all(worker: int) -> None:
    """Kill the worker's process group and all adopted orphans until none is left."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        for child in children_of(os.getpid()):  # their own children are adopted in turn
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
