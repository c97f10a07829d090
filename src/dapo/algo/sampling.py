"""Eq. 11: which groups enter the batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dapo.types import Verdict


def is_informative(verdicts: "Sequence[Verdict]", *, mean_between: tuple[float, float] | None = None) -> bool:
    """Eq. 11: does a group of verdicts carry a signal, 0 < number correct < G?

    Looks at raw verdicts, never at shaped rewards: an all-wrong group of different lengths has spread in its reward
    and must still be dropped. Verdicts with an error do not count; with fewer than two valid ones there is nothing to
    compare. Graded verdicts (`correct` is None) are informative if their scores differ and, where `mean_between` is
    given, if their mean lies strictly between the two.
    """
    valid = [verdict for verdict in verdicts if verdict.error is None]
    if len(valid) < 2:
        return False
    if all(verdict.correct is not None for verdict in valid):
        return 0 < sum(verdict.correct is True for verdict in valid) < len(valid)
    scores = [verdict.score for verdict in valid]
    # never std > 0: the std of six times 0.1 is 1e-17
    if max(scores) <= min(scores):
        return False
    return mean_between is None or mean_between[0] < sum(scores) / len(scores) < mean_between[1]
