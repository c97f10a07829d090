"""95 % intervals of a mean over seeds and problems, where the policy of every seed answers the same
problems.

Seeds (training runs) and problems are two crossed samples:

    y_sp = mu + a_s + b_p + e_sp        s = 1 .. S seeds, p = 1 .. P problems; a, b, e: independent random effects

With the mean squares of the two-way table, P var_s(y_s.), S var_p(y_.p) and the one of the
residuals,

    E[MS_seeds] = P var(a) + var(e),  E[MS_problems] = S var(b) + var(e),  E[MS_rest] = var(e)
    Var(mean)   = var(a)/S + var(b)/P + var(e)/(S P), estimated by (MS_seeds + MS_problems - MS_rest) / (S P)

with Satterthwaite's degrees of freedom, v^2 / (MS_seeds^2/(S-1) + MS_problems^2/(P-1) +
MS_rest^2/((S-1)(P-1))), where v is the sum in the numerator, at least the larger of the first two.
A mean of proportions has Wilson's interval, with the trials that explain this variance; a
difference has Student's. tests/sample_intervals/test_two_way.py measures their coverage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .means import (
    Interval,
    difference_interval,
    mean_interval,
    proportions_interval,
    student_interval,
    student_quantile,
)

Table: TypeAlias = Sequence[Sequence[float]] | NDArray[np.float64]  # [seeds, problems]
ROUNDING = 1.0e-12  # equal numbers have variances below it


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float | None  # the lower end; None if nothing bounds the mean
    high: float | None
    seeds: int
    problems: int


def two_way_mean(values: Table, *, proportions: bool = True) -> Estimate:
    """Estimate the mean accuracy over seeds and problems; with one seed its interval is over
    problems alone.

    `values` [S, P] are the accuracies of each seed's policy on each problem; `proportions`: each is
    from 0 to 1.
    """
    table = _table(values)
    mean = float(table.mean())
    variance, freedom = variance_of_mean(table)
    if len(table) < 2 or not variance > ROUNDING:
        interval = mean_interval(table.mean(axis=0).tolist(), proportions=proportions)
    elif proportions and 0 < mean < 1:
        trials = mean * (1 - mean) / variance
        interval = proportions_interval(mean, trials, student_quantile(freedom), table.shape[1])
    else:
        interval = student_interval(mean, variance, freedom)
    return _estimate(mean, interval, table)


def two_way_difference(first: Table, second: Table, *, proportions: bool = True) -> Estimate:
    """Estimate the mean difference, second - first, of two sets of runs that are paired by seed and
    problem.

    Both tables [S, P] have the same order of seeds and problems; `proportions`: each accuracy is
    from 0 to 1.
    """
    table = _table(second) - _table(first)
    mean = float(table.mean())
    variance, freedom = variance_of_mean(table)
    if len(table) < 2 or not variance > ROUNDING:
        interval = difference_interval(table.mean(axis=0).tolist(), proportions=proportions)
    else:
        low, high = student_interval(mean, variance, freedom)
        interval = (max(-1.0, low), min(1.0, high)) if proportions else (low, high)
    return _estimate(mean, interval, table)


def mean_over_seeds(values: Sequence[float]) -> dict[str, float | None]:
    """Average one number per seed, with Student's interval over seeds; None for one seed, or equal
    numbers.
    """
    low, high = (mean_interval(values, proportions=False) if len(values) > 1 else None) or (
        None,
        None,
    )
    return {"mean": float(np.mean(values)) if len(values) else None, "low": low, "high": high}


def variance_of_mean(table: NDArray[np.float64]) -> tuple[float, float]:
    """Estimate the variance of the mean of a table of crossed factors, with its degrees of freedom.

    With more factors than two, such as base models, seeds and problems, the mean squares of an even
    number of factors are subtracted and those of an odd number added.
    """
    if min(table.shape) < 2:
        return 0.0, 0.0
    total = 0.0
    spread = 0.0
    largest = 0.0
    for axes in product((False, True), repeat=table.ndim):
        if not any(axes):
            continue
        effect = table
        for axis, is_kept in enumerate(axes):
            mean = effect.mean(axis=axis, keepdims=True)
            effect = effect - mean if is_kept else mean
        freedom = prod(size - 1 for size, is_kept in zip(table.shape, axes, strict=True) if is_kept)
        square = table.size / effect.size * float((effect**2).sum()) / freedom
        total += square if sum(axes) % 2 else -square
        spread += square**2 / freedom
        largest = max(largest, square) if sum(axes) == 1 else largest
    total = max(total, largest)
    return total / table.size, total**2 / spread if spread > 0 else 0.0


def _estimate(mean: float, interval: Interval | None, table: NDArray[np.float64]) -> Estimate:
    return Estimate(mean, *(interval or (None, None)), *table.shape)


def _table(values: Table) -> NDArray[np.float64]:
    table = np.asarray(values, np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(
            "expected a table [seeds, problems] with at least one number, got the shape"
            f" {table.shape}"
        )
    return table
