"""Branches of one run: how much of their differences is chance, and what a change does beyond it.

Runs that were forked at the same step with the same options, but other seeds, are a group of branches (`dapo fork
--times`). Between two groups, branches of the same number share all draws, and are paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dapo.analysis.compare import as_json, final_evaluation
from dapo.evaluation.intervals import mean_interval
from dapo.evaluation.pairing import paired
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork


@dataclass(frozen=True)
class Branches:
    """The branches of one fork."""

    parent: str
    step: int
    options: Mapping[str, Any]
    """What was changed in all of them, besides the seed."""
    runs: Sequence[str]
    accuracy: Sequence[float]
    """Held-out accuracy of each run after its last evaluation."""
    mean: float
    deviation: float
    """Standard deviation between branches: what another seed changes."""
    low: float | None
    """Of the 95 % interval of the mean."""
    high: float | None
    change: Mapping[str, Any] | None
    """The difference to the first group, a `Paired` over the branches of the same number; None without two of them."""


@dataclass(frozen=True)
class Branch:
    """One branch with its accuracy."""

    path: str
    fork: Fork
    accuracy: float

    @property
    def options(self) -> dict[str, Any]:
        """The options that were changed, without the seed, which every branch has of its own."""
        return {name: new for name, (_, new) in self.fork.changed.items() if name != "train.seed"}


def find_branches(paths: Sequence[str | Path]) -> list[Branches]:
    """The groups of at least two evaluated branches among some runs, in the order in which they are given."""
    found = []
    for path in paths:
        run = RunDirectory.open(path)
        fork, last = Fork.of(run), final_evaluation(run)
        if fork is not None and fork.branch is not None and last is not None:
            found.append(Branch(str(path), fork, last[1]["accuracy"]))
    return group_branches(found)


def group_branches(branches: Sequence[Branch]) -> list[Branches]:
    """The groups of at least two branches of one parent and step with the same options."""
    groups: dict[tuple[str, int, str], list[Branch]] = {}
    for each in branches:
        groups.setdefault((each.fork.parent, each.fork.step, repr(sorted(each.options.items()))), []).append(each)
    found: list[Branches] = []
    first: dict[int | None, float] = {}
    for (parent, step, _), members in groups.items():
        if len(members) < 2:
            continue
        by_number = {each.fork.branch: each.accuracy for each in members}
        found.append(_summarize(parent, step, members, _change(first, by_number)))
        first = first or by_number
    return found


def _change(first: Mapping[int | None, float], group: Mapping[int | None, float]) -> dict[str, Any] | None:
    both = [number for number in first if number in group]
    return as_json(paired([first[i] for i in both], [group[i] for i in both])) if len(both) > 1 else None


def _summarize(parent: str, step: int, members: Sequence[Branch], change: dict[str, Any] | None) -> Branches:
    values = [each.accuracy for each in members]
    low, high = mean_interval(values, proportions=False) or (None, None)
    return Branches(
        parent,
        step,
        members[0].options,
        [each.path for each in members],
        values,
        mean=fmean(values),
        deviation=stdev(values),
        low=low,
        high=high,
        change=change,
    )
