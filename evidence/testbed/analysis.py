"""Effects of the testbed, a contrast for each curve, and verdicts: `python -m
evidence.testbed.analysis`.

An arm of an experiment states before its runs:

    measure: {rows: [on, off], until: {above: 0.5}, as: ratio}    the effect in a pair of runs
    also: {TEXT: {...}, ...}           further measures, without a verdict
    tabular: {...}                     the task and the rows of the simulation that predicts
    predicted: [1.0, 1.32, ...]        its value at each level, by evidence.testbed.tabular
    factor, tolerance               a level may be at predicted / factor - tolerance to predicted * factor + tolerance
    no_effect: X                       the bound of the verdict that there is no larger effect
    delivered: {row: off, curve: NAME, of: first, above: X, levels: [...]}    there was something to act on; `part: X`
                                       instead of `above` asks for this part of the level's condition
    shown: {TEXT: {row: off, curve: NAME, of: largest}}    a column of means over the runs that have the curve
    primary: true                      Holm's correction covers the primary arms of all experiments
    analyses: 2                        how often the contrast was tested while runs were added: p-values are times that

Effects are paired by seed and base model, which are crossed. The contrast weighs levels by their
predicted values: it is 1 for the predicted curve, and 0 if the technique does nothing. Ratios are
averaged as logarithms.

    not delivered          the metric of `delivered` misses its bound
    as predicted within a factor of F
                           the contrast is above 0, p < 5 % by both corrections, and the interval of every level
                           holds a value that its prediction allows; F is a factor of the logarithm of a ratio
    predicted direction    the contrast is above 0, and the size of some level is not as predicted
    other direction        the contrast is below 0
    no effect beyond X     the intervals of all levels lie within X of 0
    open                   none of these, or runs are missing, or more than a tenth of a cell's runs did not reach the
                           bound of `until` (they count with their last step)

"but smaller" is added where the interval of the contrast is below 1, "but larger" where it is
above.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dapo.libs.sample_intervals import ROUNDING, student_p_value, student_quantile, variance_of_mean
from evidence.claims import adjust
from evidence.testbed.plan import NAMES, load, of_level
from evidence.testbed.runs import SHARE, TOKENS, stored_runs
from evidence.testbed.tabular import Choice, crossing, simulate

LEVEL = 0.05
MAX_UNREACHED = 0.1
"""The share of a cell's runs that may end before they reach the bound."""
PILOT_SEEDS = 100
"""Seeds from here on chose the settings, and are no results."""
Table: TypeAlias = NDArray[np.float64]  # [base models, seeds]
Curves: TypeAlias = Mapping[str, Sequence[float | None]]
"""The values of a run by step."""


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
        """Base models and seeds are two crossed samples; with one seed the interval is over base
        models alone.
        """
        mean = float(table.mean())
        variance, freedom = variance_of_mean(table)
        if table.shape[1] == 1:
            variance = float(table.var(ddof=1)) / len(table)
            freedom = len(table) - 1.0
        if variance <= ROUNDING:
            return cls(mean, mean, mean, 1.0 if abs(mean) < ROUNDING else 0.0, table.size)
        half = student_quantile(freedom) * math.sqrt(variance)
        return cls(
            mean,
            mean - half,
            mean + half,
            student_p_value(mean / math.sqrt(variance), freedom),
            table.size,
        )


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
    also: Mapping[str, Mapping[str, Table]] = field(default_factory=dict)
    """The further measures, by their texts and by level."""
    shown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The means of `shown`, by their texts and by level."""
    unreached: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The number of runs that did not reach the bound, by level and row; only those that are not
    zero.
    """
    lost: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The number of runs that end without any strategy's first letter, likewise."""
    is_complete: bool = True
    """Whether all runs of the file are stored; no verdict is given before."""

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
        """The slope of the effects over the predicted values: 1 if the curve is as predicted.

        Where the same effect is predicted at every level, it is the mean effect.
        """
        weights = self.predicted - self.predicted.mean()
        scale = float((weights * self.predicted).sum())
        weights = weights / scale if scale else np.full(len(weights), 1 / len(weights))
        return Interval.of(np.tensordot(weights, np.stack(list(self.tables.values())), axes=1))

    @property
    def is_delivered(self) -> bool:
        wanted = self.facts["delivered"]
        return all(
            self.delivery[level]
            > wanted.get("above", wanted.get("part", 0.0) * of_level(self.facts, level)["at"])
            for level in wanted["levels"]
        )

    def allowed(self, index: int) -> tuple[float, float]:
        """The smallest and largest value that the prediction of a level allows."""
        value = float(self.predicted[index])
        factor = float(self.facts["factor"])
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

    @property
    def p(self) -> float:
        """The p-value of the contrast, corrected for the number of its analyses."""
        return min(1.0, self.contrast.p * int(self.facts.get("analyses", 1)))

    @property
    def is_reached(self) -> bool:
        """Whether nearly all runs reached the bound of the measure."""
        return all(count <= MAX_UNREACHED * self.contrast.runs for count in self.unreached.values())

    def verdict(self, corrected: float) -> str:
        """The verdict, given the corrected p-value of the contrast."""
        if not self.is_delivered:
            return "not delivered"
        if not self.is_complete or not self.is_reached:
            return "open"
        if corrected < LEVEL:
            if self.contrast.mean < 0:
                return "other direction"
            holds = all(self.agrees(index, level) for index, level in enumerate(self.effects))
            found = (
                f"as predicted within a factor of {self.facts['factor']:g}"
                if holds
                else "predicted direction"
            )
            if self.contrast.high < 1:
                return f"{found}, but smaller"
            if self.contrast.low > 1:
                return f"{found}, but larger"
            return found
        limit = self._scaled(float(self.facts["no_effect"]))
        if all(-limit <= each.low and each.high <= limit for each in self.effects.values()):
            return f"no effect beyond {self.facts['no_effect']:g}"
        return "open"


