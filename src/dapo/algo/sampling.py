"""Eq. 11: which groups enter the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Judged(Protocol):
    """The fields of a `Verdict` that Eq. 11 reads."""

    @property
    def correct(self) -> bool | None: ...

    @property
    def score(self) -> float: ...

    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True)
class ScoreThresholds:
    """What a group must show beyond Eq. 11; all thresholds are on the valid verdicts' scores, in their own units."""

    min_spread: float = 0.0
    """Largest minus smallest score: above what a noisy judge says of one and the same response."""
    mean_above: float | None = None
    mean_below: float | None = None

    def is_met_by(self, verdicts: Sequence[Judged]) -> bool:
        """Are the spread and the mean of the scores within the thresholds? Of an informative group."""
        scores = [verdict.score for verdict in verdicts if verdict.error is None]
        mean = sum(scores) / len(scores)
        return (
            max(scores) - min(scores) >= self.min_spread
            and (self.mean_above is None or mean > self.mean_above)
            and (self.mean_below is None or mean < self.mean_below)
        )


def is_informative(verdicts: Sequence[Judged]) -> bool:
    """Eq. 11: does a group of verdicts carry a signal, 0 < number correct < G?

    Looks at raw verdicts, never at shaped rewards: an all-wrong group of different lengths has spread in its reward
    and must still be dropped. Verdicts with an error do not count; with fewer than two valid ones there is nothing to
    compare. Graded verdicts (`correct` is None) are informative if their scores differ.
    """
    valid = [verdict for verdict in verdicts if verdict.error is None]
    if len(valid) < 2:
        return False
    if all(verdict.correct is not None for verdict in valid):
        return 0 < sum(verdict.correct is True for verdict in valid) < len(valid)
    scores = [verdict.score for verdict in valid]
    # never std > 0: the std of six times 0.1 is 1e-17
    return max(scores) > min(scores)
