"""A group's way through a pool: cut into jobs for the workers, put together again as one future."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dapo.core.errors import RewardError
from dapo.rewards.combine import RewardSpec, Scope
from dapo.rewards.verdicts import error_verdict
from dapo.rewards.workers.protocol import encode, problem_to_json
from dapo.types import Problem, Verdict


class PendingGroup:
    """The opinions that have come in on one group's responses; the future is done when none is missing."""

    def __init__(self, spec: RewardSpec, size: int) -> None:
        self.future: Future[tuple[Verdict, ...]] = Future()
        self.future.set_running_or_notify_cancel()
        self._spec = spec
        self._lock = threading.Lock()
        self._table: list[list[Verdict | None]] = [
            [None] * len(spec.weights) for _ in range(size)
        ]  # [response][verifier]
        self._tasks_left = 0

    def expect(self, num_tasks: int) -> None:
        """Be done after so many jobs; at once if there are none."""
        self._tasks_left = num_tasks
        if num_tasks == 0:
            self._finish()

    def add_verdicts(self, task: "VerifierTask", rows: Sequence[Sequence[Verdict | None]]) -> None:
        """Enter one job's `[response][verifier]` opinions."""
        with self._lock:
            for index, row in zip(task.response_indices, rows, strict=True):
                for verifier_index, verdict in zip(task.verifier_indices, row, strict=True):
                    self._table[index][verifier_index] = verdict
            self._tasks_left -= 1
            done = self._tasks_left == 0
        if done:
            self._finish()

    def abandon(self) -> None:
        """The pool was closed: there will be no verdicts."""
        with self._lock:
            if not self.future.done():
                self.future.set_exception(RewardError("the verifier pool was closed before this verdict"))

    def _finish(self) -> None:
        self.future.set_result(tuple(self._spec.combine(row) for row in self._table))


@dataclass(frozen=True)
class VerifierTask:
    """What one worker does in one go."""

    group: PendingGroup
    response_indices: Sequence[int]
    """Of the responses it judges."""
    verifier_indices: Sequence[int]
    """Of the verifiers it runs, in the order of the specification's weights."""
    names: Sequence[str]
    """Of the same verifiers."""
    request: bytes
    """As a worker reads it."""

    def add_verdicts(self, rows: Sequence[Sequence[Verdict | None]]) -> None:
        """Hand in its opinions."""
        self.group.add_verdicts(self, rows)

    def fail(self, reason: str) -> None:
        """No opinion on any of its responses."""
        row = [error_verdict(f"{', '.join(self.names)}: {reason}"), *[None] * (len(self.verifier_indices) - 1)]
        self.group.add_verdicts(self, [row] * len(self.response_indices))


def make_tasks(
    spec: RewardSpec,
    scopes: Mapping[Scope, Sequence[int]],
    problem: Problem,
    responses: Sequence[str],
    token_ids: Sequence[Sequence[int]],
) -> "tuple[PendingGroup, list[VerifierTask]]":
    """A job for each response and one for the group, as far as the verifiers of either scope exist.

    Raises RewardError for a problem that is not made of JSON values.
    """
    if len(responses) != len(token_ids):
        raise ValueError(f"{len(responses)} responses, but the tokens of {len(token_ids)}")
    group = PendingGroup(spec, len(responses))
    names = list(spec.weights)
    described = problem_to_json(problem)
    cuts: list[tuple[Scope, list[int]]] = [("response", [i]) for i in range(len(responses))]
    if responses:
        cuts.append(("group", list(range(len(responses)))))
    tasks = []
    for scope, response_indices in cuts:
        verifier_indices = scopes[scope]
        if not verifier_indices:
            continue
        message = {
            "scope": scope,
            "problem": described,
            "responses": [responses[i] for i in response_indices],
            # only a function that sees the group can ask for them, and they are most of the bytes
            "token_ids": [list(token_ids[i]) if scope == "group" else [] for i in response_indices],
        }
        try:
            request = encode(message)
        except (TypeError, ValueError) as error:
            raise RewardError(f"problem {problem.id!r} holds what is not JSON: {error}") from None
        tasks.append(
            VerifierTask(
                group,
                response_indices,
                verifier_indices,
                [names[verifier_index] for verifier_index in verifier_indices],
                request,
            )
        )
    group.expect(len(tasks))
    return group, tasks