# --- measuring


def read_arm(name: str, arm: str, runs: Sequence[Mapping[str, Any]] | None = None) -> Arm | None:
    """Measure an arm in the stored runs; None without two base models and a seed of which every
    cell has a run.

    Runs of other seeds and base models than the file's do not count.
    """
    experiment = load(name)
    facts = load(name)["arms"][arm]
    planned = [facts.get(each, experiment[each]) for each in ("base_models", "seeds")]
    every = [run for run in (stored_runs(name) if runs is None else runs) if run["arm"] == arm]
    found = {
        (run["level"], run["row"], run["base"], run["seed"]): run["curves"]
        for run in every
        if run["base"] in planned[0] and run["seed"] in planned[1]
    }
    levels = [level["name"] for level in facts["levels"]]
    rows = facts["measure"]["rows"]
    bases, seeds = _two_way(found, levels, rows)
    if len(bases) < 2 or not seeds:
        return None

    def tables(measure: Mapping[str, Any]) -> dict[str, Table]:
        def effect(level: str, base: int, seed: int) -> float:
            return effect_of(measure, [found[level, row, base, seed] for row in measure["rows"]])

        having = [
            level
            for level in levels
            if measure.get("curve", SHARE) in found[level, rows[0], bases[0], seeds[0]]
        ]
        return {
            level: np.array([[effect(level, base, seed) for seed in seeds] for base in bases])
            for level in having
        }

    wanted = facts["delivered"]
    cells = [(base, seed) for base in bases for seed in seeds]
    delivery = {
        level: fmean(delivery_of(wanted, found[level, wanted["row"], *cell]) for cell in cells)
        for level in levels
    }
    shown = {
        text: {
            level: _mean_of(of, [run["curves"] for run in every if _is_of(run, level, of)])
            for level in levels
        }
        for text, of in facts.get("shown", {}).items()
    }
    runs_of = {
        (level, row): [found[level, row, *cell] for cell in cells]
        for level in levels
        for row in rows
    }
    unreached = {
        cell: sum(not reaches(facts["measure"], curves) for curves in each)
        for cell, each in runs_of.items()
    }
    lost = {
        cell: sum(curves[SHARE][-1] is None for curves in each) for cell, each in runs_of.items()
    }
    return Arm(
        name,
        arm,
        facts,
        tables(facts["measure"]),
        delivery,
        {text: tables(measure) for text, measure in facts.get("also", {}).items()},
        shown,
        {cell: count for cell, count in unreached.items() if count},
        {cell: count for cell, count in lost.items() if count},
        is_complete=len(cells) == len(planned[0]) * len(planned[1]),
    )


def _is_of(run: Mapping[str, Any], level: str, wanted: Mapping[str, Any]) -> bool:
    return bool(
        run["level"] == level and run["row"] == wanted["row"] and wanted["curve"] in run["curves"]
    )


def _mean_of(wanted: Mapping[str, Any], runs: Sequence[Curves]) -> float:
    return fmean(delivery_of(wanted, curves) for curves in runs) if runs else math.nan


