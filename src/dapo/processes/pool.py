"""Runs tasks in worker processes: a hung or dead process costs only its own task."""

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeAlias

from dapo.core.terminal import print_text
from dapo.processes.output import WorkerOutput
from dapo.processes.process import WorkerLost, WorkerProcess, WorkerProgram

STARTUP_S = 60.0  # time limit for a worker to import the user's code
MAX_RETRIES = 2
"""Retries of a task on another worker after a signal killed or stopped its own.

The signal may have come from another process. Verifiers are stateless, and episodes are rebuilt
from their calls, so the next worker gives the same answer. Code that kills its own process does so
at each retry, which ends in an error.
"""
Call: TypeAlias = Callable[[bytes, int], Mapping[str, Any]]
"""Sends a message to the worker, which may take so many time limits; raises WorkerLost."""


class Task(Protocol):
    """What one worker does at once."""

    def run(self, worker: WorkerProcess, call: Call) -> bool:
        """Answer the task by calls; returns whether the worker needs a restart."""

    def fail(self, reason: str) -> None:
        """Answer the task with an error."""

    def abandon(self) -> None:
        """Answer the task of a closed pool."""


@dataclass(frozen=True)
class Limits:
    """What a process may use."""

    timeout_s: float  # of a call
    memory_gib: float  # private memory of each process, and of a worker with its descendants
    startup_s: float


