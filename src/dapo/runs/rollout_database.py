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
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dapo.core.errors import DataError
from dapo.core.files import cache_folder
from dapo.runs.checkpoints import step_of
from dapo.runs.outcomes import verdict_name
from dapo.runs.rollout_table import short_rows

KEPT_FROM_STEPS = 100
"""Steps from which the index is kept in the cache folder; a smaller index is built in well under a
second.
"""
FORMAT = 3
"""Format of the tables below; an index of another format is rebuilt."""
FILES_PER_READ = 16
RESCAN_S = 1.0

# the index can be built again: it is worth no wait for the disk; exclusive, because one process
# fills it
SETTINGS = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA temp_store = MEMORY;
"""
TABLES = """
CREATE TABLE IF NOT EXISTS files(step INTEGER PRIMARY KEY, size INTEGER, mtime INTEGER, problem TEXT);
CREATE TABLE IF NOT EXISTS responses(step INTEGER, row INTEGER, group_id INTEGER, problem_id TEXT, source TEXT,
  outcome TEXT, score REAL, reward REAL, tokens INTEGER, finish TEXT, verdict TEXT, PRIMARY KEY (step, row))
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups(step INTEGER, group_id INTEGER, problem_id TEXT, source TEXT, outcome TEXT,
  row INTEGER, size INTEGER, decided INTEGER, correct INTEGER, score REAL, last_row INTEGER, interest INTEGER,
  spread REAL, PRIMARY KEY (step, group_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS groups_by_spread ON groups(interest DESC, spread DESC, step DESC, row, last_row, group_id);
"""
COPIED = (
    "step",
    "row",
    "group_id",
    "problem_id",
    "source",
    "outcome",
    "score",
    "reward",
    "response_tokens",
    "finish",
)
"""The columns of a stored table of responses that the index has, before the name of the verdict."""
GROUPS = """INSERT INTO groups SELECT step, group_id, min(problem_id), min(source), min(outcome), min(row), count(*),
  sum(verdict IN ('correct', 'wrong')), sum(verdict = 'correct'), avg(score), max(row),
  (min(outcome) = 'trained') * (1 + (max(verdict = 'correct') AND max(verdict = 'wrong'))),
  round(max(0, avg(reward * reward) - avg(reward) * avg(reward)), 9)
  FROM responses WHERE step = ? GROUP BY group_id"""
"""Of a group, `interest` is 2 if it trained with right and wrong responses, 1 if it trained, else 0;
`spread` is the variance of its rewards.
"""


def insert_responses(database: sqlite3.Connection, rows: pa.Table) -> None:
    """Add the rows of `short_rows` to the table `responses`."""
    verdicts = map(verdict_name, rows["correct"].to_pylist(), rows["error"].to_pylist())
    columns = [rows[name].to_pylist() for name in COPIED]
    places = placeholders((*COPIED, "verdict"))
    database.executemany(
        f"INSERT INTO responses VALUES ({places})", zip(*columns, verdicts, strict=True)
    )


class RolloutDatabase:
    """The tables of one run's responses and groups.

    The methods may be called from several threads.
    """

    def __init__(self, rollouts: Path) -> None:
        """Open the index of the tables in the folder `rollouts`, which need not exist."""
        self._folder = rollouts
        self._lock = threading.Lock()  # held by the one thread that reads files into the index
        # held for one query, or for one change of several tables
        self._connection_lock = threading.Lock()
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
        with self._connection_lock:
            self._database.close()

    def wait(self) -> None:
        """Wait until all existing files are indexed."""
        self._refresh(force=True)
        if self._worker is not None:
            self._worker.join()

    def _open(self) -> sqlite3.Connection:
        """Open the cached index of a long run; an empty one if the run is short or it is broken."""
        if self._folder.is_dir() and len(os.listdir(self._folder)) >= KEPT_FROM_STEPS:
            key = hashlib.sha256(os.fsencode(self._folder.resolve())).hexdigest()[:24]
            path = cache_folder() / "view" / f"{key}.{FORMAT}.sqlite"
            # another process has it open, it is damaged, or the disk is full or read-only: use
            # memory
            with suppress(sqlite3.Error, OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                return _connect(path)
        return _connect(":memory:")

    def _refresh(self, *, force: bool = False) -> None:
        """List the files; read a few new ones at once, and more in the background."""
        if not force and time.monotonic() - self._scanned < RESCAN_S:
            return
        with self._lock:
            self._present = self._scan()
            self._scanned = time.monotonic()
            indexed = {}
            for step, size, mtime in self._all("SELECT step, size, mtime FROM files"):
                indexed[step] = (size, mtime)
            stale = [step for step in indexed if self._present.get(step) != indexed[step]]
            unread = [step for step in self._present if indexed.get(step) != self._present[step]]
            # the newest first: the page begins with them
            unread.sort(reverse=True)
            if stale:
                self._forget(stale)
            if unread and (self._worker is None or not self._worker.is_alive()):
                self._read(unread[:FILES_PER_READ])
                later = unread[FILES_PER_READ:]
                if later:
                    self._worker = threading.Thread(
                        target=self._read_all, args=(later,), daemon=True
                    )
                    self._worker.start()

    def _scan(self) -> dict[int, tuple[int, int]]:
        """Read size and time of each table, by step."""
        versions = {}
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.name.endswith(".parquet"):
                    with suppress(ValueError, OSError):
                        status = entry.stat(follow_symlinks=False)
                        versions[step_of(Path(entry.name))] = (status.st_size, status.st_mtime_ns)
        return versions

    def _read_all(self, steps: list[int]) -> None:
        """In the thread: index the files of many steps."""
        # the lock is free between two reads, for a page that waits
        for start in range(0, len(steps), FILES_PER_READ):
            if self._closed:
                return
            with self._lock:
                self._read(steps[start : start + FILES_PER_READ])

    def _read(self, steps: list[int]) -> None:
        """Index the files of some steps; a damaged file has no responses, and its problem."""
        tables, problems = self._short_rows(steps)
        files = [(step, *self._present.get(step, (0, 0)), problems.get(step)) for step in steps]
        with self._connection_lock, self._database:
            for table in tables:
                insert_responses(self._database, table)
            self._database.executemany(GROUPS, [(step,) for step in steps])
            self._database.executemany("INSERT INTO files VALUES (?, ?, ?, ?)", files)
        self._version += 1

    def _short_rows(
        self, steps: Sequence[int], text: str = ""
    ) -> tuple[list[pa.Table], dict[int, str]]:
        """Read short columns of responses that contain a text, and problems of damaged files."""
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
        with self._connection_lock, self._database:
            for table in ("files", "responses", "groups"):
                self._database.executemany(
                    f"DELETE FROM {table} WHERE step = ?", [(step,) for step in steps]
                )
        self._version += 1

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.parquet"

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._connection_lock:
            return self._database.execute(query, values).fetchall()

    def _one(self, query: str, values: Sequence[Any] = ()) -> Any:
        with self._connection_lock:
            return self._database.execute(query, values).fetchone()

    def _records(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        with self._connection_lock:
            cursor = self._database.execute(query, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]


def memory_database() -> sqlite3.Connection:
    """Return an empty database with the tables of an index, in memory."""
    return _connect(":memory:")


def placeholders(values: Iterable[Any]) -> str:
    """Return the places of some values in a query: `?, ?, ?`."""
    return ", ".join("?" for _ in values)


def _connect(path: Path | str) -> sqlite3.Connection:
    """Open a database and make the tables that it lacks.

    Raises sqlite3.Error if another process has it open.
    """
    database = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        database.executescript(SETTINGS + TABLES)
    except sqlite3.Error:
        database.close()
        raise
    return database