def _two_way(
    found: Mapping[Any, Any], levels: Sequence[str], rows: Sequence[str]
) -> tuple[list[int], list[int]]:
    """The base models and the first seeds that have all runs."""
    bases = sorted({base for _, _, base, _ in found})
    seeds = sorted({seed for _, _, _, seed in found})
    whole = [
        seed
        for seed in seeds
        if all(
            (level, row, base, seed) in found for level in levels for row in rows for base in bases
        )
    ]
    return bases, whole


def effect_of(measure: Mapping[str, Any], pair: Sequence[Curves]) -> float:
    """The effect in a pair of runs: the first row less the second, or the logarithm of their
    ratio.
    """
    first, second = (number_of(measure, curves) for curves in pair)
    return math.log(first / second) if measure.get("as") == "ratio" else first - second


def number_of(measure: Mapping[str, Any], curves: Curves) -> float:
    """The number of a run: the steps or tokens until the share passes a bound, or a curve's mean in
    a window.
    """
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


def reaches(measure: Mapping[str, Any], curves: Curves) -> bool:
    """Whether a run reaches the bound of a measure; True where the measure has none."""
    until = measure.get("until", {})
    values = _without_gaps(curves[measure.get("curve", SHARE)])
    return bool(
        values.max() >= until.get("above", -math.inf)
        and values.min() <= until.get("below", math.inf)
    )


def _without_gaps(curve: Sequence[float | None]) -> Table:
    """The values of a curve; a step without one, such as without a prompt of a source, lies between
    its neighbours.
    """
    known = {step: value for step, value in enumerate(curve) if value is not None}
    return np.interp(range(len(curve)), list(known), list(known.values()))


def delivery_of(wanted: Mapping[str, Any], curves: Curves) -> float:
    """The number that shows that a technique acted: of the first step, the largest of all or their
    mean.
    """
    values = [value for value in curves[wanted["curve"]] if value is not None]
    number = {"first": values[0], "largest": max(values), "mean": fmean(values)}[wanted["of"]]
    return number / float(curves[wanted["over"]][0] or 1) if "over" in wanted else number


# --- predicting


def predict(facts: Mapping[str, Any], *, seeds: int = 96) -> list[float]:
    """The predicted effect at each level, by the tabular simulation."""
    wanted = facts["tabular"]
    measure = facts["measure"]
    found = []
    for level in facts["levels"]:
        numbers = []
        for row in measure["rows"]:
            here = level.get("rows", {}).get(row, {}).get("tabular", {})
            choice = Choice(
                **{**wanted["choice"], **level.get("tabular", {}), **wanted["rows"][row], **here}
            )
            shares = simulate(choice, steps=wanted["steps"], seeds=wanted.get("seeds", seeds))
            numbers.append(
                fmean(
                    number_of({**measure, "curve": SHARE}, {SHARE: each.tolist()})
                    for each in shares.T
                )
            )
        found.append(
            numbers[0] / numbers[1] if measure.get("as") == "ratio" else numbers[0] - numbers[1]
        )
    return found


# --- the report


def report(arms: Sequence[Arm]) -> str:
    """A table for each arm, and a line with its contrast and verdict.

    Holm's correction counts every primary arm of the files; one without runs has the p-value 1.
    """
    primary = {
        (name, arm): 1.0
        for name in NAMES
        for arm, facts in load(name)["arms"].items()
        if facts.get("primary")
    }
    found = {(arm.experiment, arm.name): arm.p for arm in arms}
    holm = adjust({"/".join(key): found.get(key, p) for key, p in primary.items()})
    lines = []
    for arm in arms:
        key = f"{arm.experiment}/{arm.name}"
        slope = arm.contrast
        corrected = holm.get(key, arm.p)
        lines += [
            f"### {arm.facts.get('title', load(arm.experiment)['title'])} ({arm.name})",
            "",
            *_table(arm),
            "",
        ]
        repeated = [f"{arm.facts['analyses']} analyses"] if "analyses" in arm.facts else []
        by = " and ".join([*repeated, *(["Holm's method"] if key in holm else [])])
        p = f"p {_p_value(slope.p)}" + (f", {_p_value(corrected)} corrected for {by}" if by else "")
        verdict = arm.verdict(corrected) if arm.is_complete else "runs are missing, no verdict"
        lines += [
            f"Contrast {_shown(slope, '.2f')}; {p}; {slope.runs} pairs of runs."
            f" **{verdict.capitalize()}**."
        ]
        lines += [
            *_counted(arm, arm.unreached, "did not reach the bound, and count with their last step")
        ]
        lines += [*_counted(arm, arm.lost, "ended without the first letter of any strategy"), ""]
    return "\n".join(lines).rstrip()


