"""Effects of the testbed with intervals, one contrast for each curve, and verdicts; `python -m evidence.testbed.analysis`.

An arm of an experiment states before its runs:

    measure: {rows: [token, sequence], until: {above: 0.5}, as: ratio}    the effect of a pair of runs
    predicted: [1.0, 1.32, ...]        its value at each level, by evidence.testbed.tabular and the entry `tabular`
    factor, tolerance                  how far a level may be from it: predicted / factor - tolerance .. * factor + tolerance
    no_effect: X                       the bound of the verdict that there is no larger effect
    delivered: {row: off, curve: NAME, of: first, above: X, levels: [...]}  the technique had something to act on

Effects are paired by seed and base model, which are crossed. The contrast weighs the levels by their predicted values:
it is 1 if the curve is as predicted and 0 if the technique does nothing. Ratios are averaged as logarithms.

    not delivered              the metric of `delivered` misses its bound
    as predicted               the contrast is above 0, p < 5 % by Holm over the experiments, and the interval of every
                               level holds a value that its prediction allows
    predicted direction        the contrast is above 0, and the size of some level is not
    other direction            the contrast is below 0
    no effect beyond X         the intervals of all levels lie within X of 0
    open                       none of these
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.evaluation.intervals import student_p_value, student_quantile
from dapo.evaluation.two_way import ROUNDING, variance_of_mean
from evidence.claims import adjust
from evidence.testbed.plan import NAMES, load, of_level
from evidence.testbed.runs import SHARE, TOKENS, stored_runs
from evidence.testbed.tabular import Choice, crossing, simulate

LEVEL = 0.05
PILOT_SEEDS = 100
"""Seeds from here on chose the settings, and are no results."""
Table = NDArray[np.float64]  # [base models, seeds]


@dataclass(frozen=True)
class Interval:
    """A mean over base models and seeds, with its 95 % interval and the p-value of 0."""

    mean: float
    low: float
    high: float
    p: float
    runs: int

    @classmethod
    def of(cls, table: Table) -> "Interval":
        """Base models and seeds are two crossed samples."""
        mean, (variance, freedom) = float(table.mean()), variance_of_mean(table)
        if variance <= ROUNDING:
            return cls(mean, mean, mean, 1.0 if abs(mean) < ROUNDING else 0.0, table.size)
        half = student_quantile(freedom) * math.sqrt(variance)
        return cls(mean, mean - half, mean + half, student_p_value(mean / math.sqrt(variance), freedom), table.size)


@dataclass(frozen=True)
class Arm:
    """The measured curve of an arm."""

    experiment: str
    name: str
    facts: Mapping[str, Any]
    tables: Mapping[str, Table]
    """The effect of each pair of runs, by level."""
    delivery: Mapping[str, float]
    """The number of `delivered`, by level."""

    @property
    def is_ratio(self) -> bool:
        return bool(self.facts["measure"].get("as") == "ratio")

    @cached_property
    def predicted(self) -> Table:
        values = np.array(self.facts["predicted"], float)
        return np.log(values) if self.is_ratio else values

    @cached_property
    def effects(self) -> dict[str, Interval]:
        return {level: Interval.of(table) for level, table in self.tables.items()}

    @cached_property
    def contrast(self) -> Interval:
        """The slope of the effects over the predicted values: 1 if the curve is as predicted."""
        weights = self.predicted - self.predicted.mean()
        weights /= float((weights * self.predicted).sum())
        return Interval.of(np.tensordot(weights, np.stack(list(self.tables.values())), axes=1))

    @property
    def is_delivered(self) -> bool:
        wanted = self.facts["delivered"]
        return all(self.delivery[level] > wanted["above"] for level in wanted["levels"])

    def allowed(self, index: int) -> tuple[float, float]:
        """The smallest and largest value that the prediction of a level allows."""
        value, factor = float(self.predicted[index]), float(self.facts["factor"])
        ends = sorted((value / factor, value * factor))
        return ends[0] - self.tolerance, ends[1] + self.tolerance

    @property
    def tolerance(self) -> float:
        return self._scaled(float(self.facts["tolerance"]))

    def _scaled(self, number: float) -> float:
        return math.log(1 + number) if self.is_ratio else number

    def agrees(self, index: int, level: str) -> bool:
        """Whether the interval of a level holds an allowed value."""
        (low, high), effect = self.allowed(index), self.effects[level]
        return effect.low <= high and effect.high >= low

    def verdict(self, holm: float) -> str:
        """The verdict, given the p-value of the contrast by Holm's correction."""
        if not self.is_delivered:
            return "not delivered"
        if holm < LEVEL:
            if self.contrast.mean < 0:
                return "other direction"
            holds = all(self.agrees(index, level) for index, level in enumerate(self.effects))
            return "as predicted" if holds else "predicted direction"
        limit = self._scaled(float(self.facts["no_effect"]))
        if all(-limit <= each.low and each.high <= limit for each in self.effects.values()):
            return f"no effect beyond {self.facts['no_effect']:g}"
        return "open"


