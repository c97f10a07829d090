"""A sequential test of a mean, whose probability of error holds over any number of looks.

Each player bets that the values lie above the threshold m on average. In a step whose value x is the mean over n
problems, a player's wealth is multiplied by

    exp(n (s (x - m) - v (e^s - 1 - s)))        s: the player's stake; v: the variance of one problem's value

Where the mean is at most m and no problem's value is above 1, its expectation is at most 1 (Bennett's inequality). By
Ville's inequality the wealth of all players then ever reaches 1 / alpha with a probability of at most alpha. Values
from 0 to 1 have a variance of at most m (1 - m); v is the one of the past steps where that is larger. Players enter at
each step with a part of the initial wealth, so that a gap that begins late is found as well.
"""

from math import exp

STAKES = (0.25, 0.5, 1.0, 1.5)
_FIRST_VARIANCE = 0.25  # the largest variance of values from 0 to 1, which counts as one step's
_MAX_WEALTH, _MAX_LOG = 1e100, 300.0


class MeanTest:
    """Tests whether the mean of values is above a threshold, from some step on."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._bound = threshold, 1.0
        self._steps, self._sum, self._squares = 0, 0.0, 0.0
        self._wealth = [0.0] * len(STAKES)

    @property
    def wealth(self) -> float:
        """The evidence against a mean of at most the threshold: 20 or more is reached by chance in one run of 20."""
        return sum(self._wealth) / len(self._wealth)

    def add(self, value: float, *, num_problems: int = 1) -> None:
        """Add a step's value, the mean over `num_problems` problems; above 1 it raises the unit, as scores may need."""
        self._bound = max(self._bound, abs(value))
        mean, x = self._threshold / self._bound, value / self._bound
        variance = max(mean * (1 - mean), (_FIRST_VARIANCE + self._squares) / max(1, self._steps))
        if self._steps:
            self._squares += num_problems * (x - self._sum / self._steps) ** 2
        self._steps += 1
        self._sum += x
        entering = 1 / (self._steps * (self._steps + 1))  # these sum to 1
        for i, stake in enumerate(STAKES):
            growth = num_problems * (stake * (x - mean) - variance * (exp(stake) - 1 - stake))
            self._wealth[i] = min(_MAX_WEALTH, (self._wealth[i] + entering) * exp(min(_MAX_LOG, growth)))
