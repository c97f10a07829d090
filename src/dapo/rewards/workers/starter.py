"""Starts, replaces and ends the worker processes of a pool."""

import sys
import threading
from collections.abc import Callable, Mapping

from dapo.core.errors import RewardError
from dapo.core.terminal import print_text
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.process import WorkerLost, WorkerProcess

MAX_RETRIES = 2
"""Retries of a call on another worker after a signal killed or stopped its own.

The signal may have come from another process. Verifiers are stateless, and episodes are rebuilt
from their calls, so the next worker gives the same answer. Code that kills its own process does so
at each retry, which ends in an error.
"""


class WorkerStarter:
    """Starts worker processes with the same first message; `stop` and `close` end them.

    Safe for several threads.
    """

    def __init__(
        self,
        init_message: bytes,
        *,
        module: str,
        environment: Mapping[str, str],
        memory_gib: float,
        startup_s: float,
        output: VerifierOutput | None,
        kind: str,
    ) -> None:
        """`module` runs in each process; `kind` names the processes in messages."""
        self._init_message = init_message
        self._module = module
        self._environment = environment
        self._memory_bytes = round(memory_gib * 2**30)
        self._startup_s = startup_s
        self._output = output
        self._kind = kind
        self.log: Callable[[str], None] = lambda text: print_text(text, file=sys.stderr)
        self._lock = threading.Lock()
        self._live: set[WorkerProcess] = set()
        self._closed = False
        self._losses = 0

    @property
    def pids(self) -> list[int]:
        """The process ids of the live workers."""
        with self._lock:
            return sorted(worker.pid for worker in self._live)

    def spawn(self, standby: list[WorkerProcess]) -> tuple[WorkerProcess | None, str]:
        """Take the standby worker or start one, and wait for it; else return None and a reason."""
        reason = ""
        for _ in range(1 + MAX_RETRIES):
            if not standby:
                reason = self.spawn_standby(standby)
            if not standby:
                break
            worker = standby.pop()
            try:
                worker.wait_ready(self._startup_s)
                return worker, ""
            except (WorkerLost, RewardError) as error:
                self.stop(worker, graceful=False)
                reason = str(error)
                if not (isinstance(error, WorkerLost) and error.is_retryable):
                    break
                self.log_loss(error)
        return None, reason

    def spawn_standby(self, standby: list[WorkerProcess]) -> str:
        """Start a standby worker if there is none; returns the reason of a failure."""
        if standby:
            return ""
        with self._lock:
            if self._closed:
                return "the pool is closed"
            try:
                worker = WorkerProcess(
                    self._init_message,
                    module=self._module,
                    environment=self._environment,
                    memory_bytes=self._memory_bytes,
                    **({} if self._output is None else {"output": self._output.fileno()}),
                )
            except OSError as error:
                return f"it cannot be started ({error})"
            self._live.add(worker)
        worker.begin()
        standby.append(worker)
        return ""

    def stop(self, worker: WorkerProcess, *, graceful: bool) -> None:
        """End a worker; `graceful`: its exit handlers get a moment to run."""
        worker.stop(graceful=graceful)
        with self._lock:
            self._live.discard(worker)

    def log_loss(self, error: WorkerLost) -> None:
        """Log the 1st, 2nd, 4th, 8th ... lost worker: every call may lose one."""
        with self._lock:
            self._losses += 1
            is_reported = self._losses & (self._losses - 1) == 0 and not self._closed
            count = f" ({self._losses} so far)" if self._losses > 1 else ""
        if is_reported:
            self.log(f"a {self._kind} process was lost{count}: {error}; another takes over")

    def close(self) -> None:
        """Start no more workers, and kill those that are busy; their callers end the others."""
        with self._lock:
            self._closed = True
            busy = [worker for worker in self._live if worker.busy]
        for worker in busy:
            worker.interrupt()
