"""Verifiers in worker processes: a group is split into tasks, and a hung or dead worker costs only
its verdicts.
"""

import json
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dapo.core.environment import needed_environment
from dapo.core.errors import RewardError
from dapo.core.loading import import_locations, own_name
from dapo.core.secrets import mask_text
from dapo.processes.frames import encode, frame
from dapo.processes.output import WorkerOutput
from dapo.processes.pool import STARTUP_S, Call, Limits, WorkerPool
from dapo.processes.process import WorkerLost, WorkerProcess, WorkerProgram
from dapo.rewards.combine import RewardSpec, Scope
from dapo.rewards.verdicts import TokenIds, error_verdict, problem_to_frame, responses_to_json
from dapo.types import Problem, Verdict

if TYPE_CHECKING:
    from dapo.config.reward_options import RewardConfig


class VerifierPool(WorkerPool):
    """Judges groups in `reward.workers` processes; their number and order change no verdict.

    A verifier of single responses gets one task per response, a group verifier one task per group.
    A task may take `reward.timeout_s` for each of its responses. A task that fails gives each of
    its responses an error verdict. `reward.memory_gib` bounds the memory of a process.
    """

    def __init__(
        self,
        reward: "RewardConfig",
        *,
        startup_s: float = STARTUP_S,
        output: WorkerOutput | None = None,
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
        program = WorkerProgram(
            module="dapo.rewards.worker",
            init_message=_init_message(self.spec),
            environment=needed_environment(self.spec.options),
            kind="verifier",
            error=RewardError,
        )
        limits = Limits(reward.timeout_s, reward.memory_gib, startup_s)
        super().__init__(program, limits, workers=reward.workers, output=output, has_standby=True)
        self._scopes: Mapping[Scope, Sequence[int]] = self._ready["scopes"]
        self.needed_columns: Mapping[str, Collection[str]] = self._ready["columns"]
        """The data columns that each user function requires."""

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> "Future[tuple[Verdict, ...]]":
        """Queue a group.

        The future holds one verdict per response, in order, or RewardError once the pool is closed.

        `token_ids[i]` are the tokens of `responses[i]`. Raises RewardError for a problem whose
        fields are not JSON.
        """
        group, tasks = make_tasks(self.spec, self._scopes, problem, responses, token_ids)
        if not self._put(tasks):
            raise RewardError("the verifier pool is closed")
        return group.future

    def pop_mean_latency(self) -> float | None:
        """Return the mean seconds per call of a worker since the last read; None without a call."""
        calls, seconds = self._pop_calls()
        return seconds / calls if calls else None


def _init_message(spec: RewardSpec) -> bytes:
    """Return the first message to a worker: the reward to build, and where modules are.

    Raises RewardError.
    """
    for name in spec.weights:
        if name.startswith("__main__:"):
            raise RewardError(
                f"{name!r}: worker processes cannot import a running script or notebook; use a"
                " module"
            )
    try:
        return encode({"spec": vars(spec), **import_locations()})
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"a verifier's options must be JSON values to reach its processes: {error}"
        ) from None


@dataclass(frozen=True)
class VerifierTask:
    """One call of a worker: some of a group's responses, some of the verifiers."""

    group: "PendingGroup"
    response_indices: Sequence[int]
    verifier_indices: Sequence[int]  # positions in the specification's weights
    request: bytes  # the message that a worker reads

    def run(self, worker: WorkerProcess, call: Call) -> bool:
        # a call that judges a whole group may take the time of each of its responses
        answer = call(self.request, len(self.response_indices))
        rows = _rows_of(answer, len(self.response_indices), len(self.verifier_indices))
        self.group.add_verdicts(self, rows)
        return bool(answer.get("needs_restart"))

    def fail(self, reason: str) -> None:
        names = list(map(own_name, self.group.spec.weights))
        error = error_verdict(f"{', '.join(names[i] for i in self.verifier_indices)}: {reason}")
        row = [error, *[None] * (len(self.verifier_indices) - 1)]
        self.group.add_verdicts(self, [row] * len(self.response_indices))

    def abandon(self) -> None:
        self.group.abandon()


class PendingGroup:
    """The verdicts on one group as they arrive; `future` is done when all are present."""

    def __init__(self, spec: RewardSpec, size: int, num_tasks: int) -> None:
        self.future: Future[tuple[Verdict, ...]] = Future()
        self.future.set_running_or_notify_cancel()
        self.spec = spec
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

    def abandon(self) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_exception(
                    RewardError("the verifier pool was closed before this verdict")
                )

    def _finish(self) -> None:
        self.future.set_result(tuple(self.spec.combine(row) for row in self._table))


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
        text = f'{{"problem": {problem_json}, {json.dumps(task_fields)[1:]}'
        request = frame(text.encode("ascii"))
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
            dict() as components,
        ]:
            numbers = [score, *components.values()]
            if all(map(_is_finite, numbers)):
                reason = error and mask_text(error)
                return Verdict(correct, score, reason, answer, components)
    raise WorkerLost("the worker process did not answer with a verdict")


def _is_finite(value: Any) -> bool:
    # an integer of JSON may be larger than any float
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
