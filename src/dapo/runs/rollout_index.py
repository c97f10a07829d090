"""An index of a run's judged responses, so that filters over a thousand Parquet files answer at once.

The index holds the short columns of `rollouts/step_*.parquet`; texts and token ids stay in the files, and are read for
the rows that are shown. It is filled in the background, the newest steps first, and follows a run that is still going:
new files are added, changed ones are read again, removed ones leave. For a run with many steps it is kept in the cache
folder, for others in memory; the run itself is never written to.
"""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from dapo.core.files import cache_folder
from dapo.runs.checkpoints import step_of
from dapo.runs.outcomes import VERDICT_SQL
from dapo.runs.rollout_table import read_rows

KEPT_FROM_STEPS = 100
"""Steps from which the index is kept in the cache folder; a smaller index is built in well under a second."""
FORMAT = 1
"""Format of the tables below; an index of another format is rebuilt."""
FILES_PER_READ = 16
RESCAN_S = 1.0
SEARCH_S = 0.35
"""Seconds for which one request searches texts; the next one continues there."""
MAX_SEARCHES = 8
MAX_VISITS = 60
"""Last visits of a problem that the page shows."""
OPTIONS: dict[str, str | bool | int | float | list[str]] = {
    "threads": min(4, os.cpu_count() or 1),
    "memory_limit": "2GB",
}

SHORT_COLUMNS = f"""CAST(step AS INTEGER) AS step, CAST(file_row_number AS INTEGER) AS row, group_id, sample,
  problem_id, source, outcome, {VERDICT_SQL} AS verdict, CAST(score AS FLOAT) AS score, CAST(reward AS FLOAT) AS reward,
  CAST(advantage AS FLOAT) AS advantage, response_tokens AS tokens, finish, error"""
TABLES = """
CREATE TABLE files(step INTEGER, size BIGINT, mtime BIGINT, problem VARCHAR);
CREATE TABLE responses(step INTEGER, row INTEGER, group_id BIGINT, sample INTEGER, problem_id VARCHAR, source VARCHAR,
  outcome VARCHAR, verdict VARCHAR, score FLOAT, reward FLOAT, advantage FLOAT, tokens INTEGER, finish VARCHAR,
  error VARCHAR);
CREATE TABLE groups(step INTEGER, group_id BIGINT, problem_id VARCHAR, source VARCHAR, outcome VARCHAR, row INTEGER,
  size INTEGER, decided INTEGER, correct INTEGER, score FLOAT);
"""
GROUPS = """INSERT INTO groups SELECT step, group_id, any_value(problem_id), any_value(source), any_value(outcome),
  min(row), count(*), count_if(verdict IN ('correct', 'wrong')), count_if(verdict = 'correct'), avg(score)
  FROM responses WHERE step IN (SELECT unnest(?)) GROUP BY step, group_id"""

SORTS = {
    "newest": "step DESC, row",
    "oldest": "step, row",
    "longest": "tokens DESC, step DESC, row",
    "shortest": "tokens, step DESC, row",
    "best": "reward DESC NULLS LAST, step DESC, row",
    "worst": "reward NULLS LAST, step DESC, row",
}
"""The orders of a table of responses."""


@dataclass(frozen=True)
class Filter:
    """A filter of responses; None and empty select all."""

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
        """The condition on the short columns, and its parameters; `text` is not among them."""
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
                parts.append(f"{column} {operator} ?")
                values.append(value)
        for column, wanted in (("outcome", self.outcomes), ("verdict", self.verdicts)):
            if wanted:
                parts.append(f"{column} IN ({', '.join('?' * len(wanted))})")
                values += wanted
        return " AND ".join(parts) or "true", values


@dataclass
class _Search:
    """The state of a search through texts: its hits so far, and the steps that are left."""

    left: list[int]
    version: int
    found: list[tuple[int, int]] = field(default_factory=list)


