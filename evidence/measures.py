"""Numbers of stored runs: a metric in a window, the step at which it passes a bound, differences,
with intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dapo.analysis.ablate.experiment import ACCURACY
from dapo.analysis.ablate.results import Results, read_results, steps_at_the_end
from dapo.analysis.ablate.table import judged_everywhere
from dapo.libs.sample_intervals import (
    ROUNDING,
    mean_over_seeds,
    student_p_value,
    student_quantile,
    two_way_difference,
    two_way_mean,
    variance_of_mean,
)

FOLDER = Path(__file__).parent
STORED = FOLDER / "results"
POWER = 0.8
_NORMAL = 1.959964
_NORMAL_FREEDOM = 1.0e6


@dataclass(frozen=True)
class Until:
    """The first step, or number of generated tokens, at which a metric passes a bound.

    A run that never does counts with its last position, so differences between runs are never
    overstated.
    """

    above: float | None = None
    below: float | None = None
    mean_of: int = 1
    """The number of steps whose mean has to pass the bound; with 1, tokens are interpolated between
    two values.
    """
    at: Literal["step", "tokens"] = "step"


@dataclass(frozen=True)
class Measure:
    """A number of each run: a metric of a row in a window, or its difference to another row or
    metric.
    """

    row: str
    metric: str = ACCURACY
    condition: str = ""
    over: Literal["", "conditions"] = ""
    """`conditions`: the conditions are a sample, such as several base models, and are crossed with
    the seeds.
    """
    than: str | None = None
    """The row to subtract, paired by seed."""
    than_metric: str | None = None
    """The metric to subtract, of the same run."""
    than_condition: str | None = None
    """The condition of the row to subtract, if it is another one; `than` is then the same row by
    default.
    """
    steps: Literal["last", "all"] | tuple[int, int] = "last"
    """The first and last step of the window.

    `last`: the last tenth of the steps, or the last evaluation.
    """
    change: bool = False
    """Whether the number is the change from the first tenth of the steps (the first evaluation) to
    the last.
    """
    until: Until | None = None

    @property
    def is_final_accuracy(self) -> bool:
        return (
            self.metric == ACCURACY
            and self.steps == "last"
            and not self.change
            and self.until is None
        )


@dataclass(frozen=True)
class Effect:
    """A measurement over seeds (and problems), with its 95 % interval."""

    mean: float
    low: float | None
    high: float | None
    seeds: int
    error: float | None = None
    """The standard error; None if the numbers do not vary."""
    freedom: float = _NORMAL_FREEDOM
    trials: float | None = None
    """For a proportion: the trials whose variance it has; the test against a bound then uses the
    bound's variance.
    """
    each: tuple[float, ...] = ()
    """The numbers of the seeds."""
    conditions: int = 1
    """The number of conditions, if they are a sample."""

    @property
    def detectable(self) -> float | None:
        """The effect that a single test at 5 % finds with a power of 80 %: 2.8 standard errors,
        more with few seeds.
        """
        return None if self.error is None else _errors_to_find(self.freedom) * self.error

    def p_value(self, bound: float) -> float | None:
        error = self.error if self.trials is None else sqrt(bound * (1 - bound) / self.trials)
        return student_p_value((self.mean - bound) / error, self.freedom) if error else None


@cache
def _errors_to_find(freedom: float) -> float:
    """Student's quantiles of the level and of the power, added up."""
    low = 0.0
    high = 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if student_p_value(middle, freedom) > 2 * (1 - POWER) else (low, middle)
        )
    return student_quantile(freedom) + high


def parse_measure(given: Mapping[str, Any]) -> Measure:
    """Read a measure. Raises ValueError for an unknown key."""
    if unknown := given.keys() - {field.name for field in fields(Measure)}:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r} in a claim")
    steps = given.get("steps", "last")
    until = given.get("until")
    steps = tuple(steps) if isinstance(steps, list) else steps
    return Measure(**{**given, "steps": steps, "until": Until(**until) if until else None})


@cache
def stored(name: str) -> Results:
    """The stored results of an experiment."""
    return read_results(STORED / name)


def measure(wanted: Measure, results: Results) -> Effect:
    """Measure a number in the results of an experiment.

    Raises:
        ValueError: No run has the row, the metric or an evaluation in the window.
    """
    conditions = results.conditions if wanted.over else [wanted.condition]
    find = _final_accuracy if wanted.is_final_accuracy else _number_of_runs
    return replace(find(wanted, results, conditions), conditions=len(conditions))


def _number_of_runs(wanted: Measure, results: Results, conditions: Sequence[str]) -> Effect:
    """A number of each run's curve, over (base models and) seeds."""
    tables = [_by_seed(replace(wanted, condition=name), results) for name in conditions]
    seeds = sorted(set(tables[0]).intersection(*tables[1:]))
    if not seeds:
        raise ValueError(f"no seed of the row {wanted.row} has {wanted.metric}")
    table = np.array([[found[seed] for seed in seeds] for found in tables])
    each = tuple(table.mean(axis=0).tolist())
    if wanted.over:
        variance, freedom = variance_of_mean(table)
        found = asdict(two_way_mean(table, proportions=False))
    else:
        found = mean_over_seeds(each)
        variance = float(np.var(each, ddof=1)) / len(each) if found["low"] is not None else 0.0
        freedom = len(each) - 1
    return Effect(
        found["mean"],
        found["low"],
        found["high"],
        len(seeds),
        sqrt(variance) or None,
        freedom,
        None,
        each,
    )


