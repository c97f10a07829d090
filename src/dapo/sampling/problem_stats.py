"""Statistics per problem: how often a run has sampled it, how many responses were right, and the
last step.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.core.files import atomic_file
from dapo.core.portable_math import exp, log
from dapo.core.text import shorten
from dapo.runs.stored_table import stored_table
from dapo.types import Group, Problem

COUNTS = ("visits", "responses", "decided", "correct", "last_step")
"""Visits, judged responses, responses judged right or wrong, right responses, and the step of the
last visit.
"""
SUMS = ("score_sum", "recent_correct", "recent_wrong")
"""The sum of a problem's scores, and its right and wrong responses, each discounted by its age at
the last step.
"""
# the age at which a response counts half, because the policy has changed since
HALF_LIFE_STEPS = 10
_PARTS = np.array([exp(-log(2.0) * part / HALF_LIFE_STEPS) for part in range(HALF_LIFE_STEPS)])
"""`2^(-age / HALF_LIFE_STEPS)` of the ages below a half-life."""


@dataclass(frozen=True)
class OutcomeHistory:
    """A copy of the counts of the problems sampled so far, which later steps do not change."""

    # the row of each problem in the arrays; a row beyond their end was added after the copy
    rows: Mapping[str, int]
    sources: Mapping[str, int]  # the number of each source
    source: NDArray[np.int64]  # `[n]` the number of each problem's source
    correct: NDArray[np.float64]  # `[n]` right responses, each discounted by its age at `last_step`
    wrong: NDArray[np.float64]  # `[n]` wrong responses, discounted likewise
    last_step: NDArray[np.int64]  # `[n]` the step that sampled each problem last


class ProblemStats:
    """Counts by problem id, shared by copies of one problem. A checkpoint restores them exactly."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._counts = {name: array("q") for name in COUNTS}
        self._sums = {name: array("d") for name in SUMS}
        self._sources: dict[str, int] = {}
        self._source = array("q")

    def __len__(self) -> int:
        """Return the number of problems that have been sampled."""
        return len(self._rows)

    def record(self, groups: Iterable[Group], *, step: int) -> None:
        """Count the judged groups of a step; a response with an error verdict does not count."""
        for group in groups:
            row = self._row(group.problem)
            valid = [verdict for verdict in group.verdicts if verdict.error is None]
            decided = sum(verdict.correct is not None for verdict in valid)
            correct = sum(verdict.correct is True for verdict in valid)
            wrong = decided - correct
            counts = self._counts
            decay = discount(step - counts["last_step"][row])
            counts["visits"][row] += 1
            counts["responses"][row] += len(valid)
            counts["decided"][row] += decided
            counts["correct"][row] += correct
            counts["last_step"][row] = step
            sums = self._sums
            sums["score_sum"][row] += fsum(verdict.score for verdict in valid)
            sums["recent_correct"][row] = sums["recent_correct"][row] * decay + correct
            sums["recent_wrong"][row] = sums["recent_wrong"][row] * decay + wrong

    def history(self) -> OutcomeHistory:
        """Copy the counts that predictions read."""
        return OutcomeHistory(
            rows=self._rows,
            sources=dict(self._sources),
            source=np.array(self._source),
            correct=np.array(self._sums["recent_correct"]),
            wrong=np.array(self._sums["recent_wrong"]),
            last_step=np.array(self._counts["last_step"]),
        )

    def table(self) -> pa.Table:
        """Return a copy as a table with one row per problem, in the order of first samples.

        Columns: problem, source, COUNTS, SUMS.
        """
        source_names = list(self._sources)
        columns = {
            "problem": _texts(list(self._rows)),
            "source": _texts([source_names[number] for number in self._source]),
        }
        for name, column in (self._counts | self._sums).items():
            columns[name] = np.array(column)
        return pa.table(columns)

    def load_table(self, table: pa.Table) -> None:
        """Continue with a saved table."""
        self._rows = {problem: row for row, problem in enumerate(_from_texts(table["problem"]))}
        self._counts = {name: array("q", table[name].to_numpy().tobytes()) for name in COUNTS}
        self._sums = {name: array("d", table[name].to_numpy().tobytes()) for name in SUMS}
        self._sources = {}
        self._source = array("q")
        for name in _from_texts(table["source"]):
            self._source.append(self._source_number(name))

    def by_problem(self) -> dict[str, dict[str, float]]:
        """Return COUNTS and score_sum by problem id."""
        columns: dict[str, array[Any]] = {**self._counts, "score_sum": self._sums["score_sum"]}
        return {
            problem: {name: column[row] for name, column in columns.items()}
            for problem, row in self._rows.items()
        }

    def _row(self, problem: Problem) -> int:
        """Return the row of a problem, which is new with its first sample."""
        row = self._rows.setdefault(problem.id, len(self._rows))
        is_new = row == len(self._source)
        if is_new:
            for column in (self._counts | self._sums).values():
                column.append(0)
            self._source.append(self._source_number(problem.source))
        return row

    def _source_number(self, name: str) -> int:
        """Return the number of a source: sources are numbered in the order of first samples."""
        return self._sources.setdefault(name, len(self._sources))


@overload
def discount(age: int) -> float: ...
@overload
def discount(age: NDArray[np.int64]) -> NDArray[np.float64]: ...
def discount(age: Any) -> Any:
    """Return the weight of a response by its age, `2^(-age / HALF_LIFE_STEPS)`."""
    # the powers of numpy and of the C library differ in the last bit with the processor; halving is
    # exact
    halvings, part = np.divmod(age, HALF_LIFE_STEPS)
    weights = np.ldexp(_PARTS[part], -halvings)
    return weights if isinstance(age, np.ndarray) else float(weights)


def write_problem_stats(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, atomically; one pyarrow version writes equal tables equally."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", use_dictionary=["source", *COUNTS])


def read_problem_stats(path: Path) -> ProblemStats:
    """Read a table that `write_problem_stats` has written. Raises DataError for anything else."""
    stats = ProblemStats()
    schema = stats.table().schema
    with stored_table(path) as stored:
        if stored.names != schema.names:
            raise ValueError(f"it has the columns {shorten(', '.join(stored.names), 120)}")
        table = stored.read(stored.names)
        for name in (*COUNTS, *SUMS):
            if table[name].type != schema.field(name).type or table[name].null_count:
                raise ValueError("a column holds other values than numbers")
        stats.load_table(table)
    return stats


def _texts(texts: list[str]) -> pa.Array:
    """Make a column of texts, or of bytes if a lone surrogate in a text needs them."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array([text.encode("utf-8", "surrogatepass") for text in texts], pa.binary())


def _from_texts(column: pa.ChunkedArray) -> list[str]:
    """Return the texts that a column of `_texts` was made from."""
    texts = []
    for value in column.to_pylist():
        is_encoded = isinstance(value, bytes)
        texts.append(value.decode("utf-8", "surrogatepass") if is_encoded else value)
    return texts
