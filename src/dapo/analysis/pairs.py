"""Differences of two runs, paired: mean, 95 % interval, and how much variance the pairing saved.

Two runs that are asked the same problem with the same random numbers differ less by chance than two that are not. With
a_i and b_i the values of pair i, the variance of the mean difference over n pairs is

    paired      var(b_i - a_i) / n
    unpaired    (var(a_i) + var(b_i)) / n

and their ratio is by how many times more problems an unpaired comparison would need for the same interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.evaluation.intervals import difference_interval, student_quantile

CURVES = ("reward", "accuracy", "entropy", "length")
"""What is compared of each step's responses: shaped reward, fraction correct, nats per token, tokens per response."""
_COLUMNS = ("problem_id", "outcome", "reward", "correct", "response_tokens")


@dataclass(frozen=True)
class Paired:
    """The mean of b - a over pairs."""

    difference: float | None
    """None without a pair."""
    low: float | None
    """Of the 95 % interval; None where there is none."""
    high: float | None
    pairs: int
    unpaired_variance: float
    """Of the mean difference, if the values were not paired."""
    paired_variance: float
    """Of the mean difference."""

    @property
    def variance_ratio(self) -> float | None:
        """The unpaired variance over the paired one; None where the pairs do not vary."""
        return self.unpaired_variance / self.paired_variance if self.paired_variance > 0 else None


def paired(a: Sequence[float], b: Sequence[float], *, proportions: bool = False) -> Paired:
    """The mean difference of paired values, `b[i] - a[i]`; `proportions` says that all of them are from 0 to 1."""
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    differences, count = second - first, len(first)
    interval = difference_interval(differences.tolist(), proportions=proportions) if count > 1 else None
    low, high = (None, None) if interval is None else interval
    if count < 2:
        return Paired(float(differences.mean()) if count else None, None, None, count, 0.0, 0.0)
    unpaired = float(first.var(ddof=1) + second.var(ddof=1)) / count
    return Paired(float(differences.mean()), low, high, count, unpaired, float(differences.var(ddof=1)) / count)


def mean_over_steps(steps: Sequence[Paired]) -> Paired:
    """The mean over steps of their differences, those with at least two pairs.

    Given the weights of both runs, the draws of different steps are independent, so variances add up. The interval
    says how far the two runs differ beyond the chance of these draws, not what two other runs would do.
    """
    found = [step for step in steps if step.pairs > 1 and step.difference is not None]
    if not found:
        return Paired(None, None, None, 0, 0.0, 0.0)
    count = len(found)
    mean = sum(step.difference or 0.0 for step in found) / count
    unpaired, own = (
        sum(variances) / count**2
        for variances in zip(*((step.unpaired_variance, step.paired_variance) for step in found), strict=True)
    )
    pairs = sum(step.pairs for step in found)
    if not own > 0:
        return Paired(mean, None, None, pairs, unpaired, own)
    half = student_quantile(pairs - count) * sqrt(own)
    return Paired(mean, mean - half, mean + half, pairs, unpaired, own)


def problem_means(table: Path) -> dict[str, dict[str, float]]:
    """For each curve the mean of each problem's decided responses, by problem id, from a step's judged responses.

    The entropy is the mean of -log p over the sampled tokens, whose expectation it is; it is missing where the table
    has no log-probabilities. A problem all of whose verdicts are errors is missing in the rewards.
    """
    names = pq.read_schema(table).names
    rows = pq.read_table(table, columns=[*_COLUMNS, *(["engine_logprobs"] if "engine_logprobs" in names else [])])
    rows = rows.filter(pc.not_equal(rows["outcome"], "excess"))
    problems = rows["problem_id"].to_numpy(zero_copy_only=False)
    ids, index = np.unique(problems.astype(str), return_inverse=True)
    tokens = rows["response_tokens"].to_numpy().astype(np.float64)
    values = {
        "reward": _means(rows["reward"].to_numpy(zero_copy_only=False), index, len(ids)),
        "accuracy": _means(_as_numbers(rows["correct"]), index, len(ids)),
        "entropy": _surprisal(rows, index, tokens, len(ids)),
        "length": _means(tokens, index, len(ids)),
    }
    return {
        name: {str(ids[i]): float(mean) for i, mean in enumerate(means) if np.isfinite(mean)}
        for name, means in values.items()
    }


def paired_problems(a: Mapping[str, float], b: Mapping[str, float]) -> Paired:
    """The difference over the problems that both runs were asked; no interval where all of them differ alike."""
    both = sorted(a.keys() & b.keys())
    return paired([a[name] for name in both], [b[name] for name in both])


def _as_numbers(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """A column of booleans as 0 and 1; null becomes NaN."""
    return np.asarray(column.cast(pa.int8()).to_numpy(zero_copy_only=False), np.float64)


def _means(values: NDArray[np.float64], index: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """The mean of the values of each index; NaN without any."""
    kept = np.isfinite(values)
    return _ratio(np.bincount(index[kept], values[kept], count), np.bincount(index[kept], minlength=count))


def _surprisal(
    rows: pa.Table, index: NDArray[np.int64], tokens: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    """The mean of -log p over the tokens of each index; NaN where none are stored."""
    if "engine_logprobs" not in rows.column_names or rows["engine_logprobs"].null_count:
        return np.full(count, np.nan)
    column = rows["engine_logprobs"].combine_chunks()
    logprobs = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(np.float64)
    owner = np.repeat(index, tokens.astype(np.int64))
    return _ratio(-np.bincount(owner, logprobs, count), np.bincount(index, tokens, count))


def _ratio(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    found = np.full(len(sums), np.nan)
    np.divide(sums, counts, out=found, where=counts > 0)
    return found
