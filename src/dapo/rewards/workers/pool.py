"""Verifiers in worker processes: a group is split into tasks, and a hung or dead worker costs only
its verdicts.
"""

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dapo.core.errors import RewardError
from dapo.core.secrets import mask_text
from dapo.rewards.combine import RewardSpec, Scope
from dapo.rewards.verdicts import TokenIds, error_verdict, problem_to_frame, responses_to_json
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.process import (
    WorkerLost,
    WorkerProcess,
    encode_init_message,
    frame,
    needed_environment,
)
from dapo.rewards.workers.starter import MAX_RETRIES, WorkerStarter
from dapo.types import Problem, Verdict

if TYPE_CHECKING:
    from dapo.config.reward_options import RewardConfig

STARTUP_S = 60.0  # time limit for a worker to import its verifier


class VerifierPool:
    """Judges groups in `reward.workers` processes; their number and order change no verdict.

    A verifier of single responses gets one task per response, a group verifier one task per group.
    A task may take `reward.timeout_s` for each of its responses after a worker receives it. On a
    timeout all its responses get an error verdict; the worker and every process that it started are
    killed and replaced. A worker that dies, or whose process state a task changes, is replaced too.
    A standby worker starts when a task is about to time out. If a signal kills or stops a worker,
    its task moves to another one, up to MAX_RETRIES times.

    `reward.memory_gib` bounds the private memory of each process, and of a worker together with its
    descendants.
    """

    def __init__(
        self,
        reward: "RewardConfig",
        *,
        startup_s: float = STARTUP_S,
        output: VerifierOutput | None = None,
        template_time: datetime | None = None,
    ) -> None:
        """Start the workers and wait for the first one.

        Verifier output goes to the standard error, or to `output`, which closes with the pool.
        `template_time` is the local time that a verifier's chat template reads as now.
        Raises RewardError if a worker cannot build the verifier within `startup_s`.
        """
        self.spec = RewardSpec.of(
            reward.verifier,
            options=reward.options,
            threshold=reward.threshold,
            template_time=template_time,
        )
        self._timeout_s = reward.timeout_s
        self.output = output
        self._starter = WorkerStarter(
            encode_init_message(self.spec),
            module="dapo.rewards.workers.worker",
            environment=needed_environment(self.spec.options),
            memory_gib=reward.memory_gib,
            startup_s=startup_s,
            output=output,
            kind="verifier",
        )
        self._slow_s = reward.timeout_s / 2
        self._tasks: queue.SimpleQueue[VerifierTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._calls = 0
        self._call_s = 0.0
        started: Future[WorkerProcess] = Future()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(started,), daemon=True, name=f"dapo-verifier-{i}"
            )
            for i in range(reward.workers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            first = started.result()
        except BaseException:
            self.close()
            raise
        self._scopes: Mapping[Scope, Sequence[int]] = first.ready["scopes"]
        self.needed_columns: Mapping[str, Collection[str]] = first.ready["columns"]
        """The data columns that each user function requires."""

    @property
    def worker_pids(self) -> list[int]:
        return self._starter.pids

    def log_to(self, log: Callable[[str], None]) -> None:
        """Log lost workers by `log` instead of to the standard error."""
        self._starter.log = log

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> "Future[tuple[Verdict, ...]]":
        """Queue a group.

        The future holds one verdict per response, in order, or RewardError once the pool is closed.

        `token_ids[i]` are the tokens of `responses[i]`. Raises RewardError for a problem whose
        fields are not JSON.
        """
        group, tasks = make_tasks(self.spec, self._scopes, problem, responses, token_ids)
        with self._lock:
            if self._closed:
                raise RewardError("the verifier pool is closed")
            for task in tasks:
                self._tasks.put(task)
        return group.future

    def pop_mean_latency(self) -> float | None:
        """Return the mean seconds per call of a worker since the last read; None without a call."""
        with self._lock:
            calls = self._calls
            seconds = self._call_s
            self._calls = 0
            self._call_s = 0.0
        return seconds / calls if calls else None

    def close(self) -> None:
        """Kill the workers and their descendants. Pending verdicts become RewardError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task.group.abandon()
        for _ in self._threads:
            self._tasks.put(None)
        self._starter.close()
        for thread in self._threads:
            thread.join()
        if self.output is not None:
            self.output.close()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self, started: "Future[WorkerProcess]") -> None:
        """Run the thread of one worker: call it, pass on its verdicts, replace it."""
        began = time.monotonic()
        standby: list[WorkerProcess] = []  # none or one: started, not yet waited for
        worker, reason = self._starter.spawn(standby)
        with self._lock:
            if not started.done():
                # early enough for a standby to be ready at the timeout
                self._slow_s = max(
                    self._timeout_s / 4, self._timeout_s - 2 * (time.monotonic() - began)
                )
                if worker is None:
                    started.set_exception(RewardError(reason))
                else:
                    started.set_result(worker)
        while (task := self._tasks.get()) is not None:
            worker = self._judge(task, worker, standby)
        for last in filter(None, [worker, *standby]):
            self._starter.stop(last, graceful=last is worker)

    def _judge(
        self, task: "VerifierTask", worker: WorkerProcess | None, standby: list[WorkerProcess]
    ) -> WorkerProcess | None:
        """Enter the verdicts of a task; returns the worker for the next one, or None."""
        for retries_left in range(MAX_RETRIES, -1, -1):
            if worker is not None and worker.is_lost:  # while it was idle
                self._starter.stop(worker, graceful=False)
                worker = None
            reason = ""
            if worker is None:
                worker, reason = self._starter.spawn(standby)
            if worker is None:
                self._fail(task, f"no worker process: {reason}")
                return None
            with self._lock:
                worker.busy = not self._closed
            if not worker.busy:
                task.group.abandon()
                return worker
            began = time.monotonic()
            try:
                # a call that judges a whole group may take the time of each of its responses
                timeout_s = self._timeout_s * len(task.response_indices)
                slow_s = timeout_s - self._timeout_s + self._slow_s
                answer = worker.call(
                    task.request,
                    timeout_s,
                    slow_s=slow_s,
                    when_slow=lambda: self._starter.spawn_standby(standby),
                )
                rows = _rows_of(answer, len(task.response_indices), len(task.verifier_indices))
            except WorkerLost as error:
                self._count_call(time.monotonic() - began)
                self._starter.stop(worker, graceful=False)
                worker = None
                if not (error.is_retryable and retries_left):
                    self._fail(task, str(error))
                    break
                self._starter.log_loss(error)
            else:
                self._count_call(time.monotonic() - began)
                task.group.add_verdicts(task, rows)
                if not answer["needs_restart"]:
                    return worker
                self._starter.stop(worker, graceful=False)
                break
        return self._starter.spawn(standby)[0]

    def _count_call(self, seconds: float) -> None:
        with self._lock:
            self._calls += 1
            self._call_s += seconds

    def _fail(self, task: "VerifierTask", reason: str) -> None:
        if self._closed:
            task.group.abandon()
        else:
            task.group.fail(task, reason)


@dataclass(frozen=True)
class VerifierTask:
    """One call of a worker: some of a group's responses, some of the verifiers."""

    group: "PendingGroup"
    response_indices: Sequence[int]
    verifier_indices: Sequence[int]  # positions in the specification's weights
    request: bytes  # the message that a worker reads


class PendingGroup:
    """The verdicts on one group as they arrive; `future` is done when all are present."""

    def __init__(self, spec: RewardSpec, size: int, num_tasks: int) -> None:
        self.future: Future[tuple[Verdict, ...]] = Future()
        self.future.set_running_or_notify_cancel()
        self._spec = spec
        self._lock = threading.Lock()
        self._table: list[list[Verdict | None]] = [[None] * len(spec.weights) for _ in range(size)]
        """`[response][verifier]`"""
        self._tasks_left = num_tasks
        if num_tasks == 0:
            self._finish()

    def add_verdicts(self, task: VerifierTask, rows: Sequence[Sequence[Verdict | None]]) -> None:
        with self._lock:
            for index, row in zip(task.response_indices, rows, strict=True):
                for verifier_index, verdict in zip(task.verifier_indices, row, strict=True):
                    self._table[index][verifier_index] = verdict
            self._tasks_left -= 1
            done = self._tasks_left == 0
        if done:
            self._finish()

    def fail(self, task: VerifierTask, reason: str) -> None:
        names = list(self._spec.weights)
        error = error_verdict(f"{', '.join(names[i] for i in task.verifier_indices)}: {reason}")
        self.add_verdicts(
            task, [[error, *[None] * (len(task.verifier_indices) - 1)]] * len(task.response_indices)
        )

    def abandon(self) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_exception(
                    RewardError("the verifier pool was closed before this verdict")
                )

    def _finish(self) -> None:
        self.future.set_result(tuple(self._spec.combine(row) for row in self._table))


def make_tasks(
    spec: RewardSpec,
    scopes: Mapping[Scope, Sequence[int]],
    problem: Problem,
    responses: Sequence[str],
    token_ids: TokenIds,
) -> tuple[PendingGroup, list[VerifierTask]]:
    """Split a group into a task per response and one per group, for the scopes with verifiers.

    Raises RewardError for a problem with fields that are not JSON.

    Args:
        spec: The verifiers of the reward.
        scopes: The positions in `spec.weights` of the verifiers of each scope.
        problem: The problem.
        responses: The texts of the group.
        token_ids: The tokens of each response.
    """
    if len(responses) != len(token_ids):
        raise ValueError(f"{len(responses)} responses, but the tokens of {len(token_ids)}")
    try:
        # once per group: its tests may be large
        problem_json = json.dumps(problem_to_frame(problem))
    except (TypeError, ValueError) as error:
        raise RewardError(f"problem {problem.id!r} has a field that is not JSON: {error}") from None
    everything = range(len(responses))
    cuts: list[tuple[Scope, Sequence[int]]] = [
        *(("response", [i]) for i in everything),
        ("group", everything),
    ]
    cuts = [(scope, indices) for scope, indices in cuts if scopes[scope] and indices]
    group = PendingGroup(spec, len(responses), len(cuts))
    tasks = []
    for scope, indices in cuts:
        task_fields = {
            "scope": scope,
            **responses_to_json([responses[i] for i in indices]),
            # most of the bytes, and only functions that judge groups use them
            "token_ids": [list(token_ids[i]) if scope == "group" else [] for i in indices],
        }
        request = frame(f'{{"problem": {problem_json}, {json.dumps(task_fields)[1:]}')
        tasks.append(VerifierTask(group, indices, scopes[scope], request))
    return group, tasks


def _rows_of(
    answer: Mapping[str, Any], num_responses: int, num_verifiers: int
) -> list[list[Verdict | None]]:
    """Return the verdicts in a worker's answer, `[response][verifier]`.

    Raises WorkerLost if it is malformed.
    """
    rows: Any = answer.get("verdicts")
    is_table = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not is_table or [len(row) for row in rows] != [num_verifiers] * num_responses:
        raise WorkerLost("the worker process did not answer with verdicts")
    return [[_verdict_of(values) for values in row] for row in rows]


def _verdict_of(values: Any) -> Verdict | None:
    match values:
        case None:
            return None
        case [
            bool() | None as correct,
            int() | float() as score,
            str() | None as error,
            str() | None as answer,
        ]:
            if math.isfinite(score):
                return Verdict(correct, score, error and mask_text(error), answer)
    raise WorkerLost("the worker process did not answer with a verdict")
