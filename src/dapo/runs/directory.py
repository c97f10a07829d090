"""The run directory: the paths of a run's files, its lock, and truncation after a step.

Imports no torch.
"""

import errno
import fcntl
import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_json, atomic_write_text, open_no_link, read_json, remove
from dapo.runs.checkpoints import METRICS_FILE, PROBLEM_STATS_FILE, Checkpoints, numbered, step_of
from dapo.runs.metrics_file import read_metrics, truncate_after
from dapo.runs.stages import STAGES_FILE, run_path_of, unbegun_advice

_LOCK_ATTEMPTS = 5
_LOCK_INTERVAL_S = 0.05
_LOCK_BYTES = 40
_FILES = (
    "config.yaml",
    "manifest.json",
    "summary.json",
    "lock",
    "curves.png",
    METRICS_FILE,
    PROBLEM_STATS_FILE,
)
_FOLDERS = (
    "checkpoints",
    "rollouts",
    "eval",
    "configs",
    "logs",
    "profile",
    "code",
    "data",
    "tokenizer",
)
SUMMARY_FIELDS = (
    "steps",
    "wall_s",
    "tokens_generated",
    "tokens_trained",
    "eval_first",
    "eval_last",
    "exit_reason",
)

ENDED = ("finished", "solved")
"""The exit reasons of runs that have nothing left to train."""