class RolloutIndex:
    """The index of one run's responses. Its methods may be called from several threads."""

    def __init__(self, rollouts: Path) -> None:
        """`rollouts` is the folder of the tables; it need not exist."""
        self._folder = rollouts
        self._lock = threading.Lock()  # one thread reads files into the index
        self._scanned, self._version = 0.0, 0
        self._present: dict[int, tuple[int, int]] = {}
        self._worker: threading.Thread | None = None
        self._closed = False
        self._searches: dict[tuple[Filter, str], _Search] = {}
        self._database = self._open()

    def close(self) -> None:
        """Stop reading and release the database."""
        self._closed = True
        if self._worker is not None:
            self._worker.join()
        self._database.close()

    def state(self) -> dict[str, Any]:
        """The state of the index: `steps` and `indexed` (numbers of files), `responses`, `problems` (damaged files)."""
        self._refresh()
        indexed, problems = self._one("SELECT count(*), list(problem) FILTER (problem IS NOT NULL) FROM files")
        return {
            "steps": len(self._present),
            "indexed": min(indexed, len(self._present)),
            "responses": self._one("SELECT count(*) FROM responses")[0],
            "first_step": min(self._present, default=None),
            "last_step": max(self._present, default=None),
            "problems": problems or [],
        }

    def wait(self) -> None:
        """Wait until all existing files are indexed."""
        self._refresh(force=True)
        if self._worker is not None:
            self._worker.join()

    def page(self, wanted: Filter, *, sort: str = "newest", offset: int = 0, limit: int = 50) -> dict[str, Any]:
        """Responses that pass a filter, with the beginning of their texts.

        Returns:
            `rows`, `total` (of the indexed or, with a text, the searched responses) and `steps_left` to search.
        """
        state = self.state()
        left = 0
        if wanted.text:
            keys, total, left = self._search(wanted, sort, offset + limit)
            keys = keys[offset : offset + limit]
        else:
            condition, values = wanted.where()
            total = self._one(f"SELECT count(*) FROM responses WHERE {condition}", values)[0]
            keys = self._all(
                f"SELECT step, row FROM responses WHERE {condition} ORDER BY {SORTS[sort]} LIMIT {limit:d} "
                f"OFFSET {offset:d}",
                values,
            )
        return {"rows": self._rows(keys), "total": total, "steps_left": left, "index": state}

    def group(self, step: int, group_id: int) -> list[dict[str, Any]]:
        """All columns of a group's responses, by sample; empty where the files hold no such group."""
        self._refresh()
        if step not in self._present:
            return []
        return self._records(
            "SELECT * FROM read_parquet(?) WHERE group_id = ? ORDER BY sample", [self._path(step), group_id]
        )

    def groups(self) -> list[dict[str, Any]]:
        """Every indexed group: step, group_id, outcome and mean score, by step and in the order of the stream."""
        return self._records("SELECT step, group_id, outcome, score FROM groups ORDER BY step, row", [])

    def neighbours(self, step: int, group_id: int) -> dict[str, int | None]:
        """The ids of the groups before and after one in its step."""
        query = (
            "SELECT group_id FROM read_parquet(?, file_row_number=true) GROUP BY group_id ORDER BY min(file_row_number)"
        )
        ids = [row[0] for row in self._all(query, [self._path(step)])]
        at = ids.index(group_id) if group_id in ids else None
        return {
            "previous": ids[at - 1] if at else None,
            "next": ids[at + 1] if at is not None and at + 1 < len(ids) else None,
        }

    def problems(self, *, kind: str = "all", sort: str = "visits", offset: int = 0, limit: int = 50) -> dict[str, Any]:
        """Problems by their verdicts: counts of each kind, and a page of one kind.

        A group that was complete after its batch had closed does not count: its problem comes again.
        """
        state = self.state()
        table = """SELECT problem_id, any_value(source) AS source, count(*) AS visits, sum(size) AS responses,
          sum(decided) AS decided, sum(correct) AS correct, avg(score) AS score, max(step) AS last_step,
          CASE WHEN sum(decided) = 0 THEN 'undecided' WHEN sum(correct) = 0 THEN 'never'
               WHEN sum(correct) = sum(decided) THEN 'always' ELSE 'sometimes' END AS kind
          FROM groups WHERE outcome NOT IN ('excess', 'aborted') GROUP BY problem_id"""
        counts = dict(self._all(f"SELECT kind, count(*) FROM ({table}) GROUP BY kind"))
        orders = {
            "visits": "visits DESC, problem_id",
            "rate": "correct / nullif(decided, 0) NULLS LAST, score, responses DESC, problem_id",
            "recent": "last_step DESC, problem_id",
        }
        condition = "true" if kind == "all" else "kind = ?"
        rows = self._records(
            f"SELECT * FROM ({table}) WHERE {condition} ORDER BY {orders[sort]} LIMIT {limit:d} OFFSET {offset:d}",
            [] if kind == "all" else [kind],
        )
        visits = self._visits([row["problem_id"] for row in rows])
        for row in rows:
            row["seen"] = visits[row["problem_id"]][-MAX_VISITS:]
        return {
            "counts": counts,
            "total": sum(counts.values()) if kind == "all" else counts.get(kind, 0),
            "rows": self._with_prompts(rows),
            "by_step": self._solved_by_step(),
            "index": state,
        }

    def _visits(self, problems: list[str]) -> dict[str, list[dict[str, Any]]]:
        """The groups of each of some problems, by step."""
        found: dict[str, list[dict[str, Any]]] = {problem: [] for problem in problems}
        for row in self._records(
            "SELECT problem_id, step, group_id, size, decided, correct, score, outcome FROM groups "
            "WHERE problem_id IN (SELECT unnest(?)) AND outcome NOT IN ('excess', 'aborted') ORDER BY step, row",
            [problems],
        ):
            found[row.pop("problem_id")].append(row)
        return found

    def _solved_by_step(self) -> list[dict[str, Any]]:
        """Groups per step with a pass rate of 0, below one half, from one half, and of 1."""
        return self._records(
            """SELECT step, count_if(correct = 0) AS none, count_if(correct > 0 AND 2 * correct < decided) AS few,
              count_if(2 * correct >= decided AND correct < decided) AS many, count_if(correct = decided) AS all
              FROM groups WHERE outcome NOT IN ('excess', 'aborted') AND decided > 0 GROUP BY step ORDER BY step""",
            [],
        )

    def _with_prompts(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of problems with `prompt` and `answer`, read from where each was last seen."""
        if not rows:
            return rows
        found = self._all(
            "SELECT problem_id, max(step), arg_max(row, step) FROM groups WHERE problem_id IN (SELECT unnest(?)) "
            "GROUP BY problem_id",
            [[row["problem_id"] for row in rows]],
        )
        texts = {row["problem_id"]: row for row in self._rows([(step, row) for _, step, row in found])}
        return [
            row | {name: texts.get(row["problem_id"], {}).get(name) for name in ("prompt", "answer")} for row in rows
        ]

    # --- texts

    def _search(self, wanted: Filter, sort: str, needed: int) -> tuple[list[tuple[int, int]], int, int]:
        """Continue the search for a text until enough is found or time is up; return keys, count, steps left."""
        newest_first = sort != "oldest"
        with self._lock:
            search = self._searches.get((wanted, sort))
            if search is None or search.version != self._version:
                first, last = wanted.first_step or 0, wanted.last_step
                steps = [s for s in self._present if s >= first and (last is None or s <= last)]
                search = _Search(sorted(steps, reverse=newest_first), self._version)
                self._searches[wanted, sort] = search
                while len(self._searches) > MAX_SEARCHES:
                    self._searches.pop(next(iter(self._searches)))
            condition, values = wanted.where()
            until = time.monotonic() + SEARCH_S
            while search.left and len(search.found) < needed and time.monotonic() < until:
                chunk, search.left = search.left[:FILES_PER_READ], search.left[FILES_PER_READ:]
                order = "step DESC, row" if newest_first else "step, row"
                with suppress(duckdb.Error):  # a file that a run has just removed
                    search.found += self._all(
                        f"SELECT step, row FROM (SELECT {SHORT_COLUMNS}, response FROM read_parquet(?, "
                        f"file_row_number=true) WHERE contains(lower(response), ?)) WHERE {condition} ORDER BY {order}",
                        [[self._path(step) for step in chunk], wanted.text.lower(), *values],
                    )
            return search.found, len(search.found), len(search.left)

    def _rows(self, keys: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """The short columns of rows, and the beginnings of their texts, in the order of the keys."""
        by_step: dict[int, list[int]] = {}
        for step, row in keys:
            by_step.setdefault(step, []).append(row)
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for step, rows in by_step.items():
            with suppress(OSError, pa.ArrowException):  # a file that a run has just removed
                found |= {(step, record["row"]): record for record in read_rows(self._path(step), rows)}
        return [found[key] for key in keys if key in found]

    # --- filling the index

    def _open(self) -> duckdb.DuckDBPyConnection:
        """Open the cached index of a long run; an empty one for short runs, or where that is in use or damaged."""
        if self._folder.is_dir() and len(os.listdir(self._folder)) >= KEPT_FROM_STEPS:
            key = hashlib.sha256(os.fsencode(self._folder.resolve())).hexdigest()[:24]
            path = cache_folder() / "view" / f"{key}.{FORMAT}.duckdb"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                database = duckdb.connect(str(path), config=OPTIONS)
                if not database.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'groups'").fetchone():
                    database.execute(TABLES)
                return database
            except (duckdb.Error, OSError):
                pass  # another process has it open, the disk is full or read-only: memory will do
        database = duckdb.connect(":memory:", config=OPTIONS)
        database.execute(TABLES)
        return database

    def _refresh(self, *, force: bool = False) -> None:
        """See which files there are; read a few new ones at once, and many in the background."""
        if not force and time.monotonic() - self._scanned < RESCAN_S:
            return
        with self._lock:
            self._present = self._scan()
            self._scanned = time.monotonic()
            known = {step: (size, mtime) for step, size, mtime in self._all("SELECT step, size, mtime FROM files")}
            stale = [step for step, version in known.items() if self._present.get(step) != version]
            missing = sorted((step for step in self._present if known.get(step) != self._present[step]), reverse=True)
            if stale:
                self._forget(stale)
            if missing and (self._worker is None or not self._worker.is_alive()):
                self._read(missing[:FILES_PER_READ])
                if missing[FILES_PER_READ:]:
                    self._worker = threading.Thread(
                        target=self._read_all, args=(missing[FILES_PER_READ:],), daemon=True
                    )
                    self._worker.start()

    def _scan(self) -> dict[int, tuple[int, int]]:
        """Size and time of each table, by step."""
        found = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self._folder):
                if entry.name.endswith(".parquet"):
                    with suppress(ValueError, FileNotFoundError):
                        status = entry.stat()
                        found[step_of(Path(entry.name))] = (status.st_size, status.st_mtime_ns)
        return found

    def _read_all(self, steps: list[int]) -> None:
        for start in range(0, len(steps), FILES_PER_READ):
            if self._closed:
                return
            with self._lock:
                self._read(steps[start : start + FILES_PER_READ])

    def _read(self, steps: list[int]) -> None:
        """Index the files of some steps; if one of them cannot be read, each alone."""
        cursor = self._database.cursor()
        problem = None
        try:
            cursor.execute("BEGIN")
            paths = [self._path(step) for step in steps]
            cursor.execute(
                f"INSERT INTO responses SELECT {SHORT_COLUMNS} FROM read_parquet(?, file_row_number=true)", [paths]
            )
            cursor.execute(GROUPS, [steps])
        except duckdb.Error as error:
            cursor.execute("ROLLBACK")
            if len(steps) > 1:
                for step in steps:
                    self._read([step])
                return
            problem = f"{paths[0]} cannot be read: {str(error).splitlines()[0]}"
            cursor.execute("BEGIN")
        rows = [(step, *self._present.get(step, (0, 0)), problem) for step in steps]
        cursor.executemany("INSERT INTO files VALUES (?, ?, ?, ?)", rows)
        cursor.execute("COMMIT")
        self._version += 1

    def _forget(self, steps: list[int]) -> None:
        for table in ("files", "responses", "groups"):
            self._database.cursor().execute(f"DELETE FROM {table} WHERE step IN (SELECT unnest(?))", [steps])
        self._version += 1

    def _path(self, step: int) -> str:
        return str(self._folder / f"step_{step:06d}.parquet")

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        return self._database.cursor().execute(query, values).fetchall()

    def _one(self, query: str, values: Sequence[Any] = ()) -> Any:
        return self._database.cursor().execute(query, values).fetchone()

    def _records(self, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        cursor = self._database.cursor().execute(query, values)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
