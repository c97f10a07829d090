"""Where a measured learning curve reaches a target accuracy, and how sure that is.

An accuracy is a mean over problems of several tasks, each task with its own weight. A curve is
smoothed by local regression (Cleveland 1979): at each position a parabola is fitted to the
evaluations around it, with tricube weights; a line would be biased, because a learning curve bends.
The crossing is the first position at which the smoothed curve has the target. Its 95 % interval
holds the positions at which the curve's own 95 % interval has it: from where the upper end first
reaches the target to where the lower end does. The smoothed curve is a sum of the evaluations, so
its variance follows from theirs and from their covariances: the problems are the same at every
evaluation, and an easy one is easy at all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DEGREE = 2
"""Degree of the polynomial that is fitted around each position."""
GRID = 400
"""Positions at which a smoothed curve is computed."""
NORMAL_QUANTILE = 1.959964
"""The quantile of a 95 % interval."""


@dataclass(frozen=True)
class HeldOut:
    """The evaluated problems, task by task: how many, how often each is asked, and what the task
    weighs.
    """

    problems: Mapping[str, int]
    samples: Mapping[str, int]
    shares: Mapping[str, float]
    """They add up to 1."""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "HeldOut":
        """The object whose `vars` are `found`."""
        return cls(found["problems"], found["samples"], found["shares"])

    def rates(self, right: str) -> Array:
        """`[problems]`: the share of right responses to each problem, from its number of them, one
        digit a problem.

        Raises ValueError for another number of problems.
        """
        asked = [self.samples[task] for task, count in self.problems.items() for _ in range(count)]
        if len(right) != len(asked):
            raise ValueError(
                f"an evaluation of {len(right)} problems where {len(asked)} were asked"
            )
        return np.array([int(digit) / samples for digit, samples in zip(right, asked, strict=True)])

    def weights(self) -> Array:
        """`[problems]`: what each weighs in the accuracy; they add up to 1."""
        return np.concatenate(
            [np.full(n, self.shares[task] / n) for task, n in self.problems.items()]
        )

    def accuracy(self, rates: Array) -> tuple[float, float, float]:
        """The weighted mean of `[problems]` rates with its 95 % interval, from the variance within
        each task.
        """
        mean = float(rates @ self.weights())
        half = NORMAL_QUANTILE * math.sqrt(float(self.covariance(rates[None, :])[0, 0]))
        return mean, max(0.0, mean - half), min(1.0, mean + half)

    def covariance(self, rates: Array) -> Array:
        """`[evaluations, evaluations]`: of the accuracies of `[evaluations, problems]` rates, over
        other problems.
        """
        found = np.zeros((len(rates), len(rates)))
        start = 0
        for task, count in self.problems.items():
            part = rates[:, start : start + count]
            start += count
            if count > 1:
                found += (
                    self.shares[task] ** 2 / count * np.cov(part).reshape(len(rates), len(rates))
                )
        return found


@dataclass(frozen=True)
class Crossing:
    """Where a curve has the target, with its 95 % interval; infinity: not where it was measured."""

    at: float
    low: float
    high: float

    @property
    def reached(self) -> bool:
        """Whether the smoothed curve has the target anywhere."""
        return math.isfinite(self.at)


def smoothing(x: Array, at: Array, bandwidth: float) -> Array:
    """`[at, x]`: the weights with which local quadratic regression adds up values at `x` to its
    value at each `at`.

    Evaluations nearer than `bandwidth` count; where they are fewer than four, the four nearest
    ones.
    """
    distance = np.abs(at[:, None] - x[None, :])
    fourth = np.sort(distance, axis=1)[:, min(DEGREE + 1, len(x) - 1)]
    width = np.maximum(bandwidth, 1.001 * fourth)[:, None]
    root = np.sqrt(np.clip(1 - (distance / width) ** 3, 0.0, None) ** 3)
    powers = ((x[None, :] - at[:, None]) / width)[..., None] ** np.arange(
        min(DEGREE, len(x) - 1) + 1
    )
    found: Array = np.linalg.pinv(root[..., None] * powers)[:, 0, :] * root
    return found


def smoothed(x: Sequence[float], y: Array, at: Array, bandwidth: float) -> Array:
    """A curve `y`, `[evaluations]` at the positions `x`, as smoothed values `[at]`."""
    found: Array = smoothing(np.asarray(x, dtype=float), at, bandwidth) @ y
    return found


def first_above(at: Array, curve: Array, target: float) -> float:
    """The first position where a curve `[at]` has the target, between two of them by a line;
    infinity: nowhere.
    """
    above = np.flatnonzero(curve >= target)
    if not len(above):
        return math.inf
    index = int(above[0])
    if index == 0:
        return float(at[0])
    return float(np.interp(target, curve[index - 1 : index + 1], at[index - 1 : index + 1]))


def find_crossing(
    x: Sequence[float], rates: Array, held_out: HeldOut, *, target: float, bandwidth: float
) -> Crossing:
    """Where the accuracy of a curve reaches the target.

    Args:
        x: the position of each evaluation, ascending: generated tokens, for example.
        rates: `[evaluations, problems]`, the share of right responses.
        held_out: the tasks of the problems.
        target: an accuracy.
        bandwidth: of the smoothing, in the unit of `x`.
    """
    at = np.linspace(x[0], x[-1], GRID)
    weights = smoothing(np.asarray(x, dtype=float), at, bandwidth)
    curve = weights @ (rates @ held_out.weights())
    variance = np.einsum("ai,ij,aj->a", weights, held_out.covariance(rates), weights)
    half = NORMAL_QUANTILE * np.sqrt(np.maximum(variance, 0.0))
    return Crossing(
        *(first_above(at, ends, target) for ends in (curve, curve + half, curve - half))
    )
