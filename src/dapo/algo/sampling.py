"""Eq. 11: which groups enter the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal, Protocol, TypeAlias

SignalMetric: TypeAlias = Literal["correct", "score"]
"""What Eq. 11 compares in a group: right and wrong, or the scores."""


class Judged(Protocol):
    """The fields of a `Verdict` that Eq. 11 reads."""

    @property
    def correct(self) -> bool | None: ...

    @property
    def score(self) -> float: ...

    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True)
class SignalRule:
    """Which groups train: those that Eq. 11 keeps, by `metric`, if the scores of their valid
    verdicts, in their own units, are also within the thresholds.
    """

    metric: SignalMetric = "correct"
    min_spread: float = 0.0
    """The smallest difference between largest and smallest score; set it above the noise of a
    judge.
    """
    mean_above: float | None = None
    mean_below: float | None = None

    def is_met_by(self, verdicts: Sequence[Judged]) -> bool:
        """Whether the spread and the mean of an informative group's scores are within the
        thresholds.
        """
        scores = [verdict.score for verdict in verdicts if verdict.error is None]
        mean = fsum(scores) / len(scores)
        return (
            max(scores) - min(scores) >= self.min_spread
            and (self.mean_above is None or mean > self.mean_above)
            and (self.mean_below is None or mean < self.mean_below)
        )


def is_informative(verdicts: Sequence[Judged], metric: SignalMetric = "correct") -> bool:
    """Eq. 11: whether a group of verdicts carries a signal, 0 < number correct < G.

    It reads raw verdicts, never shaped rewards: the rewards of an all-wrong group differ where its
    lengths do, and it must still be dropped. Verdicts with an error do not count; with fewer than
    two valid ones there is nothing to compare. Graded verdicts (`correct` is None), and with the
    metric `score` all verdicts, are informative if their scores differ.
    """
    valid = [verdict for verdict in verdicts if verdict.error is None]
    if len(valid) < 2:
        return False
    if metric == "correct" and all(verdict.correct is not None for verdict in valid):
        return 0 < sum(verdict.correct is True for verdict in valid) < len(valid)
    scores = [verdict.score for verdict in valid]
    # never std > 0: the std of six times 0.1 is 1e-17
    return max(scores) > min(scores)
