"""Verifiers in worker processes: the clock is here, and a hung or dead worker costs its own verdicts only."""

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from dapo.core.errors import RewardError
from dapo.rewards.combine import RewardSpec, Scope
from dapo.rewards.workers.process import WorkerLost, WorkerProcess, encode_init_message
from dapo.rewards.workers.protocol import verdicts_from_json
from dapo.rewards.workers.tasks import VerifierTask, make_tasks
from dapo.types import Problem, Verdict

STARTUP_S = 60.0
"""For a worker to import what its verifier needs."""
MEMORY_GIB = 4.0


class VerifierPool:
    """Judges groups in `workers` processes. Verdicts depend neither on their number nor on which of them judges.

    A verifier of single responses gets one job a response; a function that wants a whole group gets one job a group.
    A job that outlasts `timeout_s` is an error verdict for all of its responses (a group's call is not tried again),
    and its worker is killed with all that it has started, and replaced; so is a worker that dies, or that a job leaves
    in another state than it found. `timeout_s` counts from when a worker receives the job, not from when it was
    submitted. When a job is about to time out its worker's successor is started already.

    `memory_gib` bounds the private memory of each process, and of a worker with all that it has started.
    """

    def __init__(
        self,
        spec: str | Mapping[str, float],
        *,
        options: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        timeout_s: float = 10.0,
        workers: int = 2,
        memory_gib: float = MEMORY_GIB,
        startup_s: float = STARTUP_S,
    ) -> None:
        """Start the workers and wait for the first; the others start meanwhile.

        Raises RewardError if the verifier cannot be built there, or not within `startup_s`.
        """
        if workers < 1 or timeout_s <= 0 or memory_gib <= 0:
            raise RewardError(
                "expected workers >= 1, timeout_s > 0 and memory_gib > 0, got "
                f"workers={workers}, timeout_s={timeout_s:g} and memory_gib={memory_gib:g}"
            )
        self.spec = RewardSpec.of(spec, options=options, threshold=threshold)
        self._init_message = encode_init_message(self.spec)
        self._timeout_s, self._startup_s = timeout_s, startup_s
        self._memory_bytes = round(memory_gib * 2**30)
        self._slow_s = timeout_s / 2
        """After so long a worker's successor is started."""
        self._tasks: queue.SimpleQueue[VerifierTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._live_workers: set[WorkerProcess] = set()
        started: Future[Mapping[Scope, Sequence[int]]] = Future()
        self._threads = [
            threading.Thread(target=self._serve, args=(started,), daemon=True, name=f"dapo-verifier-{i}")
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._scopes = started.result()
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that live now."""
        with self._lock:
            return sorted(worker.pid for worker in self._live_workers)

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        """Queue a group. The future holds one verdict a response, in order, or RewardError once the pool is closed.

        `token_ids[i]` are the tokens of `responses[i]`. Raises RewardError for a problem whose fields are not JSON.
        """
        group, tasks = make_tasks(self.spec, self._scopes, problem, responses, token_ids)
        with self._lock:
            if self._closed:
                raise RewardError("the verifier pool is closed")
            for task in tasks:
                self._tasks.put(task)
        return group.future

    def close(self) -> None:
        """End the workers and everything they have started. Verdicts still out come as RewardError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            busy = [worker for worker in self._live_workers if worker.busy]
        self._abandon_queue()
        for _ in self._threads:
            self._tasks.put(None)
        for worker in busy:
            worker.interrupt()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _abandon_queue(self) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task.group.abandon()

    def _serve(self, started: "Future[Mapping[Scope, Sequence[int]]]") -> None:
        """One worker's thread: ask, settle, replace."""
        began = time.monotonic()
        standby: list[WorkerProcess] = []  # none or one: started, not yet waited for
        worker, reason = self._spawn(standby)
        with self._lock:
            if not started.done():
                # twice what starting has taken: then it is ready when the job's time is over
                self._slow_s = max(self._timeout_s / 4, self._timeout_s - 2 * (time.monotonic() - began))
                _announce(started, worker, reason)
        while (task := self._tasks.get()) is not None:
            if worker is None:
                worker, reason = self._spawn(standby)
            if worker is None:
                self._fail(task, f"no worker process: {reason}")
                continue
            if not self._claim(worker):
                task.group.abandon()
                continue
            try:
                answer = worker.call(
                    task.request, self._timeout_s, slow_s=self._slow_s, when_slow=lambda: self._spawn_standby(standby)
                )
                rows = verdicts_from_json(answer, len(task.response_indices), len(task.verifier_indices))
            except (WorkerLost, ValueError) as error:
                self._stop(worker, graceful=False)
                self._fail(task, str(error))
                worker, reason = self._spawn(standby)
            else:
                task.add_verdicts(rows)
                if answer["needs_restart"]:
                    self._stop(worker, graceful=False)
                    worker, reason = self._spawn(standby)
        for last in [worker, *standby]:
            if last is not None:
                self._stop(last, graceful=last is worker)

    def _spawn(self, standby: list[WorkerProcess]) -> tuple[WorkerProcess | None, str]:
        """A worker that is ready, or None and why there is none."""
        reason = self._spawn_standby(standby)
        if not standby:
            return None, reason
        worker = standby.pop()
        try:
            worker.wait_ready(self._startup_s)
        except (WorkerLost, RewardError) as error:
            self._stop(worker, graceful=False)
            return None, str(error)
        return worker, ""

    def _spawn_standby(self, standby: list[WorkerProcess]) -> str:
        """Start a worker, unless there is one already; why that cannot be done, or nothing."""
        if standby:
            return ""
        with self._lock:
            if self._closed:
                return "the pool is closed"
            try:
                worker = WorkerProcess(self._init_message, memory_bytes=self._memory_bytes)
            except OSError as error:
                return f"it cannot be started ({error})"
            self._live_workers.add(worker)
        worker.begin()
        standby.append(worker)
        return ""

    def _claim(self, worker: WorkerProcess) -> bool:
        """Mark it as busy, so that closing interrupts it; False if the pool has been closed already."""
        with self._lock:
            worker.busy = not self._closed
            return worker.busy

    def _stop(self, worker: WorkerProcess, *, graceful: bool) -> None:
        worker.stop(graceful=graceful)
        with self._lock:
            self._live_workers.discard(worker)

    def _fail(self, task: VerifierTask, reason: str) -> None:
        if self._closed:
            task.group.abandon()
        else:
            task.fail(reason)


def _announce(started: "Future[Mapping[Scope, Sequence[int]]]", worker: WorkerProcess | None, reason: str) -> None:
    if worker is None:
        started.set_exception(RewardError(reason))
    else:
        started.set_result(worker.scopes)