def _final_accuracy(wanted: Measure, results: Results, conditions: Sequence[str]) -> Effect:
    """An accuracy after the last step or a difference of two, over (base models,) seeds and
    problems.
    """
    table = np.array([_accuracies(wanted, results, condition) for condition in conditions])
    each = tuple(table.mean(axis=(0, 2)).tolist())
    variance, freedom = variance_of_mean(table if wanted.over else table[0])
    flat = table.mean(axis=0) if wanted.over else table[0]
    is_difference = wanted.than is not None or wanted.than_condition is not None
    found = two_way_difference(np.zeros_like(flat), flat) if is_difference else two_way_mean(flat)
    mean = found.mean
    low = found.low
    high = found.high
    if wanted.over and variance > ROUNDING:
        half = student_quantile(freedom) * sqrt(variance)
        low = mean - half
        high = mean + half
    if variance > ROUNDING:
        trials = None if is_difference or wanted.over else mean * (1 - mean) / variance
        return Effect(mean, low, high, len(each), sqrt(variance), freedom, trials or None, each)
    error = None if low is None or high is None else (high - low) / 2 / _NORMAL
    return Effect(
        mean,
        low,
        high,
        len(each),
        error,
        _NORMAL_FREEDOM,
        None if is_difference else flat.shape[1],
        each,
    )


def _accuracies(wanted: Measure, results: Results, condition: str) -> list[list[float]]:
    """The accuracy of each seed on each problem, or the differences to another row or condition."""
    row = wanted.row
    cells = [(condition, wanted.row)]
    if wanted.than or wanted.than_condition:
        cells.append((wanted.than_condition or condition, wanted.than or row))
    names = [each["name"] for each in results.variants]
    runs = {name: {row: results.finished(name, row) for row in names} for name, _ in cells}
    if missing := {name for _, name in cells} - set(names):
        raise ValueError(f"no row {missing.pop()} in the condition {condition!r}")
    judged = sorted(set.intersection(*(set(judged_everywhere(each)) for each in runs.values())))
    rows = [runs[name][row] for name, row in cells]
    seeds = sorted(set(rows[0]).intersection(*rows[1:]))
    if not seeds or not judged:
        raise ValueError(f"no finished run of the row {row} in the condition {condition!r}")
    first, *other = (
        [[found[seed]["accuracies"][i] for i in judged] for seed in seeds] for found in rows
    )
    return (np.array(first) - np.array(other[0])).tolist() if other else first


def _by_seed(wanted: Measure, results: Results) -> dict[int, float]:
    """The number of each seed's run, minus that of the row or metric that it is compared with."""
    found = _numbers(wanted, results)
    if wanted.than is None and wanted.than_metric is None:
        return found
    other = replace(
        wanted, row=wanted.than or wanted.row, metric=wanted.than_metric or wanted.metric
    )
    others = _numbers(other, results)
    return {seed: found[seed] - others[seed] for seed in found.keys() & others.keys()}


def _numbers(wanted: Measure, results: Results) -> dict[int, float]:
    found = {}
    for run in results.runs(wanted.condition, wanted.row):
        curve = run["curve"]
        if wanted.metric in curve:
            columns = (curve["step"], curve.get("tokens", curve["step"]), curve[wanted.metric])
            points = sorted(point for point in zip(*columns, strict=True) if point[2] is not None)
            found[run["seed"]] = _number(wanted, points)
    return found


def _number(wanted: Measure, points: Sequence[tuple[int, int, float]]) -> float:
    """A run's number, from its steps, tokens and values."""
    values = [value for _, _, value in points]
    if wanted.until is not None:
        return _crossing(wanted.until, points)
    is_evaluated = wanted.metric == ACCURACY or wanted.metric.startswith("eval/")
    count = 1 if is_evaluated else steps_at_the_end(len(values))
    if isinstance(wanted.steps, tuple):
        first, last = wanted.steps
        values = [value for step, _, value in points if first <= step <= last]
        if not values:
            raise ValueError(
                f"a run of {wanted.row} has no {wanted.metric} from step {first} to {last}"
            )
        return float(np.mean(values))
    if wanted.change:
        return float(np.mean(values[-count:]) - np.mean(values[:count]))
    return float(np.mean(values if wanted.steps == "all" else values[-count:]))


def _crossing(until: Until, points: Sequence[tuple[int, int, float]]) -> float:
    target = until.above if until.above is not None else until.below
    assert target is not None
    sign = 1 if until.above is not None else -1
    positions = [float(step if until.at == "step" else tokens) for step, tokens, _ in points]
    values = [sign * value for _, _, value in points]
    size = until.mean_of
    means = [float(np.mean(values[i - size : i])) for i in range(size, len(values) + 1)]
    ends = positions[size - 1 :]
    if means and means[0] >= sign * target:
        return ends[0]
    for (start, low), (end, high) in pairwise(zip(ends, means, strict=True)):
        if low < sign * target <= high:
            part = (sign * target - low) / (high - low) if size == 1 else 1.0
            return start + (end - start) * part
    return positions[-1]
