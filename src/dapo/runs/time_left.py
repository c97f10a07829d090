"""Estimates the seconds left of a run from the metrics of its latest steps, for the console, status
and the page.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean, median

STEPS_FOR_ETA = 20


class TimeLeft:
    """An estimate of a run's seconds left from its latest STEPS_FOR_ETA steps."""

    def __init__(self, token_budget: int | None) -> None:
        """`token_budget` is `train.token_budget`."""
        self._token_budget = token_budget
        self._tokens = 0.0
        self._tokens_per_step: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._seconds: deque[tuple[float, float]] = deque(maxlen=STEPS_FOR_ETA)
        """Seconds of each step without its evaluation, and of the evaluation."""

    def add(self, metrics: Mapping[str, float | None], *, timed: bool = True) -> None:
        """Add the metrics of a step; without `timed` its seconds predict nothing."""
        values = {name: value for name, value in metrics.items() if value is not None}
        tokens = values.get("rollout/tokens_generated")
        if tokens is not None:
            self._tokens += tokens
            self._tokens_per_step.append(tokens)
        if timed:
            seconds = training_seconds(values)
            if math.isfinite(seconds):
                self._seconds.append((seconds, values.get("time/evaluate_s", 0.0)))

    def budget_fraction(self) -> float:
        """Return the spent fraction of the token budget, at most 1; 0 without a budget."""
        if not self._token_budget:
            return 0.0
        return min(1.0, self._tokens / self._token_budget)

    def seconds(self, steps: int) -> float | None:
        """Estimate the seconds left with `steps` steps to go; None if no step was measured."""
        if not self._seconds:
            return None
        # the median leaves out a slow step, which says nothing of the next ones; evaluations come
        # every few steps, so their mean counts
        training = median(seconds for seconds, _ in self._seconds)
        evaluation = fmean(seconds for _, seconds in self._seconds)
        return (training + evaluation) * self._steps(steps)

    def _steps(self, steps: int) -> int:
        """Return `steps`, or the steps until the token budget is spent if these are fewer."""
        if self._token_budget is None or sum(self._tokens_per_step) <= 0:
            return max(0, steps)
        steps_left = (self._token_budget - self._tokens) / fmean(self._tokens_per_step)
        return max(0, min(steps, math.ceil(steps_left)))


def training_seconds(metrics: Mapping[str, float]) -> float:
    """Return the seconds of a step without its evaluation; nan if they were not measured."""
    return metrics.get("time/step_s", math.nan) - metrics.get("time/evaluate_s", 0.0)
