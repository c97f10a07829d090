"""Paired comparisons: the rule for pairing evaluations, and the mean difference of pairs with its 95 % interval.

Two runs that answer the same problem with the same random numbers differ less by chance than two independent runs. With
a_i and b_i the values of pair i, the variance of the mean difference over n pairs is

    paired      var(b_i - a_i) / n
    unpaired    (var(a_i) + var(b_i)) / n

Their ratio is the factor by which an unpaired comparison needs more problems for the same interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dapo.core.errors import DataError
from dapo.evaluation.intervals import difference_interval, student_interval

MUST_MATCH = ("name", "temperature", "top_p", "max_response_tokens", "binary")
"""The settings that must agree, or the difference of two evaluations is not due to the models alone."""
SAME_DRAWS = ("samples_per_problem", "seed")  # the settings that give both evaluations the same random numbers


def require_pairable(a: Mapping[str, Any], b: Mapping[str, Any], *, same_draws: bool = False) -> None:
    """Raise DataError if two evaluations must not be paired; the one rule for commands, page and Python.

    Both have their tables, as written by `dapo eval --output` or a run. With `same_draws`, seed and samples per problem
    must agree as well.
    """
    for name in (*MUST_MATCH, *(SAME_DRAWS if same_draws else ())):
        if a.get(name) != b.get(name):
            raise DataError(f"{name} is {a.get(name)} in one and {b.get(name)} in the other")
    ids_a, ids_b = ({row["id"] for row in found["table"]} for found in (a, b))
    if alone := ids_a ^ ids_b:
        raise DataError(f"{len(alone)} problems are only in one of them")


def paired_difference(a: Mapping[str, Any], b: Mapping[str, Any], *, same_draws: bool = False) -> dict[str, Any]:
    """Compute the mean difference (b minus a) of two evaluations, paired by problem, with its 95 % interval.

    Pairing removes the difficulty of the problems from the interval. The difference is None without a pair, `low` and
    `high` without an interval. Problems without a verdict in either evaluation are left out. The tables may be in any
    order. Raises the DataError of `require_pairable`.
    """
    require_pairable(a, b, same_draws=same_draws)
    found, better, worse = pair_tables(a, b, lambda row: row["accuracy"])
    interval = {"difference": found.difference, "low": found.low, "high": found.high, "problems": found.pairs}
    return {**interval, "better": better, "worse": worse, "equal": found.pairs - better - worse}


def paired_samples(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple["Paired", int, int]:
    """Pair two evaluations as `paired_difference` does, but only by samples with the same random numbers.

    With equal seeds the i-th responses to a problem share their random numbers, and only samples that both evaluations
    have count. With different seeds all samples count.
    Also returns the numbers of problems on which b is better and worse. Raises the DataError of `require_pairable`.
    """
    require_pairable(a, b)
    samples = min(a["samples_per_problem"], b["samples_per_problem"]) if a.get("seed") == b.get("seed") else None

    def accuracy(row: Mapping[str, Any]) -> float | None:
        judged = [response for response in row["responses"][:samples] if response["error"] is None]
        values = [float(each["score"] if each["correct"] is None else each["correct"]) for each in judged]
        return sum(values) / len(values) if values else None

    return pair_tables(a, b, accuracy)


def pair_tables(
    a: Mapping[str, Any], b: Mapping[str, Any], accuracy: Callable[[Mapping[str, Any]], float | None]
) -> tuple["Paired", int, int]:
    """Compute the difference of two evaluations by an accuracy of each row, and count better and worse problems."""
    first = {row["id"]: accuracy(row) for row in a["table"]}
    values = [(first[row["id"]], accuracy(row)) for row in b["table"]]
    judged = [(x, y) for x, y in values if x is not None and y is not None]
    found = paired([x for x, _ in judged], [y for _, y in judged], proportions=bool(a["binary"]))
    return found, sum(x < y for x, y in judged), sum(x > y for x, y in judged)


def paired_evaluations(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compute `paired_difference` with a row per problem under `table`: id, source, question, answer, accuracies."""
    found = paired_difference(a, b)
    others = {row["id"]: row["accuracy"] for row in b["table"]}
    table = []
    for row in a["table"]:
        texts = {name: row.get(name, "") for name in ("id", "source", "question", "answer")}
        table.append({**texts, "first": row["accuracy"], "second": others[row["id"]]})
    return {**found, "table": table}


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
    """Compute the mean difference of paired values, `b[i] - a[i]`; `proportions`: all values are from 0 to 1."""
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    differences, count = second - first, len(first)
    if count < 2:
        return Paired(float(differences.mean()) if count else None, None, None, count, 0.0, 0.0)
    low, high = difference_interval(differences.tolist(), proportions=proportions) or (None, None)
    unpaired = float(first.var(ddof=1) + second.var(ddof=1)) / count
    return Paired(float(differences.mean()), low, high, count, unpaired, float(differences.var(ddof=1)) / count)


def mean_over_steps(steps: Sequence[Paired]) -> Paired:
    """Average the differences of the steps with at least two pairs.

    Given the weights of both runs, the samples of different steps are independent, so variances add up. The interval
    covers the variation of these samples, not the variation between runs.
    """
    found = [step for step in steps if step.pairs > 1 and step.difference is not None]
    if not found:
        return Paired(None, None, None, 0, 0.0, 0.0)
    count = len(found)
    mean = sum(step.difference or 0.0 for step in found) / count
    unpaired = sum(step.unpaired_variance for step in found) / count**2
    own = sum(step.paired_variance for step in found) / count**2
    pairs = sum(step.pairs for step in found)
    if not own > 0:
        return Paired(mean, None, None, pairs, unpaired, own)
    return Paired(mean, *student_interval(mean, own, pairs - count), pairs, unpaired, own)


def paired_problems(a: Mapping[str, float], b: Mapping[str, float]) -> Paired:
    """Compute the difference over the problems that both runs have sampled; no interval if all differ equally."""
    both = sorted(a.keys() & b.keys())
    return paired([a[name] for name in both], [b[name] for name in both])