# --- measuring


def read_arm(name: str, arm: str, runs: Sequence[Mapping[str, Any]] | None = None) -> Arm | None:
    """Measure an arm in the stored runs; None if a cell lacks two base models and two seeds that all cells have."""
    facts = load(name)["arms"][arm]
    stored = stored_runs(name) if runs is None else runs
    found = {
        (run["level"], run["row"], run["base"], run["seed"]): run["curves"]
        for run in stored
        if run["arm"] == arm and run["seed"] < PILOT_SEEDS
    }
    levels, rows = [level["name"] for level in facts["levels"]], facts["measure"]["rows"]
    bases, seeds = _crossed(found, levels, rows)
    if min(len(bases), len(seeds)) < 2:
        return None
    tables = {
        level: np.array([[effect_of(facts, [found[level, row, base, seed] for row in rows]) for seed in seeds] for base in bases])
        for level in levels
    }
    wanted = facts["delivered"]
    delivery = {
        level: float(np.mean([delivery_of(wanted, found[level, wanted["row"], base, seed]) for base in bases for seed in seeds]))
        for level in levels
    }
    return Arm(name, arm, facts, tables, delivery)


def _crossed(found: Mapping[Any, Any], levels: Sequence[str], rows: Sequence[str]) -> tuple[list[int], list[int]]:
    """The base models and the first seeds that have all runs."""
    bases = sorted({base for _, _, base, _ in found})
    seeds = sorted({seed for _, _, _, seed in found})
    whole = [
        seed for seed in seeds if all((level, row, base, seed) in found for level in levels for row in rows for base in bases)
    ]
    return bases, whole


def effect_of(facts: Mapping[str, Any], pair: Sequence[Mapping[str, Sequence[float | None]]]) -> float:
    """The effect in a pair of runs: the first row less the second, or the logarithm of their ratio."""
    measure = facts["measure"]
    first, second = (number_of(measure, curves) for curves in pair)
    return math.log(first / second) if measure.get("as") == "ratio" else first - second


def number_of(measure: Mapping[str, Any], curves: Mapping[str, Sequence[float | None]]) -> float:
    """The number of a run: the steps or tokens until the share passes a bound, or a curve's mean in a window."""
    values = _without_gaps(curves[measure.get("curve", SHARE)])
    if "window" in measure:
        first, last = measure["window"]
        return float(values[first - 1 : last].mean())
    falling = "below" in measure["until"]
    bound = measure["until"]["below" if falling else "above"]
    step = float(crossing(values[:, None], bound, falling=falling)[0])
    if measure.get("at") != TOKENS:
        return step
    spent = np.cumsum([float(each or 0) for each in curves[TOKENS]])
    return float(np.interp(step, np.arange(1, len(spent) + 1), spent))


