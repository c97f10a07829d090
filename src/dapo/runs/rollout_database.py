"""An index of a run's judged responses, so that filters over a thousand Parquet files answer at
once.

The index has the short columns of `rollouts/step_*.parquet`; texts and token ids stay in the files,
and are read for the rows that are shown. It is filled in the background, the newest steps first,
and follows a run that is training: new files are added, changed ones are read again, removed ones
leave. The index of a run with many steps is kept in the cache folder, of other runs in memory;
nothing is written into the run.
"""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from dapo.core.errors import DataError
from dapo.core.files import cache_folder
from dapo.runs.checkpoints import step_of
from dapo.runs.outcomes import VERDICT_SQL
from dapo.runs.rollout_table import short_rows

KEPT_FROM_STEPS = 100
"""Steps from which the index is kept in the cache folder; a smaller index is built in well under a
second.
"""
FORMAT = 1
"""Format of the tables below; an index of another format is rebuilt."""
FILES_PER_READ = 16
RESCAN_S = 1.0
OPTIONS: dict[str, str | bool | int | float | list[str]] = {
    "threads": min(4, os.cpu_count() or 1),
    "memory_limit": "2GB",
}

SHORT_COLUMNS = f"""step, row, group_id, sample, problem_id, source, outcome, {VERDICT_SQL} AS verdict,
  CAST(score AS FLOAT) AS score, CAST(reward AS FLOAT) AS reward, CAST(advantage AS FLOAT) AS advantage,
  response_tokens AS tokens, finish, error"""
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


class RolloutDatabase:
    """The tables of one run's responses and groups.

    The methods may be called from several threads.
    """

    def __init__(self, rollouts: Path) -> None:
        """Open the index of the tables in the folder `rollouts`, which need not exist."""
        self._folder = rollouts
        self._lock = threading.Lock()  # held by the one thread that reads files into the index
        self._scanned = 0.0
        self._version = 0
        self._present: dict[int, tuple[int, int]] = {}
        self._worker: threading.Thread | None = None
        self._closed = False
        self._database = self._open()

    def close(self) -> None:
        """Stop reading and release the database."""
        self._closed = True
        if self._worker is not None:
            self._worker.join()
        self._database.close()

    def wait(self) -> None:
        """Wait until all existing files are indexed."""
        self._refresh(force=True)
        if self._worker is not None:
            self._worker.join()

    def _open(self) -> duckdb.DuckDBPyConnection:
        """Open the cached index of a long run, or an empty one for a short run or if the cached one
        is unusable.
        """
        if self._folder.is_dir() and len(os.listdir(self._folder)) >= KEPT_FROM_STEPS:
            key = hashlib.sha256(os.fsencode(self._folder.resolve())).hexdigest()[:24]
            path = cache_folder() / "view" / f"{key}.{FORMAT}.duckdb"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                database = duckdb.connect(str(path), config=OPTIONS)
                if not database.execute(
                    "SELECT 1 FROM duckdb_tables() WHERE table_name = 'groups'"
                ).fetchone():
                    database.execute(TABLES)
                return database
            except (duckdb.Error, OSError):
                pass  # another process has it open, or the disk is full or read-only: use memory
        database = duckdb.connect(":memory:", config=OPTIONS)
        database.execute(TABLES)
        return database

    def _refresh(self, *, force: bool = False) -> None:
        """List the files; read a few new ones at once, and more in the background."""
        if not force and time.monotonic() - self._scanned < RESCAN_S:
            return
        with self._lock:
            self._present = self._scan()
            self._scanned = time.monotonic()
            known = {
                step: (size, mtime)
                for step, size, mtime in self._all("SELECT step, size, mtime FROM files")
            }
            stale = [step for step, version in known.items() if self._present.get(step) != version]
            missing = sorted(
                (step for step in self._present if known.get(step) != self._present[step]),
                reverse=True,
            )
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
        """Read size and time of each table, by step."""
        found = {}
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.name.endswith(".parquet"):
                    with suppress(ValueError, OSError):
                        status = entry.stat(follow_symlinks=False)
                        found[step_of(Path(entry.name))] = (status.st_size, status.st_mtime_ns)
        return found

    def _read_all(self, steps: list[int]) -> None:
        for start in range(0, len(steps), FILES_PER_READ):
            if self._closed:
                return
            with self._lock:
                self._read(steps[start : start + FILES_PER_READ])

    def _read(self, steps: list[int]) -> None:
        """Index the files of some steps; a damaged file has no responses, and its problem."""
        tables, problems = self._short_rows(steps)
        cursor = self._database.cursor()
        cursor.execute("BEGIN")
        if tables:
            cursor.register("incoming", pa.concat_tables(tables))
            cursor.execute(f"INSERT INTO responses SELECT {SHORT_COLUMNS} FROM incoming")
            cursor.execute(GROUPS, [steps])
        rows = [(step, *self._present.get(step, (0, 0)), problems.get(step)) for step in steps]
        cursor.executemany("INSERT INTO files VALUES (?, ?, ?, ?)", rows)
        cursor.execute("COMMIT")
        self._version += 1

    def _short_rows(
        self, steps: Sequence[int], text: str = ""
    ) -> tuple[list[pa.Table], dict[int, str]]:
        """Read the short columns of some steps' responses that contain a text, and the problems of
        damaged files.
        """
        tables = []
        problems = dict[int, str]()
        for step in steps:
            try:
                rows = short_rows(self._path(step), text)  # the file's name decides the step
                tables.append(
                    rows.set_column(0, "step", pa.array([step] * rows.num_rows, pa.int32()))
                )
            except DataError as error:
                problems[step] = str(error)
        return tables, problems

    def _forget(self, steps: list[int]) -> None:
        for table in ("files", "responses", "groups"):
            self._database.cursor().execute(
                f"DELETE FROM {table} WHERE step IN (SELECT unnest(?))", [steps]
            )
        self._version += 1

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.parquet"

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        return self._database.cursor().execute(query, values).fetchall()

    def _one(self, query: str, values: Sequence[Any] = ()) -> Any:
        return self._database.cursor().execute(query, values).fetchone()

    def _records(self, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        cursor = self._database.cursor().execute(query, values)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
