"""Paired comparisons: the rule for pairing evaluations, and the mean difference of pairs with its
95 % interval.

Two runs that answer the same problem with the same random numbers differ less by chance than two
independent runs. With a_i and b_i the values of pair i, the variance of the mean difference over n
pairs is

    paired      var(b_i - a_i) / n
    unpaired    (var(a_i) + var(b_i)) / n

Their ratio is the factor by which an unpaired comparison needs more problems for the same interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

import numpy as np

from dapo.core.errors import DataError
from dapo.libs.sample_intervals import difference_interval, student_interval

MUST_MATCH = (
    # older files lack them: their verifier is unknown
    "name",
    "temperature",
    "top_p",
    "max_response_tokens",
    "binary",
    "verifier",
    "verifier_options",
    "threshold",
)
"""The settings that must agree, or the difference of two evaluations is not due to the models
alone.
"""
EVALUATION_OPTIONS = ("data.eval", "eval.", "reward.verifier", "reward.options", "reward.threshold")
"""The options, or prefixes of them, that decide how held-out responses are sampled and judged."""
# the settings that give both evaluations the same random numbers
SAME_DRAWS = ("samples_per_problem", "seed")


def require_pairable(
    a: Mapping[str, Any], b: Mapping[str, Any], *, same_draws: bool = False
) -> None:
    """Raise DataError if two evaluations, with their tables, must not be paired.

    With `same_draws`, seed and samples per problem must agree as well.
    """
    for name in (*MUST_MATCH, *(SAME_DRAWS if same_draws else ())):
        if name in a and name in b and a[name] != b[name]:
            raise DataError(f"{name} is {a[name]} in one and {b[name]} in the other")
    ids_a, ids_b = ({row["id"] for row in evaluation["table"]} for evaluation in (a, b))
    if alone := ids_a ^ ids_b:
        raise DataError(f"{len(alone)} problems are only in one of them")


def paired_accuracies(
    a: Mapping[str, Any], b: Mapping[str, Any], *, same_draws: bool = False
) -> dict[str, tuple[float | None, float | None]]:
    """Pair the accuracies of two evaluations by problem, in the order of a; None without a verdict.

    With equal seeds the i-th responses to a problem share their random numbers, so that only
    samples that both evaluations have count; with different seeds all do. Raises the DataError of
    `require_pairable`.
    """
    require_pairable(a, b, same_draws=same_draws)
    counts = [evaluation["samples_per_problem"] for evaluation in (a, b)]
    shared = min(counts) if a.get("seed") == b.get("seed") and len(set(counts)) > 1 else None

    def accuracy(row: Mapping[str, Any]) -> float | None:
        if shared is None:
            value: float | None = row["accuracy"]
            return value
        judged = [response for response in row["responses"][:shared] if response["error"] is None]
        values = [
            float(response["score"] if response["correct"] is None else response["correct"])
            for response in judged
        ]
        return fsum(values) / len(values) if values else None

    rows_of_b = {row["id"]: row for row in b["table"]}
    return {row["id"]: (accuracy(row), accuracy(rows_of_b[row["id"]])) for row in a["table"]}


def paired_difference(
    a: Mapping[str, Any], b: Mapping[str, Any], *, same_draws: bool = False
) -> dict[str, Any]:
    """Compute the difference (b minus a) of two evaluations, paired by `paired_accuracies`.

    It is a `Paired` as JSON values, with the numbers of problems with a verdict in both
    evaluations, and of those on which b is better, worse and equal.
    """
    values = paired_accuracies(a, b, same_draws=same_draws).values()
    judged = [(x, y) for x, y in values if x is not None and y is not None]
    difference = paired(
        [x for x, _ in judged], [y for _, y in judged], proportions=bool(a["binary"])
    )
    better = sum(x < y for x, y in judged)
    worse = sum(x > y for x, y in judged)
    equal = difference.pairs - better - worse
    return difference.as_json() | {
        "problems": difference.pairs,
        "better": better,
        "worse": worse,
        "equal": equal,
    }


def paired_evaluations(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compute `paired_difference` with a row per problem in `table`: texts and accuracies."""
    values = paired_accuracies(a, b)
    table = []
    for row in a["table"]:
        texts = {name: row.get(name, "") for name in ("id", "source", "question", "answer")}
        table.append(texts | dict(zip(("first", "second"), values[row["id"]], strict=True)))
    return {**paired_difference(a, b), "table": table}


@dataclass(frozen=True)
class Paired:
    """The mean difference, b - a, over pairs."""

    difference: float | None  # the mean; None without a pair
    low: float | None  # the lower end of the 95 % interval; None if nothing bounds the difference
    high: float | None
    pairs: int
    unpaired_variance: float  # the variance that the mean difference would have without the pairing
    paired_variance: float  # the variance of the mean difference over the pairs

    @property
    def variance_ratio(self) -> float | None:
        """The unpaired variance over the paired one; None if the pairs do not vary."""
        return self.unpaired_variance / self.paired_variance if self.paired_variance > 0 else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"variance_ratio": self.variance_ratio}


def paired(a: Sequence[float], b: Sequence[float], *, proportions: bool = False) -> Paired:
    """Compute the mean of `b[i] - a[i]`; with `proportions` all values are from 0 to 1."""
    first = np.asarray(a, np.float64)
    second = np.asarray(b, np.float64)
    differences = second - first
    count = len(first)
    if count < 2:
        return Paired(float(differences.mean()) if count else None, None, None, count, 0.0, 0.0)
    low, high = difference_interval(differences.tolist(), proportions=proportions) or (None, None)
    unpaired = float(first.var(ddof=1) + second.var(ddof=1)) / count
    return Paired(
        float(differences.mean()),
        low,
        high,
        count,
        unpaired,
        float(differences.var(ddof=1)) / count,
    )


def mean_over_steps(steps: Sequence[Paired]) -> Paired:
    """Average the differences of the steps with at least two pairs.

    Given the weights of both runs, the samples of different steps are independent, so variances add
    up. The interval covers the variation of these samples, not the variation between runs.
    """
    paired_steps = [step for step in steps if step.pairs > 1 and step.difference is not None]
    if not paired_steps:
        return Paired(None, None, None, 0, 0.0, 0.0)
    count = len(paired_steps)
    mean = fsum(step.difference or 0.0 for step in paired_steps) / count
    unpaired = fsum(step.unpaired_variance for step in paired_steps) / count**2
    paired_variance = fsum(step.paired_variance for step in paired_steps) / count**2
    pairs = sum(step.pairs for step in paired_steps)
    if not paired_variance > 0:
        return Paired(mean, None, None, pairs, unpaired, paired_variance)
    return Paired(
        mean,
        *student_interval(mean, paired_variance, pairs - count),
        pairs,
        unpaired,
        paired_variance,
    )


def paired_problems(a: Mapping[str, float], b: Mapping[str, float]) -> Paired:
    """Compute the difference over problems of both runs; no interval if all differ equally."""
    both = sorted(a.keys() & b.keys())
    return paired([a[name] for name in both], [b[name] for name in both])