class WorkerPool:
    """Worker processes with the same first message, and one thread for each.

    A call may take `timeout_s` after the worker receives it. On a timeout the worker and every
    process that it started are killed and replaced. A worker that dies, or whose process state a
    task changes, is replaced too. If a signal kills or stops a worker, its task moves to another
    one, up to MAX_RETRIES times.
    """

    def __init__(
        self,
        program: WorkerProgram,
        limits: Limits,
        *,
        workers: int,
        output: WorkerOutput | None,
        has_standby: bool = False,
        has_own_queues: bool = False,
    ) -> None:
        """Start the workers and wait for the first one.

        Args:
            program: What each process runs.
            limits: What each process may use.
            workers: The number of processes.
            output: Gets the output of the processes, and closes with the pool; None: the standard
                error.
            has_standby: Whether another worker starts when a call is about to time out.
            has_own_queues: Whether a task names the worker that runs it.
        """
        self.output = output
        self._start = partial(
            WorkerProcess,
            program,
            round(limits.memory_gib * 2**30),
            *([] if output is None else [output.fileno()]),
        )
        self._program = program
        self._limits = limits
        self._has_standby = has_standby
        self._standby_s = 0.0  # seconds before the end of a time limit
        self._log: Callable[[str], None] = lambda text: print_text(text, file=sys.stderr)
        self._lock = threading.Lock()
        self._live: set[WorkerProcess] = set()
        self._closed = False
        self._losses = 0
        self._calls = 0
        self._call_s = 0.0
        self._queues: Sequence[queue.SimpleQueue[Task | None]] = [
            queue.SimpleQueue() for _ in range(workers if has_own_queues else 1)
        ]
        started: Future[WorkerProcess] = Future()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(i, started), daemon=True, name=f"dapo-{program.kind}-{i}"
            )
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._ready: Mapping[str, Any] = started.result().ready
            """The first worker's answer to the first message."""
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the live workers."""
        with self._lock:
            return sorted(worker.pid for worker in self._live)

    def log_to(self, log: Callable[[str], None]) -> None:
        """Log lost workers by `log` instead of to the standard error."""
        self._log = log

    def close(self) -> None:
        """Kill the workers and their descendants; pending tasks are abandoned."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            busy = [worker for worker in self._live if worker.busy]
        for worker in busy:
            worker.interrupt()
        for i in range(len(self._threads)):
            self._queue(i).put(None)
        for thread in self._threads:
            thread.join()
        if self.output is not None:
            self.output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _put(self, tasks: Sequence[Task], *, worker: int = 0) -> bool:
        """Queue tasks; returns False if the pool is closed."""
        with self._lock:
            for task in tasks if not self._closed else ():
                self._queue(worker).put(task)
            return not self._closed

    def _pop_calls(self) -> tuple[int, float]:
        """Return the number of calls since the last time, and the seconds that they took."""
        with self._lock:
            calls = self._calls
            seconds = self._call_s
            self._calls = 0
            self._call_s = 0.0
        return calls, seconds

    def _queue(self, worker: int) -> "queue.SimpleQueue[Task | None]":
        return self._queues[worker % len(self._queues)]

    def _serve(self, index: int, started: "Future[WorkerProcess]") -> None:
        """Run the thread of one worker: give it tasks, replace it."""
        began = time.monotonic()
        standby: list[WorkerProcess] = []  # none or one: started, not yet waited for
        worker, reason = self._spawn(standby)
        with self._lock:
            if not started.done():
                if self._has_standby:
                    # early enough for a standby to be ready at the timeout
                    start_s = time.monotonic() - began
                    self._standby_s = min(0.75 * self._limits.timeout_s, 2 * start_s)
                if worker is None:
                    started.set_exception(self._program.error(reason))
                else:
                    started.set_result(worker)
        while (task := self._queue(index).get()) is not None:
            worker = self._run(task, worker, standby)
        for last in filter(None, [worker, *standby]):
            self._stop(last, graceful=last is worker)

    def _run(
        self, task: Task, worker: WorkerProcess | None, standby: list[WorkerProcess]
    ) -> WorkerProcess | None:
        """Have a task answered; returns the worker for the next one, or None."""
        for retries_left in range(MAX_RETRIES, -1, -1):
            if worker is not None and worker.is_lost:  # while it was idle
                self._stop(worker)
                worker = None
            reason = ""
            if worker is None:
                worker, reason = self._spawn(standby)
            if worker is None:
                self._fail(task, f"no worker process: {reason}")
                return None
            with self._lock:
                worker.busy = not self._closed
            if not worker.busy:
                task.abandon()
                return worker
            try:
                needs_restart = task.run(worker, partial(self._call, worker, standby))
            except WorkerLost as error:
                self._stop(worker)
                worker = None
                if not (error.is_retryable and retries_left):
                    self._fail(task, str(error))
                    break
                self._log_loss(error)
            else:
                if not needs_restart:
                    return worker
                self._stop(worker)
                break
        return self._spawn(standby)[0]

    def _call(
        self, worker: WorkerProcess, standby: list[WorkerProcess], message: bytes, times: int
    ) -> Mapping[str, Any]:
        began = time.monotonic()
        timeout_s = times * self._limits.timeout_s
        try:
            return worker.call(
                message,
                timeout_s,
                slow_s=timeout_s - self._standby_s if self._has_standby else None,
                when_slow=lambda: self._spawn_standby(standby),
            )
        finally:
            with self._lock:
                self._calls += 1
                self._call_s += time.monotonic() - began

    def _fail(self, task: Task, reason: str) -> None:
        if self._closed:
            task.abandon()
        else:
            task.fail(reason)

    def _spawn(self, standby: list[WorkerProcess]) -> tuple[WorkerProcess | None, str]:
        """Take the standby worker or start one, and wait for it; else return None and a reason."""
        reason = ""
        for _ in range(1 + MAX_RETRIES):
            if not standby:
                reason = self._spawn_standby(standby)
            if not standby:
                break
            worker = standby.pop()
            try:
                worker.wait_ready(self._limits.startup_s)
                return worker, ""
            except WorkerLost as error:
                self._stop(worker)
                reason = str(error)
                if not error.is_retryable:
                    break
                self._log_loss(error)
        return None, reason

    def _spawn_standby(self, standby: list[WorkerProcess]) -> str:
        """Start a standby worker if there is none; returns the reason of a failure."""
        if standby:
            return ""
        with self._lock:
            if self._closed:
                return "the pool is closed"
            try:
                worker = self._start()
            except OSError as error:
                return f"it cannot be started ({error})"
            self._live.add(worker)
        worker.begin()
        standby.append(worker)
        return ""

    def _stop(self, worker: WorkerProcess, *, graceful: bool = False) -> None:
        """End a worker; `graceful`: its exit handlers get a moment to run."""
        worker.stop(graceful=graceful)
        with self._lock:
            self._live.discard(worker)

    def _log_loss(self, error: WorkerLost) -> None:
        """Log the 1st, 2nd, 4th, 8th ... lost worker: every call may lose one."""
        with self._lock:
            self._losses += 1
            is_reported = self._losses & (self._losses - 1) == 0 and not self._closed
            count = f" ({self._losses} so far)" if self._losses > 1 else ""
        if is_reported:
            self._log(
                f"a {self._program.kind} process was lost{count}: {error}; another takes over"
            )
