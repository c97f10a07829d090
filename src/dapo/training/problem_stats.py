"""Statistics per problem: how often a run has sampled it, how well it was answered, and at which step last."""

from collections.abc import Iterable, Mapping
from typing import Any

from dapo.types import Group

_EMPTY: Mapping[str, float] = {
    "visits": 0,
    "responses": 0,  # that were judged
    "decided": 0,  # of them right or wrong
    "correct": 0,
    "score_sum": 0.0,
    "last_step": 0,
}


class ProblemStats:
    """Counts by problem id; copies of one problem share them. They are saved in checkpoints, so they are exact."""

    def __init__(self) -> None:
        self._by_problem: dict[str, dict[str, float]] = {}

    def __len__(self) -> int:
        """How many problems have been sampled."""
        return len(self._by_problem)

    def record(self, groups: Iterable[Group], *, step: int) -> None:
        """Count the judged groups of a step. A response with an error verdict counts in nothing but the visit."""
        for group in groups:
            entry = self._by_problem.setdefault(group.problem.id, dict(_EMPTY))
            valid = [verdict for verdict in group.verdicts if verdict.error is None]
            entry["visits"] += 1
            entry["responses"] += len(valid)
            entry["decided"] += sum(verdict.correct is not None for verdict in valid)
            entry["correct"] += sum(verdict.correct is True for verdict in valid)
            entry["score_sum"] += sum(verdict.score for verdict in valid)
            entry["last_step"] = step

    def state_dict(self) -> dict[str, dict[str, float]]:
        """By problem id, as JSON values: visits, responses, decided, correct, score_sum, last_step."""
        return {problem: dict(entry) for problem, entry in sorted(self._by_problem.items())}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with a saved state."""
        self._by_problem = {problem: dict(entry) for problem, entry in state.items()}
