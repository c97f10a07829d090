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
from dapo.rewards.verifier import deciding_options

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


def who_is_better(difference: Mapping[str, Any], *, first: str = "a", second: str = "b") -> str:
    """Say which of two a paired difference, second - first, shows to be better.

    >>> who_is_better({"difference": 0.2, "low": 0.1, "high": 0.3})
    'b is better'
    """
    low = difference["low"]
    high = difference["high"]
    if low is None:
        # without a pair the difference is None
        return "no difference" if difference["difference"] == 0 else "undecided"
    if low > 0:
        return f"{second} is better"
    if high < 0:
        return f"{first} is better"
    return "no significant difference"


def require_pairable(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raise DataError if two evaluations, with their tables, must not be paired."""
    for name in MUST_MATCH:
        if name in a and name in b and _setting(a, name) != _setting(b, name):
            raise DataError(f"{name} is {a[name]} in one and {b[name]} in the other")
    ids_a = {row["id"] for row in a["table"]}
    ids_b = {row["id"] for row in b["table"]}
    unpaired = ids_a ^ ids_b
    if unpaired and not _are_beginnings(a, b, ids_a, ids_b):
        raise DataError(f"{len(unpaired)} problems are only in one of them")


def _setting(result: Mapping[str, Any], name: str) -> Any:
    """Return a setting, of the verifier's options only those that decide right and wrong."""
    if name == "verifier_options" and result.get("binary"):
        return deciding_options(result.get("verifier"), result[name])
    return result[name]


def _are_beginnings(
    a: Mapping[str, Any], b: Mapping[str, Any], ids_a: set[str], ids_b: set[str]
) -> bool:
    """Return True if one evaluation has the beginning of the other's problems, in one order."""
    if a.get("seed") != b.get("seed"):
        return False
    num_all = [result.get("all_problems", len(ids)) for result, ids in ((a, ids_a), (b, ids_b))]
    is_inside = (ids_a < ids_b and "until_width" in a) or (ids_b < ids_a and "until_width" in b)
    return is_inside and num_all[0] == num_all[1]


def pairing_note(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Say which draws two evaluations do not share; None if they share all.

    >>> pairing_note({"seed": 0, "samples_per_problem": 4}, {"seed": 0, "samples_per_problem": 2})
    'they have 4 and 2 samples of each problem: the first 2 are compared'
    """
    if a.get("seed") != b.get("seed"):
        return (
            f"their seeds are {a.get('seed')} and {b.get('seed')}: other random numbers, so the"
            " interval is wider than with one seed"
        )
    num_samples = (a["samples_per_problem"], b["samples_per_problem"])
    if num_samples[0] == num_samples[1]:
        return None
    return (
        f"they have {num_samples[0]} and {num_samples[1]} samples of each problem: the first"
        f" {min(num_samples)} are compared"
    )


def paired_accuracies(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> dict[str, tuple[float | None, float | None]]:
    """Pair the accuracies of two evaluations by problem, in the order of a; None without a verdict.

    Of evaluations that ended at the width of their interval, the problems of the shorter one count.

    With equal seeds the i-th responses to a problem share their random numbers, so that only
    samples that both evaluations have count; with different seeds all do.

    Args:
        a: an evaluation with its table.
        b: another.

    Raises:
        DataError: the evaluations must not be paired (`require_pairable`).
    """
    require_pairable(a, b)
    samples_of_a = a["samples_per_problem"]
    samples_of_b = b["samples_per_problem"]
    num_shared = None
    if a.get("seed") == b.get("seed") and samples_of_a != samples_of_b:
        num_shared = min(samples_of_a, samples_of_b)
    rows_of_b = {row["id"]: row for row in b["table"]}
    pairs = {}
    for row in a["table"]:
        if row["id"] not in rows_of_b:
            continue
        other_row = rows_of_b[row["id"]]
        pairs[row["id"]] = (_accuracy(row, num_shared), _accuracy(other_row, num_shared))
    return pairs


def _accuracy(row: Mapping[str, Any], num_samples: int | None) -> float | None:
    """Return a problem's mean accuracy over its first samples; None: over all."""
    if num_samples is None:
        accuracy: float | None = row["accuracy"]
        return accuracy
    values = []
    for response in row["responses"][:num_samples]:
        if response["error"] is None:
            # a verifier that does not decide correct or wrong gives a score
            decides = response["correct"] is not None
            values.append(float(response["correct"] if decides else response["score"]))
    return fsum(values) / len(values) if values else None


def paired_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the difference (b minus a) of two evaluations, paired by `paired_accuracies`.

    Returns a `Paired` as JSON values, with the numbers of problems with a verdict in both
    evaluations, and of those on which b is better, worse and equal, and `pairing_note`.

    Raises:
        DataError: the evaluations must not be paired (`require_pairable`).
    """
    first = []
    second = []
    better = 0
    worse = 0
    for x, y in paired_accuracies(a, b).values():
        # a problem without a verdict in one of them is no pair
        if x is None or y is None:
            continue
        first.append(x)
        second.append(y)
        better += x < y
        worse += x > y
    difference = paired(first, second, proportions=bool(a["binary"]))
    equal = difference.pairs - better - worse
    return difference.as_json() | {
        "problems": difference.pairs,
        "better": better,
        "worse": worse,
        "equal": equal,
        "note": pairing_note(a, b),
    }


def paired_evaluations(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compute `paired_difference` with a row per problem in `table`: texts and accuracies."""
    values = paired_accuracies(a, b)
    table = []
    for row in a["table"]:
        if row["id"] not in values:
            continue
        first, second = values[row["id"]]
        texts = {name: row.get(name, "") for name in ("id", "source", "question", "answer")}
        table.append(texts | {"first": first, "second": second})
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
        if not self.paired_variance > 0:
            return None
        return self.unpaired_variance / self.paired_variance

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the ratio of variances."""
        return asdict(self) | {"variance_ratio": self.variance_ratio}


def paired(a: Sequence[float], b: Sequence[float], *, proportions: bool = False) -> Paired:
    """Compute the mean of `b[i] - a[i]`; with `proportions` all values are from 0 to 1."""
    first = np.asarray(a, np.float64)
    second = np.asarray(b, np.float64)
    differences = second - first
    count = len(first)
    if count == 0:
        return Paired(None, None, None, 0, 0.0, 0.0)
    mean = float(differences.mean())
    # one pair has no variance
    if count == 1:
        return Paired(mean, None, None, 1, 0.0, 0.0)
    low, high = difference_interval(differences.tolist(), proportions=proportions) or (None, None)
    if proportions and low is not None and high is not None:
        # few problems have a wide interval, and no accuracies differ by more
        low = max(-1.0, low)
        high = min(1.0, high)
    unpaired = float(first.var(ddof=1) + second.var(ddof=1)) / count
    paired_variance = float(differences.var(ddof=1)) / count
    if difference_interval(differences.tolist(), proportions=False) is None:
        # they differ by rounding alone: 0.7 - 0.6 is not 0.3 - 0.2
        paired_variance = 0.0
    return Paired(mean, low, high, count, unpaired, paired_variance)


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
    low = None
    high = None
    if paired_variance > 0:
        # Satterthwaite's degrees of freedom: a step of few pairs knows its variance badly
        parts = fsum(
            (step.paired_variance / count**2) ** 2 / (step.pairs - 1) for step in paired_steps
        )
        low, high = student_interval(mean, paired_variance, paired_variance**2 / parts)
    return Paired(mean, low, high, pairs, unpaired, paired_variance)


def paired_problems(a: Mapping[str, float], b: Mapping[str, float]) -> Paired:
    """Compute the difference over problems of both runs; no interval if all differ equally."""
    # sorted: sums depend on the order by rounding
    names = sorted(a.keys() & b.keys())
    return paired([a[name] for name in names], [b[name] for name in names])
