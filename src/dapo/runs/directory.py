"""The run directory: its layout, its lock, its manifest, and checkpoints that are whole or absent."""

import errno
import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dapo
from dapo.core.errors import CheckpointError, DataError
from dapo.core.files import (
    atomic_write_json,
    atomic_write_text,
    crc32_of,
    fsync,
    open_no_link,
    read_json,
    remove,
)
from dapo.core.processor import cpu_model
from dapo.core.secrets import mask_secrets
from dapo.core.terminal import to_json
from dapo.evaluation.scores import require_summary
from dapo.runs.records import read_metrics, truncate_after

_STEP_NAME = re.compile(r"step_(\d{6,})(\.parquet|\.json)?")
PROBLEM_STATS_FILE = "problems.parquet"
"""Statistics per problem: in each checkpoint, and a copy of the newest in the run directory."""
CHECKPOINT_MANIFEST = "manifest.json"
_LOCK_ATTEMPTS, _LOCK_INTERVAL_S = 5, 0.05
_REPLACED = ".replaced.tmp"
_REMOVED = ".gone.tmp"
SUMMARY_FIELDS = ("steps", "wall_s", "tokens_generated", "tokens_trained", "eval_first", "eval_last", "exit_reason")


@dataclass(frozen=True)
class RunDirectory:
    """Where everything about one run lies. Make one with `create` or `open`."""

    path: Path

    @classmethod
    def create(
        cls, path: str | Path, config_yaml: str, manifest: Mapping[str, Any], *, prepared: Collection[str] = ()
    ) -> "RunDirectory":
        """A new run in a new or empty directory. Raises CheckpointError if anything is there that is not `prepared`.

        The config is written last, and whole: one that was killed in here left no run, and may be started again.
        """
        run = cls(Path(path))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._require_empty(prepared)  # a lock file does not belong into a directory that is refused
            with run.lock():  # of two that start at once, one wins here
                run._require_empty(prepared)
                atomic_write_json(run.manifest, manifest)
                atomic_write_text(run.config, config_yaml)
        except OSError as error:
            raise CheckpointError(f"cannot create the run directory {path}: {error.strerror}") from None
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """An existing run. Raises CheckpointError naming what is missing."""
        run = cls(Path(path))
        if not run.path.is_dir():
            raise CheckpointError(f"no run directory {path}; expected one that `dapo train` made")
        if links := sorted(entry.name for entry in os.scandir(path) if entry.is_symlink()):
            raise CheckpointError(
                f"{path} holds links ({', '.join(links[:3])}), through which a run would change files elsewhere; put "
                "what they point to in their place. The run directory itself may be a link to another disk"
            )
        missing = [file.name for file in (run.config, run.manifest) if not file.is_file()]
        if missing:
            raise CheckpointError(f"{path} is not a run directory: it has no {' and no '.join(missing)}")
        return run

    @classmethod
    def of(cls, checkpoint: Path) -> "RunDirectory":
        """The run that saved a checkpoint."""
        return cls(checkpoint.parent.parent)

    @property
    def config(self) -> Path:
        """Every option, as run."""
        return self.path / "config.yaml"

    @property
    def manifest(self) -> Path:
        """Versions, machine, command line, seed."""
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def problem_stats(self) -> Path:
        """Statistics per problem, as of the newest checkpoint."""
        return self.path / PROBLEM_STATS_FILE

    @property
    def summary(self) -> Path:
        """Written at the end."""
        return self.path / "summary.json"

    @property
    def curves(self) -> Path:
        """The plot of the metrics."""
        return self.path / "curves.png"

    @property
    def profile(self) -> Path:
        """The directory of the traces that `profile.steps` asks for."""
        return self.path / "profile"

    @property
    def logs(self) -> Path:
        """The directory of what the run's other processes print."""
        return self.path / "logs"

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    @property
    def checkpoints(self) -> Path:
        """The directory of `step_NNNNNN` directories."""
        return self.path / "checkpoints"

    @property
    def rollouts_folder(self) -> Path:
        """The folder of the tables of judged responses."""
        return self.path / "rollouts"

    def rollouts(self, step: int) -> Path:
        """The table of a step's judged responses."""
        return self.rollouts_folder / f"step_{step:06d}.parquet"

    def eval(self, step: int) -> Path:
        """The evaluation at a step."""
        return self.evaluations_folder / f"step_{step:06d}.json"

    @staticmethod
    def is_run(path: str | Path) -> bool:
        """Whether a path holds a run, whole or not yet begun."""
        return (Path(path) / "config.yaml").is_file()

    def rollout_tables(self) -> dict[int, Path]:
        """The tables of judged responses that are there, by step in ascending order."""
        return {step_of(path): path for path in numbered(self.rollouts_folder)}

    @property
    def evaluations_folder(self) -> Path:
        """The folder of the stored evaluations."""
        return self.path / "eval"

    def evaluations(self) -> dict[int, Path]:
        """The stored evaluations, by step in ascending order."""
        return {step_of(path): path for path in numbered(self.evaluations_folder)}

    def exit_reason(self) -> str | None:
        """How the run has ended, by its summary; None where that is absent or damaged."""
        try:
            return str(read_json(self.summary)["exit_reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def missing_metrics(self, step: int) -> list[int]:
        """The steps up to this one that have no line in the metrics. Raises DataError if a line is damaged."""
        found = {record["step"] for record in read_metrics(self.metrics)} if self.metrics.exists() else set()
        return sorted(set(range(1, step + 1)) - found)

    def first_and_last_evaluation(self, warn: Callable[[str], None]) -> list[dict[str, Any]]:
        """The first and the last readable evaluation of the run, with their tables; only one, or none, if that is all.

        No others are read. `warn` is told of each that is damaged.
        """
        paths = list(self.evaluations().values())
        found: list[dict[str, Any]] = []
        while paths and not found:
            found += read_evaluation(paths.pop(0), warn)
        while paths and len(found) < 2:
            found += read_evaluation(paths.pop(), warn)
        return found

    @contextmanager
    def lock(self, num_steps: int | None = None) -> Iterator[None]:
        """Held by the one process that writes here; the kernel frees it when that process dies, however it dies.

        The file holds the process id and, if given, the number of steps that this process trains to. Raises
        CheckpointError naming the holder. Child processes must be spawned, not forked: a forked child that outlives
        its parent would hold the lock on.
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
                            f"{self.path} is in use by process {holder or '(just starting)'}; wait until it has "
                            "ended, or stop it"
                        ) from None
                    time.sleep(_LOCK_INTERVAL_S)  # `dapo status` may have had a look
            file.truncate(0)
            file.write(f"{os.getpid()}\n" + (f"{num_steps}\n" if num_steps is not None else ""))
            file.flush()
            yield

    def holder(self) -> tuple[int | None, int | None] | None:
        """The id of the process that writes here and the step that it trains to, each None where not known yet.

        None where no process does. A process that writes is not disturbed; one that is just about to waits a moment.
        """
        try:
            with open_no_link(self._lock, "r", encoding="ascii") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    numbers = [int(line) if line.isdigit() else None for line in file.read().split()]
                    process, num_steps = (*numbers, None, None)[:2]
                    return process, num_steps
        except FileNotFoundError:
            pass
        return None

    def save_checkpoint(
        self,
        step: int,
        write: Callable[[Path], None],
        keep: int,
        *,
        accuracy: float | None = None,
    ) -> Path:
        """Have `write(directory)` fill a checkpoint; then drop all but the newest `keep` up to this step and the best.

        `accuracy` is that of this step's evaluation, if it has one; the checkpoint with the highest is the best.
        A checkpoint gets its name only when everything, checksums included, is on disk: after a crash at any moment
        those that have a name are whole. Raises OSError if it cannot be written; the others then stay as they were.
        """
        final = self.checkpoints / f"step_{step:06d}"
        temporary = self.checkpoints / f".{final.name}.tmp"
        self.clear_leftovers()
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            _write_checkpoint_manifest(temporary, step, accuracy)
            if self.metrics.exists():
                fsync(self.metrics)  # a run that resumes from here will not write these lines again
            if final.exists():
                os.rename(final, final.with_name(f".{final.name}{_REPLACED}"))
            os.rename(temporary, final)
            fsync(self.checkpoints)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # a failed save must not fill the disk
        self.drop_old_checkpoints(step, keep)
        return final

    def drop_old_checkpoints(self, step: int, keep: int) -> None:
        """Of the checkpoints up to a step leave the newest `keep` and the best evaluated one."""
        up_to_step = [path for path in numbered(self.checkpoints) if step_of(path) <= step]
        best = best_checkpoint(up_to_step)
        for old in up_to_step[:-keep]:
            if old != best:
                _mark_for_removal(old)
        self.clear_leftovers()

    def clear_leftovers(self) -> None:
        """Remove what a killed process left half written or half removed.

        A checkpoint that was to be replaced, and whose successor has not come, gets its name back: it is whole.
        """
        for replaced in self.checkpoints.glob(f".step_*{_REPLACED}"):
            name = replaced.with_name(replaced.name.removeprefix(".").removesuffix(_REPLACED))
            if not name.exists() and not replaced.is_symlink():
                os.rename(replaced, name)
        for leftover in self.checkpoints.glob(f".step_*{_REMOVED}"):
            remove(leftover)
        for leftover in self.checkpoints.glob(".step_*.tmp"):
            # under another name a writer that was ended, and is not dead yet, makes no new files in it
            remove(leftover.rename(leftover.with_suffix(_REMOVED)))

    def latest_checkpoint(self, warn: Callable[[str], None]) -> Path | None:
        """The newest checkpoint whose checksums hold; None if none was ever saved.

        `warn` is told of each damaged one that is passed over. Raises CheckpointError if all are damaged, or gone.
        """
        saved = numbered(self.checkpoints)
        for path in reversed(saved):
            damage = _find_damage(path)
            if damage is None:
                return path
            warn(f"checkpoint {path} is damaged ({damage}); trying the one before it")
        if saved:
            raise CheckpointError(f"every checkpoint in {self.checkpoints} is damaged; start again in a new --run-dir")
        if self.problem_stats.exists():
            raise CheckpointError(
                f"{self.checkpoints} holds no checkpoint, though the run has saved some ({PROBLEM_STATS_FILE} was "
                "written with one): without them it would begin at step 1 and lose its metrics; put them back, or "
                "start again in a new --run-dir"
            )
        return None

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, whole or not; None if there is none."""
        saved = numbered(self.checkpoints)
        return step_of(saved[-1]) if saved else None

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of one step. Raises CheckpointError if it is not there or damaged."""
        path = self.checkpoints / f"step_{step:06d}"
        if not path.is_dir():
            steps = ", ".join(str(step_of(saved)) for saved in numbered(self.checkpoints)) or "none"
            raise CheckpointError(f"{self.path} has no checkpoint of step {step}; there are: {steps}")
        damage = _find_damage(path)
        if damage is not None:
            raise CheckpointError(f"checkpoint {path} is damaged ({damage})")
        return path

    def drop_old_rollouts(self, step: int, keep: int) -> None:
        """Of the tables of responses up to a step leave the newest `keep`."""
        for path in numbered(self.rollouts_folder):
            if step_of(path) <= step - keep:
                path.unlink()

    def cut_after(self, step: int, *, is_logged: bool = True) -> None:
        """Forget what lies after a step, before resuming from it: metrics, rollouts, evaluations, checkpoints, summary.

        Files that a killed process left half written go as well. With `is_logged=False` the step's own line in the
        metrics goes, too: it will be written again. A checkpoint after the step one resumes from is a damaged one: it
        would only be in the way of its successor.
        """
        for leftover in (entry for name in ("", "rollouts", "eval") for entry in (self.path / name).glob(".*.tmp")):
            remove(leftover)
        truncate_after(self.metrics, step if is_logged else step - 1)
        self.summary.unlink(missing_ok=True)
        for folder in ("rollouts", "eval"):
            for path in numbered(self.path / folder):
                if step_of(path) > step:
                    path.unlink()
        for path in numbered(self.checkpoints):
            if step_of(path) > step:
                _mark_for_removal(path)
        self.clear_leftovers()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`: SUMMARY_FIELDS, and whatever else is worth knowing.

        `eval_first` and `eval_last` are None or hold accuracy, low, high, problems.
        """
        missing = [field for field in SUMMARY_FIELDS if field not in summary]
        if missing:
            raise ValueError(f"the summary of a run lacks {', '.join(missing)}")
        atomic_write_json(self.summary, summary)

    def _require_empty(self, prepared: Collection[str] = ()) -> None:
        startup_files = {"lock", self.manifest.name, *prepared}
        found = sorted(entry.name for entry in self.path.iterdir() if not _is_temporary(entry.name))
        if self.config.name in found:
            raise _already_a_run(self.path)
        if unexpected := [name for name in found if name not in startup_files]:
            raise CheckpointError(
                f"{self.path} is not empty and holds no run (found {', '.join(unexpected[:3])}); "
                "choose a new or empty --run-dir"
            )


def _is_temporary(name: str) -> bool:
    """Whether a killed process left this while it wrote a file."""
    return name.startswith(".") and name.endswith(".tmp")


def default_run_path(config_path: str | Path, now: datetime) -> Path:
    """`runs/<config stem>-<YYYYmmdd-HHMMSS>`, for when no --run-dir is given."""
    return Path("runs") / f"{Path(config_path).stem}-{now:%Y%m%d-%H%M%S}"


def step_of(path: Path) -> int:
    """The step in a name like `step_000012` or `step_000012.parquet`."""
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"expected a name like step_000012, got {path.name}")
    return int(match[1])


def make_manifest(
    command: Sequence[str],
    *,
    seed: int,
    started: datetime,
    gpus: Sequence[str] = (),
    run_dir: Path | None = None,
    module_folders: Sequence[str] = (),
) -> dict[str, Any]:
    """What one needs to know to repeat a run. Reads no environment variable; secrets in `command` are masked."""
    return {
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "command": mask_secrets(command),
        "folder": os.getcwd(),  # where relative paths and modules of the configuration are
        **({} if run_dir is None else {"run_dir": str(run_dir.absolute())}),  # files of the run move with it
        **({"module_folders": list(module_folders)} if module_folders else {}),  # where else modules are
        "seed": seed,
        "git_commit": _git_commit(),
        "versions": package_versions(),
        "machine": {
            "platform": platform.platform(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "gpus": list(gpus),
        },
    }


def read_evaluation(path: Path, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The evaluation in a file, in a list; nothing, and a warning, if it is damaged."""
    try:
        return [_require_evaluation(read_json(path), where=str(path))]
    except OSError as error:
        warn(f"{path} cannot be read and is left out: {error.strerror}")
    except ValueError:
        warn(f"{path} is no JSON and is left out; it was written by a run and has been damaged since")
    except DataError as error:
        warn(f"{error}; it is left out")
    return []


def _require_evaluation(found: Any, *, where: str) -> dict[str, Any]:
    """What a run has written after an evaluation. Raises DataError for something else."""
    summary = require_summary(found, where)
    numbers = [summary[name] for name in ("accuracy", "problems", "response_tokens_mean", "truncated_fraction")]
    numbers += [summary[name] for name in ("low", "high") if summary[name] is not None]
    if not all(isinstance(number, float | int) for number in numbers) or not all(map(_is_row, summary["table"])):
        raise DataError(f"{where} is not what a run writes")
    return summary


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether this is a row of an evaluation's table."""
    responses = row.get("responses")
    return (
        {"source", "question", "answer"} <= row.keys()
        and isinstance(responses, list)
        and bool(responses)
        and all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in responses)
    )


def numbered(folder: Path) -> list[Path]:
    """What is named `step_NNNNNN` in a folder, by step; whatever else a user keeps there is left alone."""
    return sorted((path for path in folder.glob("step_*") if _STEP_NAME.fullmatch(path.name)), key=step_of)


def require_new_run(path: Path, *, prepared: Collection[str] = ()) -> None:
    """Raise CheckpointError where no run can be made: to say so before a model is loaded, not after.

    What is `prepared` may be there: it was written for the run.
    """
    try:
        if path.is_dir():
            RunDirectory(path)._require_empty(prepared)
        elif os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        above = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise PermissionError(errno.EACCES, f"{above} is no directory that this user may write to")
    except OSError as error:
        raise CheckpointError(f"cannot create the run directory {path}: {error.strerror}") from None


def _already_a_run(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} already holds a run; continue it with `dapo resume {path}` or choose another --run-dir"
    )


def best_checkpoint(checkpoints: Sequence[Path]) -> Path | None:
    """The one whose step was evaluated best, the later of equals; None if none of them was evaluated."""
    scored = [(accuracy, path) for path in checkpoints if (accuracy := accuracy_of(path)) is not None]
    return max(scored, key=lambda pair: (pair[0], step_of(pair[1])))[1] if scored else None


def accuracy_of(checkpoint: Path) -> float | None:
    """The accuracy in the evaluation after the checkpoint's step; None if there was none."""
    try:
        value = _read_checkpoint_manifest(checkpoint)["accuracy"]
    except (OSError, ValueError):
        return None  # a damaged one is not worth keeping
    return value if isinstance(value, float | int) else None


def _write_checkpoint_manifest(directory: Path, step: int, accuracy: float | None) -> None:
    """Put everything in a checkpoint on disk, and add the manifest by which damage is found."""
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        fsync(path)
        files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
    atomic_write_text(directory / CHECKPOINT_MANIFEST, _sealed({"step": step, "accuracy": accuracy, "files": files}))
    for folder in [*(path for path in directory.rglob("*") if path.is_dir()), directory]:
        fsync(folder)


def _sealed(manifest: Mapping[str, Any]) -> str:
    """The text of a checkpoint's manifest, with a checksum of all the rest of it."""
    crc32 = zlib.crc32(to_json(manifest, indent=2).encode())
    return to_json({**manifest, "crc32": f"{crc32:08x}"}, indent=2) + "\n"


def _read_checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: step, accuracy, files. Raises OSError, or ValueError that says what is wrong."""
    path = checkpoint / CHECKPOINT_MANIFEST
    try:
        manifest = read_json(path)
    except ValueError:
        raise ValueError("manifest.json is not readable") from None
    if not isinstance(manifest, dict):
        raise ValueError("manifest.json is not readable")
    manifest.pop("crc32", None)
    if path.read_bytes() != _sealed(manifest).encode():  # so a change of any bit is one
        raise ValueError("manifest.json does not match its checksum")
    if not {"step", "accuracy", "files"} <= manifest.keys() or not manifest["files"]:
        raise ValueError("manifest.json lists no files")
    if manifest["step"] != step_of(checkpoint):
        raise ValueError(f"it is the checkpoint of step {manifest['step']}")
    return manifest


def _find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if its checksums hold."""
    try:
        files = _read_checkpoint_manifest(checkpoint)["files"]
        for name, expected in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if crc32_of(path) != expected["crc32"]:
                return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{CHECKPOINT_MANIFEST} is missing"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    except (KeyError, TypeError, AttributeError):
        return f"{CHECKPOINT_MANIFEST} is not readable"
    present = (path for path in checkpoint.rglob("[!.]*") if path.is_file())
    unlisted = {path.relative_to(checkpoint).as_posix() for path in present} - files.keys() - {CHECKPOINT_MANIFEST}
    return f"{min(unlisted)} does not belong to it" if unlisted else None


def _mark_for_removal(checkpoint: Path) -> None:
    """Make a checkpoint a leftover: it loses its name at once, so that half of it never looks like a whole."""
    os.rename(checkpoint, checkpoint.with_name(f".{checkpoint.name}.old.tmp"))


def package_versions() -> dict[str, str | None]:
    """The versions on which the bytes of a run depend; None for what is not installed."""
    return {
        "dapo": dapo.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "numpy")},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Of the current directory, with `-dirty` where tracked files differ from it; None outside a repository."""
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false"]  # a repository may name a program as its monitor
    command = ["git", *options, "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
