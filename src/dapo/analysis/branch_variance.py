"""The variance between branches of one run: how large a difference chance makes, and what a change adds to it.

Branches are runs that were forked at the same step with the same options and different seeds (`dapo fork --times`).
In two groups, branches with the same number share all random numbers, so they are paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dapo.analysis.compare import final_evaluation
from dapo.evaluation.pairing import EVALUATION_OPTIONS, paired
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork
from sample_intervals import mean_interval


@dataclass(frozen=True)
class BranchVariance:
    """The branches of one fork and their variance."""

    parent: str
    step: int
    options: Mapping[str, Any]  # the options changed in all of them, except the seed
    runs: Sequence[str]
    accuracy: Sequence[float]  # held-out accuracy of each run after its last evaluation
    mean: float
    deviation: float  # the standard deviation between branches: the effect of the seed
    low: float | None  # the lower end of the 95 % interval of the mean
    high: float | None
    change: Mapping[str, Any] | None
    """The difference to the first group, a `Paired` over branches of the same number; None without two, or if the two
    groups are evaluated otherwise."""


@dataclass(frozen=True)
class Branch:
    """One branch with its accuracy."""

    path: str
    fork: Fork
    accuracy: float

    @property
    def options(self) -> dict[str, Any]:
        """The changed options, except the seed, which differs in every branch."""
        return {name: new for name, (_, new) in self.fork.changed.items() if name != "train.seed"}


def branch_variances(paths: Sequence[str | Path]) -> list[BranchVariance]:
    """The groups of at least two evaluated branches among some runs, in the order of the runs."""
    found = []
    for path in paths:
        run = RunDirectory.open(path)
        fork, last = Fork.of(run), final_evaluation(run)
        if fork is not None and fork.branch is not None and last is not None and last["accuracy"] is not None:
            found.append(Branch(str(path), fork, last["accuracy"]))
    return group_branches(found)


def group_branches(branches: Sequence[Branch]) -> list[BranchVariance]:
    """The groups of at least two branches of one parent and step with the same options."""
    groups: dict[tuple[str, int, str], list[Branch]] = {}
    for each in branches:
        groups.setdefault((each.fork.parent, each.fork.step, repr(sorted(each.options.items()))), []).append(each)
    found: list[BranchVariance] = []
    first: dict[int | None, float] = {}
    judging_of_first: dict[str, Any] = {}
    for (parent, step, _), members in groups.items():
        if len(members) < 2:
            continue
        by_number = {each.fork.branch: each.accuracy for each in members}
        both = [number for number in first if number in by_number]
        pairs = [first[i] for i in both], [by_number[i] for i in both]
        judging = {name: value for name, value in members[0].options.items() if name.startswith(EVALUATION_OPTIONS)}
        change = paired(*pairs).as_json() if len(both) > 1 and judging == judging_of_first else None
        if not first:
            first, judging_of_first = by_number, judging
        values = [each.accuracy for each in members]
        low, high = mean_interval(values, proportions=False) or (None, None)
        facts = (parent, step, members[0].options, [each.path for each in members], values)
        found.append(BranchVariance(*facts, fmean(values), stdev(values), low, high, change))
    return found
