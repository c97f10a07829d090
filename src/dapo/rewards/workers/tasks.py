"""A group's way through a pool: cut into jobs for the workers, put together again as one future."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dapo.core.errors import RewardError
from dapo.rewards.combine import RewardSpec, Scope
from dapo.rewards.verdicts import Opinion, unjudged
from dapo.rewards.workers.protocol import encode, problem_to_json
from dapo.types import Problem, Verdict


class PendingGroup:
    """The opinions that have come in on one group's responses; the future is done when none is missing."""

    def __init__(self, spec: RewardSpec, size: int) -> None:
        self.future: Future[tuple[Verdict, ...]] = Future()
        self.future.set_running_or_notify_cancel()
        self._spec = spec
        self._lock = threading.Lock()
        self._table: list[list[Opinion]] = [[None] * len(spec.weights) for _ in range(size)]  # [response][verifier]
        self._jobs_left = 0

    def expect(self, num_jobs: int) -> None:
        """Be done after so many jobs; at once if there are none."""
        self._jobs_left = num_jobs
        if num_jobs == 0:
            self._finish()

    def settle(self, job: "Job", rows: Sequence[Sequence[Opinion]]) -> None:
        """Enter one job's `[response][verifier]` opinions."""
        with self._lock:
            for index, row in zip(job.indices, rows, strict=True):
                for place, opinion in zip(job.places, row, strict=True):
                    self._table[index][place] = opinion
            self._jobs_left -= 1
            done = self._jobs_left == 0
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
class Job:
    """What one worker does in one go."""

    group: PendingGroup
    indices: Sequence[int]
    """Of the responses it judges."""
    places: Sequence[int]
    """Of the verifiers it runs, in the order of the specification's weights."""
    names: Sequence[str]
    """Of the same verifiers."""
    request: bytes
    """As a worker reads it."""

    def settle(self, rows: Sequence[Sequence[Opinion]]) -> None:
        """Hand in its opinions."""
        self.group.settle(self, rows)

    def fail(self, reason: str) -> None:
        """No opinion on any of its responses."""
        row = [unjudged(f"{', '.join(self.names)}: {reason}"), *[None] * (len(self.places) - 1)]
        self.group.settle(self, [row] * len(self.indices))


def jobs_of(
    spec: RewardSpec,
    scopes: Mapping[Scope, Sequence[int]],
    problem: Problem,
    responses: Sequence[str],
    token_ids: Sequence[Sequence[int]],
) -> "tuple[PendingGroup, list[Job]]":
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
    jobs = []
    for scope, indices in cuts:
        places = scopes[scope]
        if not places:
            continue
        message = {
            "scope": scope,
            "problem": described,
            "responses": [responses[i] for i in indices],
            # only a function that sees the group can ask for them, and they are most of the bytes
            "token_ids": [list(token_ids[i]) if scope == "group" else [] for i in indices],
        }
        try:
            request = encode(message)
        except (TypeError, ValueError) as error:
            raise RewardError(f"problem {problem.id!r} holds what is not JSON: {error}") from None
        jobs.append(Job(group, indices, places, [names[place] for place in places], request))
    group.expect(len(jobs))
    return group, jobs
