"""Statistics per problem: how often a run has sampled it, how well it was answered, and at which step last."""

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo.core.files import atomic_file
from dapo.types import Group

COUNTS = ("visits", "responses", "decided", "correct", "last_step")
"""How often a problem was sampled, its judged responses, those right or wrong, those right, and the last step."""


class ProblemStats:
    """Counts by problem id; copies of one problem share them. They are saved in checkpoints, so they are exact."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._counts = {name: array("q") for name in COUNTS}
        self._score_sums = array("d")

    def __len__(self) -> int:
        """How many problems have been sampled."""
        return len(self._rows)

    def record(self, groups: Iterable[Group], *, step: int) -> None:
        """Count the judged groups of a step. A response with an error verdict counts in nothing but the visit."""
        for group in groups:
            row = self._rows.setdefault(group.problem.id, len(self._rows))
            if row == len(self._score_sums):
                for count in self._counts.values():
                    count.append(0)
                self._score_sums.append(0.0)
            valid = [verdict for verdict in group.verdicts if verdict.error is None]
            self._counts["visits"][row] += 1
            self._counts["responses"][row] += len(valid)
            self._counts["decided"][row] += sum(verdict.correct is not None for verdict in valid)
            self._counts["correct"][row] += sum(verdict.correct is True for verdict in valid)
            self._score_sums[row] += sum(verdict.score for verdict in valid)
            self._counts["last_step"][row] = step

    def table(self) -> pa.Table:
        """A copy as a table with one row per problem, in the order in which they were first sampled.

        Columns: problem, COUNTS, score_sum.
        """
        numbers = {name: np.array(column) for name, column in self._counts.items()}
        return pa.table({"problem": _ids(list(self._rows)), **numbers, "score_sum": np.array(self._score_sums)})

    def load_table(self, table: pa.Table) -> None:
        """Continue with a saved table."""
        ids = table["problem"].to_pylist()
        decoded = (each.decode("utf-8", "surrogatepass") if isinstance(each, bytes) else each for each in ids)
        self._rows = {problem: row for row, problem in enumerate(decoded)}
        self._counts = {name: array("q", table[name].to_numpy().tobytes()) for name in COUNTS}
        self._score_sums = array("d", table["score_sum"].to_numpy().tobytes())

    def by_problem(self) -> dict[str, dict[str, float]]:
        """By problem id: COUNTS and score_sum."""
        columns: dict[str, array[Any]] = {**self._counts, "score_sum": self._score_sums}
        return {problem: {name: column[row] for name, column in columns.items()} for problem, row in self._rows.items()}


def write_problem_stats(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, atomically; equal tables give equal bytes (of one pyarrow version)."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", use_dictionary=list(COUNTS))


def read_problem_stats(path: Path) -> ProblemStats:
    """What `write_problem_stats` has written. Raises OSError, or ValueError for anything else."""
    stats = ProblemStats()
    table = pq.read_table(path)
    if table.column_names != stats.table().column_names:
        raise ValueError(f"it has the columns {', '.join(table.column_names)}")
    stats.load_table(table)
    return stats


def _ids(ids: list[str]) -> pa.Array:
    """A column of texts; of bytes where one holds half of a surrogate pair, which Parquet's texts cannot."""
    try:
        return pa.array(ids, pa.string())
    except UnicodeEncodeError:
        return pa.array([each.encode("utf-8", "surrogatepass") for each in ids], pa.binary())