def _without_gaps(curve: Sequence[float | None]) -> Table:
    """The values of a curve; a step without one, such as without a prompt of a source, lies between its neighbours."""
    known = [step for step, value in enumerate(curve) if value is not None]
    return np.interp(range(len(curve)), known, [curve[step] for step in known])


def delivery_of(wanted: Mapping[str, Any], curves: Mapping[str, Sequence[float | None]]) -> float:
    """The number that shows that a technique acted: of the first step, the largest of all or their mean."""
    values = [value for value in curves[wanted["curve"]] if value is not None]
    number = {"first": values[0], "largest": max(values), "mean": float(np.mean(values))}[wanted["of"]]
    return number / float(curves[wanted["over"]][0] or 1) if "over" in wanted else number


# --- predicting


def predict(facts: Mapping[str, Any], *, seeds: int = 96) -> list[float]:
    """The predicted effect at each level, by the tabular simulation."""
    wanted, measure, found = facts["tabular"], facts["measure"], []
    for level in facts["levels"]:
        numbers = []
        for row in measure["rows"]:
            choice = Choice(**{**wanted["choice"], **level.get("tabular", {}), **wanted["rows"][row]})
            shares = simulate(choice, steps=wanted["steps"], seeds=seeds)
            if "window" in measure:
                first, last = measure["window"]
                numbers.append(float(shares[first - 1 : last].mean()))
            else:
                falling = "below" in measure["until"]
                bound = measure["until"]["below" if falling else "above"]
                numbers.append(float(crossing(shares, bound, falling=falling).mean()))
        found.append(numbers[0] / numbers[1] if measure.get("as") == "ratio" else numbers[0] - numbers[1])
    return found


# --- the report


def report(arms: Sequence[Arm]) -> str:
    """A table for each arm, and a line with its contrast and verdict."""
    primary = {f"{arm.experiment}/{arm.name}": arm.contrast.p for arm in arms if arm.facts.get("primary")}
    holm, lines = adjust(primary), []
    for arm in arms:
        key = f"{arm.experiment}/{arm.name}"
        lines += [f"### {load(arm.experiment)['title']}: {arm.name}", "", *_table(arm), ""]
        low, high = arm.contrast.low, arm.contrast.high
        corrected = holm.get(key, arm.contrast.p)
        lines += [
            f"Contrast {arm.contrast.mean:.2f} ({low:.2f} to {high:.2f}), p = {arm.contrast.p:.2g}"
            f"{f', by Holm {corrected:.2g}' if key in holm else ''}, {arm.contrast.runs} pairs: **{arm.verdict(corrected)}**.",
            "",
        ]
    return "\n".join(lines)


def _table(arm: Arm) -> list[str]:
    lines = [f"| {arm.facts['condition']} | effect | predicted | {arm.facts['delivered']['curve']} |", "|---|---|---|---|"]
    for index, (level, effect) in enumerate(arm.effects.items()):
        mark = "" if arm.agrees(index, level) else " (misses)"
        shown = [math.exp(each) if arm.is_ratio else each for each in (effect.mean, effect.low, effect.high)]
        style = ".2f" if arm.is_ratio else "+.3f"
        interval = f"{shown[0]:{style}} ({shown[1]:{style}} to {shown[2]:{style}})"
        predicted = f"{arm.facts['predicted'][index]:{style}}{mark}"
        lines.append(f"| {of_level(arm.facts, level)['at']} | {interval} | {predicted} | {arm.delivery[level]:.3g} |")
    return lines


def main() -> None:
    """Print the report of the stored runs, or the predictions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", action="store_true", help="print the predictions of the files instead")
    given = parser.parse_args()
    every = [(name, arm) for name in NAMES for arm in load(name)["arms"]]
    if given.predict:
        for name, arm in every:
            print(name, arm, json.dumps([round(value, 2) for value in predict(load(name)["arms"][arm])]))
        return
    print(report([found for name, arm in every if (found := read_arm(name, arm)) is not None]))


if __name__ == "__main__":
    main()