class _Entry:
    """An attribute of a run directory: the path of a file or folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", owner: type["RunDirectory"]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run's files and folders. Make one with `create` or `open`."""

    path: Path
    config = _Entry("config.yaml")  # all options of the run, now in force
    manifest = _Entry("manifest.json")  # versions, machine, command line, seed
    metrics = _Entry(METRICS_FILE)  # one JSON object per step
    # statistics per problem, as of the newest checkpoint
    problem_stats = _Entry(PROBLEM_STATS_FILE)
    summary = _Entry("summary.json")  # facts and last evaluation, written at the end
    curves = _Entry("curves.png")  # the plot of the metrics
    profile = _Entry("profile")  # the directory of the traces of `profile.steps`
    logs = _Entry("logs")  # the directory of the console's lines and of other processes' output
    console_log = _Entry("logs/console.log")  # the console's lines and warnings
    verifier_log = _Entry("logs/verifier.log")  # the output of the verifiers
    tokenizer = _Entry("tokenizer")  # the model's tokenizer and configuration, without weights
    _lock = _Entry("lock")
    rollouts_folder = _Entry("rollouts")  # the folder of the tables of judged responses
    evaluations_folder = _Entry("eval")  # the folder of the stored evaluations
    # the folder of checkpoints as models, with which other runs begin
    exported_folder = _Entry("exported")
    # the folder of earlier options: step_000010.yaml held up to step 10
    configs_folder = _Entry("configs")

    @classmethod
    def create(
        cls,
        path: str | Path,
        config_yaml: str,
        manifest: Mapping[str, Any],
        *,
        prepared: Collection[str] = (),
        write_first: Callable[["RunDirectory"], None] = lambda run: None,
    ) -> "RunDirectory":
        """Create a run in a new or empty directory.

        The config is written last, and whole: a process killed before that leaves no run, and
        can be started again.

        Args:
            path: The directory.
            config_yaml: All options as YAML.
            manifest: The facts about the process, as JSON values.
            prepared: The names of entries that may exist already.
            write_first: Writes `tokenizer/`.

        Raises:
            CheckpointError: the directory holds anything not `prepared`, or cannot be made.
        """
        run = cls(Path(path))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._require_empty(prepared)  # before the lock: a refused directory gets no lock file
            with run.lock():  # decides between two processes that start at once
                run._require_empty(prepared)
                for left in (run.tokenizer, *run.path.glob(f".{run.tokenizer.name}.*.tmp")):
                    if left.exists():
                        remove(left)  # of a killed start, perhaps with another model
                write_first(run)
                atomic_write_json(run.manifest, manifest)
                atomic_write_text(run.config, config_yaml)
        except OSError as error:
            raise CheckpointError(
                f"cannot create the run directory {path}: {error.strerror}"
            ) from None
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """Open an existing run; of a training in stages, that of the newest stage.

        Raises CheckpointError if it is incomplete, or holds links, pipes and the like.
        """
        run = cls(run_path_of(path))
        path = run.path
        if not os.path.isdir(path):
            advice = unbegun_advice(path) or "expected one that `dapo train` made"
            raise CheckpointError(f"no run directory {path}; {advice}")
        try:
            entries = {entry.name: entry for entry in os.scandir(path)}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        links = sorted(entry.name for entry in entries.values() if entry.is_symlink())
        if links:
            raise CheckpointError(
                f"{path} holds links ({', '.join(links[:3])}), through which a run would change"
                " files elsewhere; replace them by their targets. The run directory itself may be"
                " a link to another disk"
            )
        required = (run.config.name, run.manifest.name)
        absent = [name for name in required if name not in entries]
        if absent:
            raise CheckpointError(
                f"{path} is not a run directory: it has no {' and no '.join(absent)}"
            )
        for name, entry in sorted(entries.items()):
            if name in _FILES and not entry.is_file():
                raise CheckpointError(f"{path} is damaged: {name} is not a regular file")
            if name in _FOLDERS and not entry.is_dir():
                raise CheckpointError(f"{path} is damaged: {name} is not a folder")
        return run

    @classmethod
    def of(cls, checkpoint: Path) -> "RunDirectory":
        return cls(checkpoint.parent.parent)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path)

    def rollouts(self, step: int) -> Path:
        """Return the path of the table of a step's judged responses."""
        return self.rollouts_folder / f"step_{step:06d}.parquet"

    def eval(self, step: int) -> Path:
        return self.evaluations_folder / f"step_{step:06d}.json"

    @staticmethod
    def is_run(path: str | Path) -> bool:
        """Return True if a path holds a run, whole, damaged or not yet started, or its stages."""
        return os.path.lexists(run_path_of(path) / "config.yaml")

    def rollout_tables(self) -> dict[int, Path]:
        """Find the tables of judged responses, by step in ascending order."""
        return {step_of(path): path for path in numbered(self.rollouts_folder)}

    def evaluations(self) -> dict[int, Path]:
        """Find the stored evaluations, by step in ascending order."""
        return {step_of(path): path for path in numbered(self.evaluations_folder)}

    def earlier_configs(self) -> dict[int, Path]:
        """Find the files of options that a resume replaced, by their last step in force."""
        return {step_of(path): path for path in numbered(self.configs_folder)}

    def config_of(self, step: int) -> Path:
        """Return the path of the options that were in force in a training step."""
        for last, path in self.earlier_configs().items():
            if last >= step:
                return path
        return self.config

    def replace_config(self, config_yaml: str, *, after: int) -> None:
        """Put options in force after a step, and keep those of the steps up to it."""
        before = self.config_of(after).read_text(encoding="utf-8")
        is_changed = after > 0 and before != config_yaml
        if is_changed:
            self.configs_folder.mkdir(exist_ok=True)
            atomic_write_text(self.configs_folder / f"step_{after:06d}.yaml", before)
        for last, path in self.earlier_configs().items():
            if last > after or (last == after and not is_changed):
                path.unlink()
        if config_yaml != self.config.read_text(encoding="utf-8"):
            atomic_write_text(self.config, config_yaml)

    def exit_reason(self) -> str | None:
        """Read the exit reason in the run's summary; None if that is missing or damaged."""
        try:
            return str(read_json(self.summary)["exit_reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def missing_metrics(self, step: int) -> list[int]:
        """Find the steps up to `step` without a line in the metrics.

        Raises DataError if a line is damaged.
        """
        missing = set(range(1, step + 1))
        if self.metrics.exists():
            missing -= {record["step"] for record in read_metrics(self.metrics)}
        return sorted(missing)

    @contextmanager
    def lock(self, num_steps: int | None = None) -> Iterator[None]:
        """Lock the run for the process that writes to it; the kernel frees a dead process's lock.

        The file has the process id and, if given, the number of steps that this process trains to.
        Raises CheckpointError naming the holder. Child processes must be spawned, not forked: a
        forked child that outlives its parent would keep the lock.
        """
        with open_no_link(self._lock, "a+", encoding="ascii") as file:
            for attempt in range(_LOCK_ATTEMPTS):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    file.seek(0)
                    holder = file.readline().strip()
                    if attempt + 1 == _LOCK_ATTEMPTS:
                        raise CheckpointError(
                            f"{self.path} is in use by process {holder or '(just starting)'}; wait"
                            " until it has ended, or stop it"
                        ) from None
                    time.sleep(_LOCK_INTERVAL_S)  # `dapo status` may hold it for a moment
            # the id of the process before
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            if num_steps is not None:
                file.write(f"{num_steps}\n")
            file.flush()
            yield

    def holder(self) -> tuple[int | None, int | None] | None:
        """Read the process id that holds the lock and its last step, each None if not written yet.

        None if no process holds the lock. A process that is about to lock the run waits a moment.
        """
        with suppress(OSError), open_no_link(self._lock, "rb") as file:  # usually it is missing
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                # a process that has just locked the run may not have written anything yet
                lines = file.read(_LOCK_BYTES).split()
                process = int(lines[0]) if lines and lines[0].isdigit() else None
                num_steps = int(lines[1]) if len(lines) > 1 and lines[1].isdigit() else None
                return process, num_steps
        return None

    def drop_old_rollouts(self, step: int, keep: int) -> None:
        """Remove the tables of responses up to a step, except the newest `keep`."""
        for table_step, path in self.rollout_tables().items():
            if table_step <= step - keep:
                path.unlink()

    def truncate_after(self, step: int, *, is_logged: bool = True) -> None:
        """Before resuming from a step, remove later files and lines of the run, and its summary.

        Half-written files of a killed process are removed as well. With `is_logged=False` the
        step's own line in the metrics is removed too, and will be written again. Later checkpoints
        are damaged, or the run would resume there.
        """
        for folder in (self.path, self.rollouts_folder, self.evaluations_folder, self.logs):
            for leftover in folder.glob(".*.tmp"):
                remove(leftover)
        truncate_after(self.metrics, step if is_logged else step - 1)
        self.summary.unlink(missing_ok=True)
        for file_step, path in (*self.rollout_tables().items(), *self.evaluations().items()):
            if file_step > step:
                path.unlink()
        self.checkpoints.drop_after(step)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`: SUMMARY_FIELDS, and any other facts.

        `eval_first` and `eval_last` are None, or have accuracy, low, high and problems.
        """
        absent = [field for field in SUMMARY_FIELDS if field not in summary]
        if absent:
            raise ValueError(f"the summary of a run lacks {', '.join(absent)}")
        atomic_write_json(self.summary, summary)

    def _require_empty(self, prepared: Collection[str] = ()) -> None:
        """Raise CheckpointError if a run cannot be created here."""
        # files of a killed process do not count
        names = {entry.name for entry in self.path.iterdir() if not entry.match(".*.tmp")}
        if self.config.name in names:
            typed = shlex.quote(str(self.path))
            advice = f"; continue it with `dapo resume {typed}`"
            holder = self.holder()
            if holder is not None and holder[0] != os.getpid():
                process = f"process {holder[0]}" if holder[0] is not None else "another process"
                advice = f", which {process} is training; follow it with `dapo status {typed}`"
            raise CheckpointError(
                f"{self.path} already holds a run{advice} or choose another --run-dir"
            )
        if STAGES_FILE in names:
            typed_path = shlex.quote(str(self.path))
            raise CheckpointError(
                f"{self.path} already holds a training in stages; continue it with `dapo resume"
                f" {typed_path}` or choose another --run-dir"
            )
        # what a start writes before the configuration, if it was killed
        expected = {"lock", self.manifest.name, self.tokenizer.name, *prepared}
        unexpected = sorted(names - expected)
        if unexpected:
            raise CheckpointError(
                f"{self.path} is not empty and holds no run (found {', '.join(unexpected[:3])}); "
                "choose a new or empty --run-dir"
            )


def default_run_path(config_path: str | Path, now: datetime) -> Path:
    """Return `runs/<config stem>-<YYYYmmdd-HHMMSS>`, the run directory without --run-dir."""
    return Path("runs") / f"{Path(config_path).stem}-{now:%Y%m%d-%H%M%S}"


def require_new_run(path: Path) -> None:
    """Raise CheckpointError if no run can be created at a path, before a model is loaded."""
    try:
        if path.is_dir():
            RunDirectory(path)._require_empty()
        elif os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        above = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise PermissionError(
                errno.EACCES, f"{above} is not a directory that this user may write to"
            )
    except OSError as error:
        raise CheckpointError(f"cannot create the run directory {path}: {error.strerror}") from None
