"""A sequential test of a mean: its probability of error holds over any number of looks and for any distribution.

Each player bets that the values lie above the threshold on average. Where they do not, the wealth of all players is a
nonnegative supermartingale that begins at 1. By Ville's inequality it ever reaches 1 / alpha with a probability of at
most alpha (Ramdas et al., "Game-theoretic statistics", 2023). A player enters at each step with a part of the stake, so
that a gap that begins late is found as well.
"""

from math import exp

BETS = (0.1, 0.3, 0.6, 0.9)
"""Fractions of the wealth that players stake on one step."""
EXCESSES = (0.05, 0.1, 0.2, 0.4)
"""Distances from the threshold, in units of the bound, at which Hoeffding's bets grow fastest."""
_MAX_WEALTH, _MAX_LOG = 1e100, 300.0


class MeanTest:
    """Tests whether the mean of bounded values is above a threshold, from some step on."""

    def __init__(self, threshold: float, *, bound: float = 1.0) -> None:
        """Values lie within +-`bound`; a larger one raises the bound, as scores may have any scale."""
        self._threshold, self._bound = threshold, bound
        self._steps = 0
        self._wealth = [0.0] * (len(BETS) + len(EXCESSES))

    @property
    def wealth(self) -> float:
        """The evidence against a mean of at most the threshold: 20 or more is reached by chance in one run of 20."""
        return sum(self._wealth) / len(self._wealth)

    def add(self, value: float, *, num_problems: int = 1) -> None:
        """Add a step's value, the mean over `num_problems` independent problems."""
        self._steps += 1
        self._bound = max(self._bound, abs(value))
        entering = 1 / (self._steps * (self._steps + 1))  # these sum to 1
        excess = (value - self._threshold) / self._bound
        largest_loss = 1 + self._threshold / self._bound
        factors = [1 + bet * excess / largest_loss for bet in BETS]
        # Hoeffding's lemma: the mean of n values within +-1 has E exp(s (mean - mu)) <= exp(s^2 / 2n)
        factors += [exp(min(_MAX_LOG, num_problems * (each * excess - each**2 / 2))) for each in EXCESSES]
        pairs = zip(self._wealth, factors, strict=True)
        self._wealth = [min(_MAX_WEALTH, (wealth + entering) * factor) for wealth, factor in pairs]
