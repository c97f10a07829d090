"""Queries an index of a run's judged responses for the page: filters, problems, and searches in
texts.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo.core.errors import DataError
from dapo.runs.rollout_database import (
    FILES_PER_READ,
    RolloutDatabase,
    insert_responses,
    memory_database,
    placeholders,
)
from dapo.runs.rollout_table import read_rows

SEARCH_S = 0.35
"""Seconds for which one request searches texts; the next one continues there."""
MAX_SEARCHES = 8
MAX_VISITS = 60
"""Last visits of a problem that the page shows."""
SORTS = {
    "spread": "interest DESC, spread DESC, groups.step DESC, groups.row, responses.row",
    "newest": "step DESC, row",
    "oldest": "step, row",
    "longest": "tokens DESC, step DESC, row",
    "shortest": "tokens, step DESC, row",
    "best": "reward DESC NULLS LAST, step DESC, row",
    "worst": "reward NULLS LAST, step DESC, row",
}
"""The orders of a table of responses; `spread`: first the groups that trained on right and wrong
responses, the largest variance of rewards first.
"""
_FROM_GROUPS = """groups CROSS JOIN responses ON responses.step = groups.step
  AND responses.row BETWEEN groups.row AND groups.last_row AND responses.group_id = groups.group_id"""
"""Responses with their groups. CROSS: the groups are visited in their order, so that the first page
of many responses is found without sorting them all.
"""
_FROM_RESPONSES = """responses CROSS JOIN groups ON groups.step = responses.step
  AND groups.group_id = responses.group_id"""
"""The same rows: few responses pass the filter, and are sorted."""
_FEW = 20_000


@dataclass(frozen=True)
class Filter:
    """A filter of responses; None and empty values select all."""

    first_step: int | None = None
    last_step: int | None = None
    outcomes: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()
    min_tokens: int | None = None
    max_tokens: int | None = None
    problem: str | None = None
    finish: str | None = None
    text: str = ""

    def where(self) -> tuple[str, list[Any]]:
        """Return the condition on the short columns, without `text`, and its parameters."""
        parts: list[str] = []
        values: list[Any] = []
        for column, operator, value in (
            ("step", ">=", self.first_step),
            ("step", "<=", self.last_step),
            ("tokens", ">=", self.min_tokens),
            ("tokens", "<=", self.max_tokens),
            ("problem_id", "=", self.problem),
            ("finish", "=", self.finish),
        ):
            if value is not None:
                parts.append(f"responses.{column} {operator} ?")
                values.append(value)
        for column, allowed in (("outcome", self.outcomes), ("verdict", self.verdicts)):
            if allowed:
                parts.append(f"responses.{column} IN ({placeholders(allowed)})")
                values += allowed
        return " AND ".join(parts) or "true", values


@dataclass
class _Search:
    """The state of a search through texts: its hits so far, and the steps left."""

    steps_left: list[int]
    version: int  # of the index when the search began
    hits: list[tuple[int, int]] = field(default_factory=list)  # step and row


class RolloutIndex(RolloutDatabase):
    """Queries over one run's responses. The methods may be called from several threads."""

    def __init__(self, rollouts: Path) -> None:
        super().__init__(rollouts)
        self._searches: dict[tuple[Filter, str], _Search] = {}
        # by step and version of the file
        self._unreadable: dict[tuple[int, tuple[int, int] | None], str] = {}

    def state(self) -> dict[str, Any]:
        """Return the numbers of `steps`, `indexed` and `responses`, and `problems` of files."""
        self._refresh()
        indexed = self._one("SELECT count(*) FROM files")[0]
        rows = self._all("SELECT problem FROM files WHERE problem IS NOT NULL")
        problems = {problem for (problem,) in rows}
        present = self._present.items()
        for key, problem in self._unreadable.items():
            # a file that has changed since may be whole
            if key in present:
                problems.add(problem)
        return {
            "steps": len(self._present),
            "indexed": min(indexed, len(self._present)),
            "responses": self._one("SELECT count(*) FROM responses")[0],
            "problems": list(problems),
        }

    def page(
        self, row_filter: Filter, *, sort: str = "newest", offset: int = 0, limit: int = 50
    ) -> dict[str, Any]:
        """Select responses that pass a filter, with the beginning of their texts.

        Args:
            row_filter: the filter.
            sort: one of SORTS; a search for a text is by step.
            offset: the number of responses before the first one that is returned.
            limit: the most that are returned.

        Returns:
            `rows`, `total` (of the indexed or, with a text, the searched responses) and
            `steps_left` to search.
        """
        self._refresh()
        steps_left = 0
        if row_filter.text:
            keys, total, steps_left = self._search(row_filter, sort, offset + limit)
            keys = keys[offset : offset + limit]
        else:
            condition, values = row_filter.where()
            total = self._one(f"SELECT count(*) FROM responses WHERE {condition}", values)[0]
            table = "responses"
            if sort == "spread":
                table = _FROM_RESPONSES if total < _FEW else _FROM_GROUPS
            keys = self._all(
                f"SELECT responses.step, responses.row FROM {table} WHERE {condition}"
                f" ORDER BY {SORTS[sort]} LIMIT {limit:d} OFFSET {offset:d}",
                values,
            )
        return {
            "rows": self._rows(keys),
            "total": total,
            "steps_left": steps_left,
            "index": self.state(),
        }

    def groups(self) -> list[dict[str, Any]]:
        """List step, group_id, outcome and mean score of each indexed group, in stream order."""
        return self._records("SELECT step, group_id, outcome, score FROM groups ORDER BY step, row")

    def problems(
        self, *, kind: str = "all", sort: str = "visits", offset: int = 0, limit: int = 50
    ) -> dict[str, Any]:
        """Sort problems into kinds by their verdicts; return each kind's size and one page.

        Excess groups do not count, because their problems are sampled again.

        Args:
            kind: `all`, `undecided`, `never`, `always` or `sometimes` correct.
            sort: by `visits`, `rate` or the `recent` ones first.
            offset: the number of problems before the first one that is returned.
            limit: the most that are returned.
        """
        state = self.state()
        table = """SELECT problem_id, min(source) AS source, count(*) AS visits, sum(size) AS responses,
          sum(decided) AS decided, sum(correct) AS correct, avg(score) AS score, max(step) AS last_step,
          CASE WHEN sum(decided) = 0 THEN 'undecided' WHEN sum(correct) = 0 THEN 'never'
               WHEN sum(correct) = sum(decided) THEN 'always' ELSE 'sometimes' END AS kind
          FROM groups WHERE outcome NOT IN ('excess', 'aborted') GROUP BY problem_id"""
        counts = dict(self._all(f"SELECT kind, count(*) FROM ({table}) GROUP BY kind"))
        orders = {
            "visits": "visits DESC, problem_id",
            "rate": (
                "1.0 * correct / nullif(decided, 0) NULLS LAST, score, responses DESC, problem_id"
            ),
            "recent": "last_step DESC, problem_id",
        }
        condition = "true"
        values = []
        total = sum(counts.values())
        if kind != "all":
            condition = "kind = ?"
            values.append(kind)
            total = counts.get(kind, 0)
        rows = self._records(
            f"SELECT * FROM ({table}) WHERE {condition} ORDER BY {orders[sort]} LIMIT {limit:d}"
            f" OFFSET {offset:d}",
            values,
        )
        visits = self._visits([row["problem_id"] for row in rows])
        for row in rows:
            row["seen"] = visits[row["problem_id"]][-MAX_VISITS:]
        return {
            "counts": counts,
            "total": total,
            "rows": self._with_questions(rows),
            "by_step": self._solved_by_step(),
            "index": state,
        }

    def _visits(self, problems: list[str]) -> dict[str, list[dict[str, Any]]]:
        """Find the groups of each problem, by step."""
        visits: dict[str, list[dict[str, Any]]] = {problem: [] for problem in problems}
        for row in self._records(
            "SELECT problem_id, step, group_id, size, decided, correct, score, outcome FROM groups"
            f" WHERE problem_id IN ({placeholders(problems)}) AND outcome NOT IN ('excess',"
            " 'aborted') ORDER BY step, row",
            problems,
        ):
            visits[row.pop("problem_id")].append(row)
        return visits

    def _solved_by_step(self) -> list[dict[str, Any]]:
        """Count the groups per step with a pass rate of 0, below 0.5, from 0.5, and of 1."""
        return self._records(
            """SELECT step, sum(correct = 0) AS "none", sum(correct > 0 AND 2 * correct < decided) AS few,
              sum(2 * correct >= decided AND correct < decided) AS many, sum(correct = decided) AS "all"
              FROM groups WHERE outcome NOT IN ('excess', 'aborted') AND decided > 0 GROUP BY step ORDER BY step"""
        )

    def _with_questions(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add `question` and `answer` to the rows of problems, from each one's newest group."""
        if not rows:
            return rows
        names = [row["problem_id"] for row in rows]
        # SQLite takes `row` from the group that has the largest step
        newest = self._all(
            "SELECT problem_id, max(step), row FROM groups WHERE problem_id IN"
            f" ({placeholders(names)}) GROUP BY problem_id",
            names,
        )
        newest_rows = self._rows([(step, row) for _, step, row in newest])
        texts = {row["problem_id"]: row for row in newest_rows}
        for row in rows:
            # a table that cannot be read has no texts
            newest_row = texts.get(row["problem_id"], {})
            row["question"] = newest_row.get("question")
            row["answer"] = newest_row.get("answer")
        return rows

    def _search(
        self, row_filter: Filter, sort: str, num_hits: int
    ) -> tuple[list[tuple[int, int]], int, int]:
        """Search for a text until there are enough hits or time is up.

        Returns the hits, their number, and the number of steps that are left to search.
        """
        order = "step, row" if sort == "oldest" else "step DESC, row"
        with self._lock:
            search = self._searches.get((row_filter, sort))
            # files have changed: hits may be missing or wrong
            if search is None or search.version != self._version:
                steps = sorted(self._steps_of(row_filter), reverse=sort != "oldest")
                search = _Search(steps, self._version)
                self._searches[row_filter, sort] = search
                while len(self._searches) > MAX_SEARCHES:
                    self._searches.pop(next(iter(self._searches)))
            condition, values = row_filter.where()
            until = time.monotonic() + SEARCH_S
            while search.steps_left and len(search.hits) < num_hits and time.monotonic() < until:
                chunk = search.steps_left[:FILES_PER_READ]
                search.steps_left = search.steps_left[FILES_PER_READ:]
                search.hits += self._hits(
                    chunk, row_filter.text.lower(), f"WHERE {condition} ORDER BY {order}", values
                )
            return search.hits, len(search.hits), len(search.steps_left)

    def _steps_of(self, row_filter: Filter) -> list[int]:
        """Return the stored steps within the bounds of a filter."""
        first = row_filter.first_step or 0
        steps = [step for step in self._present if step >= first]
        if row_filter.last_step is not None:
            steps = [step for step in steps if step <= row_filter.last_step]
        return steps

    def _hits(
        self, steps: Sequence[int], text: str, condition: str, values: Sequence[Any]
    ) -> list[tuple[int, int]]:
        """Find the responses of some steps that contain a text and meet a condition."""
        tables, problems = self._short_rows(steps, text)
        for step, problem in problems.items():
            self._unreadable[step, self._present.get(step)] = problem
        with closing(memory_database()) as hits:
            for table in tables:
                insert_responses(hits, table)
            return hits.execute(f"SELECT step, row FROM responses {condition}", values).fetchall()

    def _rows(self, keys: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Read the short columns and the beginnings of the texts of rows, in the order of keys."""
        by_step: dict[int, list[int]] = {}
        for step, row in keys:
            by_step.setdefault(step, []).append(row)
        records: dict[tuple[int, int], dict[str, Any]] = {}
        for step, rows in by_step.items():
            try:
                for record in read_rows(self._path(step), rows):
                    records[step, record["row"]] = record
            except DataError as error:
                self._unreadable[step, self._present.get(step)] = str(error)
        return [records[key] for key in keys if key in records]