def condition_of(facts: Mapping[str, Any], level: str) -> str:
    """The condition at a level, as it is printed: .25, 16 or 4e-5."""
    value = float(of_level(facts, level)["at"])
    return f"{value:.0e}".replace("e-0", "e-") if 0 < value < 1e-3 else f"{value:g}"


def _counted(arm: Arm, counts: Mapping[tuple[str, str], int], text: str) -> list[str]:
    """A sentence with the numbers of runs by level and row, if there are any."""
    if not counts:
        return []
    cells = [
        f"{n} of `{row}` at {condition_of(arm.facts, level)}" for (level, row), n in counts.items()
    ]
    return [f"Of {arm.contrast.runs} runs each, {', '.join(cells)} {text}."]


def _p_value(p: float) -> str:
    return "below .001" if p < 0.001 else f"{min(p, 1.0):.3f}".removeprefix("0")


def _shown(found: Interval, style: str, *, is_ratio: bool = False) -> str:
    mean, low, high = (
        math.exp(each) if is_ratio else each for each in (found.mean, found.low, found.high)
    )
    return f"{mean:{style}} ({low:{style}} to {high:{style}})"


def _table(arm: Arm) -> list[str]:
    """A line for each level: the effect, its prediction, the delivery check and further
    measures.
    """
    measures = arm.facts.get("also", {})
    checked = arm.facts["delivered"]
    names = [
        arm.facts["condition"],
        arm.facts["effect"],
        "predicted",
        checked.get("text", f"`{checked['curve']}`"),
    ]
    names += arm.shown
    lines = [f"| {' | '.join([*names, *measures])} |", "|---" * (len(names) + len(measures)) + "|"]
    for index, (level, effect) in enumerate(arm.effects.items()):
        style = ".2f" if arm.is_ratio else "+.2f"
        mark = "" if arm.agrees(index, level) else " (missed)"
        cells = [f"{condition_of(arm.facts, level)}", _shown(effect, style, is_ratio=arm.is_ratio)]
        cells += [f"{arm.facts['predicted'][index]:{style}}{mark}", f"{arm.delivery[level]:.2g}"]
        cells += [f"{values[level]:.2g}" for values in arm.shown.values()]
        for text, measure in measures.items():
            is_ratio = measure.get("as") == "ratio"
            table = arm.also[text].get(level)
            style = ".2f" if is_ratio else "+.2f"
            cells += ["" if table is None else _shown(Interval.of(table), style, is_ratio=is_ratio)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def stored_arms() -> list[Arm]:
    """The arms with enough stored runs."""
    every = [
        (name, arm)
        for name in NAMES
        for arm, facts in load(name)["arms"].items()
        if "measure" in facts
    ]
    return [found for name, arm in every if (found := read_arm(name, arm)) is not None]


def main() -> None:
    """Print the report of the stored runs, or the predictions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--predict", action="store_true", help="print the predictions of the files instead"
    )
    parser.add_argument(
        "--rates", action="store_true", help="print the steps at each rate of the pilots instead"
    )
    given = parser.parse_args()
    every = [(name, arm) for name in NAMES for arm in load(name)["arms"]]
    for name, arm in every:
        facts = load(name)["arms"][arm]
        if given.predict and "tabular" in facts:
            print(name, arm, json.dumps([round(value, 2) for value in predict(facts)]))
        if given.rates and "chosen_by" in facts:
            for (level, row), steps in sorted(steps_of_pilots(name, arm).items()):
                print(f"{name}, {arm}, {level}, {row}: {steps:.1f} steps")
    if not (given.predict or given.rates):
        print(report(stored_arms()))


def steps_of_pilots(name: str, arm: str) -> dict[tuple[str, str], float]:
    """The mean steps until the bound of `chosen_by` in the pilots of an arm, by level and row."""
    wanted = load(name)["arms"][arm]["chosen_by"]
    found = dict[tuple[str, str], list[float]]()
    for run in stored_runs(name):
        if run["arm"] == arm:
            found.setdefault((run["level"], run["row"]), []).append(
                number_of(wanted, run["curves"])
            )
    return {cell: fmean(numbers) for cell, numbers in found.items()}


if __name__ == "__main__":
    main()
