"""A sequential test of a mean, whose probability of error holds over any number of looks.

Each player bets that the problems' values lie above the threshold m on average. For each problem of
a step, of value x, a player's wealth is multiplied by

    exp(s (x - m) - ((x - m) / c)² (-ln(1 - s c) - s c))        s: the player's stake; c = 1 + m

which is at most 1 + s (x - m) for every x of at least -1 (Fan, Grama and Liu, 2015). Where the mean
is at most m, its expectation is at most 1, whatever the variance. By Ville's inequality the wealth
of all players then ever reaches 1 / alpha with a probability of at most alpha. Players enter at
each step with a part of the initial wealth, so that a gap that begins late is found as well.
"""

from math import fsum

from dapo.core.portable_math import exp, log

STAKES = (0.1, 0.25, 0.5, 0.75)
_MAX_WEALTH = 1e100
_MAX_LOG = 300.0


class MeanTest:
    """Tests whether the mean of values is above a threshold, from some step on."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._bound = 1.0
        self._steps = 0
        self._wealth = [0.0] * len(STAKES)

    @property
    def wealth(self) -> float:
        """The evidence against a mean up to the threshold; chance reaches 20 in 1 of 20 runs."""
        return fsum(self._wealth) / len(self._wealth)

    def add(self, value: float, *, num_problems: int = 1, variance: float = 0.0) -> None:
        """Add mean and variance of a step's problems; a mean above 1 raises the unit of scores."""
        self._bound = max(self._bound, abs(value))
        threshold = self._threshold / self._bound
        self._steps = self._steps + 1
        gain = value / self._bound - threshold
        reach = 1 + threshold
        squares = (gain * gain + variance / (self._bound * self._bound)) / (reach * reach)
        entering = 1 / (self._steps * (self._steps + 1))  # these sum to 1
        for i, stake in enumerate(STAKES):
            growth = num_problems * (
                stake * gain + squares * (log(1 - stake * reach) + stake * reach)
            )
            self._wealth[i] = min(
                _MAX_WEALTH, (self._wealth[i] + entering) * exp(min(_MAX_LOG, growth))
            )
