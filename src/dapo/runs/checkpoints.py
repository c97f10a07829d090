"""The checkpoints of a run: each is whole or absent, and damage is found by checksums.

Imports no torch.
"""

import os
import re
import shlex
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_text, crc32_of, fsync, read_json, remove
from dapo.core.terminal import to_json

METRICS_FILE = "metrics.jsonl"
PROBLEM_STATS_FILE = "problems.parquet"
"""Statistics per problem: in each checkpoint, and a copy of the newest in the run directory."""
CHECKPOINT_MANIFEST = "manifest.json"
WEIGHTS_ONLY = "weights_only"
"""The empty file in a checkpoint that lacks the optimizer's state."""
_STEP_NAME = re.compile(r"step_(\d{6,9})(\.parquet|\.json|\.yaml)?")
_REPLACED = ".replaced.tmp"
_REMOVED = ".gone.tmp"


@dataclass(frozen=True)
class Checkpoints:
    """The folder `checkpoints/` of a run directory."""

    run_path: Path

    @property
    def folder(self) -> Path:
        """The folder of `step_NNNNNN` folders, one per checkpoint."""
        return self.run_path / "checkpoints"

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, saved or not."""
        return self.folder / f"step_{step:06d}"

    def save(
        self, step: int, write: Callable[[Path], None], keep: int, *, accuracy: float | None = None
    ) -> Path:
        """Save a checkpoint with the files that `write(directory)` writes, then call `drop_old`.

        A checkpoint gets its name only when all its files and checksums are on disk: after a crash
        at any moment, every named checkpoint is whole.

        Args:
            step: The step after which the state is saved.
            write: Writes the files into the directory that it gets.
            keep: The number of newest checkpoints that stay.
            accuracy: From this step's evaluation; the checkpoint with the highest one is the best.

        Raises:
            OSError: it cannot be written; the other checkpoints stay.
        """
        final = self.path(step)
        temporary = self.folder / f".{final.name}.tmp"
        # before it is written: a killed process may have filled the disk
        self.clear_leftovers()
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            _write_checkpoint_manifest(temporary, step, accuracy)
            metrics = self.run_path / METRICS_FILE
            if metrics.exists():
                fsync(metrics)  # a run that resumes from here does not write these lines again
            # the old one goes only once the new one has its name
            if final.exists():
                os.rename(final, final.with_name(f".{final.name}{_REPLACED}"))
            os.rename(temporary, final)
            fsync(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # a failed save must not fill the disk
        self.drop_old(step, keep)
        return final

    def with_optimizer_state(self, *, but_newest: int) -> list[Path]:
        """List the checkpoints from which training could continue, except the newest ones."""
        saved = numbered(self.folder)
        older = saved[: max(0, len(saved) - but_newest)]
        return [path for path in older if not has_weights_only(path)]

    def keep_weights(self, checkpoint: Path, copy: Callable[[Path, Path], None]) -> None:
        """Replace a checkpoint by its counts and the weights from `copy(checkpoint, folder)`."""

        def write(folder: Path) -> None:
            copy(checkpoint, folder)
            for path in [*checkpoint.glob("*.json"), checkpoint / PROBLEM_STATS_FILE]:
                # `save` writes a manifest of the new files
                is_stored = path.is_file() and path.name != CHECKPOINT_MANIFEST
                if is_stored and not (folder / path.name).exists():
                    os.link(path, folder / path.name)
            (folder / WEIGHTS_ONLY).touch()

        step = step_of(checkpoint)
        self.save(step, write, keep=step + 1, accuracy=accuracy_of(checkpoint))

    def drop_old(self, step: int, keep: int) -> None:
        """Remove checkpoints up to a step, except the newest `keep` and the (later) best one."""
        up_to_step = [path for path in numbered(self.folder) if step_of(path) <= step]
        scored = []
        for path in up_to_step:
            accuracy = accuracy_of(path)
            if accuracy is not None:
                scored.append((accuracy, step_of(path)))
        best = None
        if scored:
            _, best = max(scored)
        for old in up_to_step[:-keep]:
            if step_of(old) != best:
                _mark_for_removal(old)
        self.clear_leftovers()

    def clear_leftovers(self) -> None:
        """Remove the half-written and half-removed checkpoints of a killed process.

        A checkpoint whose replacement was not finished is whole, and gets its name back.
        """
        for replaced in self.folder.glob(f".step_*{_REPLACED}"):
            name = replaced.with_name(replaced.name.removeprefix(".").removesuffix(_REPLACED))
            if not name.exists() and not replaced.is_symlink():
                os.rename(replaced, name)
        for leftover in self.folder.glob(f".step_*{_REMOVED}"):
            remove(leftover)
        for leftover in self.folder.glob(".step_*.tmp"):
            # renamed, because a writer that is still ending could otherwise make new files in it
            remove(leftover.rename(leftover.with_suffix(_REMOVED)))

    def latest(self, warn: Callable[[str], None]) -> Path | None:
        """Find the newest checkpoint whose checksums hold; None if none was ever saved.

        `warn` is called with a message about each damaged one.

        Raises:
            CheckpointError: all are damaged or gone.
        """
        saved = numbered(self.folder)
        for path in reversed(saved):
            damage = _find_damage(path)
            if damage is None:
                return path
            warn(f"checkpoint {path} is damaged ({damage}); trying the one before it")
        if saved:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged; start again in a new --run-dir"
            )
        if (self.run_path / PROBLEM_STATS_FILE).exists():
            raise CheckpointError(
                f"{self.folder} holds no checkpoint, though the run has saved some"
                f" ({PROBLEM_STATS_FILE} was written with one): without them it would start again at"
                " step 1 and lose its metrics; restore them, or start again in a new --run-dir"
            )
        return None

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, whole or not; None if there is none."""
        return max(map(step_of, numbered(self.folder)), default=None)

    def find(self, step: int) -> Path:
        """Find the checkpoint of a step. Raises CheckpointError if it is missing or damaged."""
        path = self.path(step)
        if not path.is_dir():
            steps = ", ".join(str(step_of(saved)) for saved in numbered(self.folder)) or "none"
            raise CheckpointError(
                f"{self.run_path} has no checkpoint of step {step}; there are: {steps}"
            )
        damage = _find_damage(path)
        if damage is not None:
            raise CheckpointError(f"checkpoint {path} is damaged ({damage})")
        return path

    def drop_after(self, step: int) -> None:
        for path in numbered(self.folder):
            if step_of(path) > step:
                _mark_for_removal(path)
        self.clear_leftovers()


def has_weights_only(checkpoint: Path) -> bool:
    """Return True if a checkpoint can be evaluated and exported, but not trained on."""
    return (checkpoint / WEIGHTS_ONLY).is_file()


def require_optimizer_state(checkpoint: Path, damage: Sequence[str] = ()) -> None:
    """Raise CheckpointError, with the `damage` of newer ones, if training cannot resume here."""
    if has_weights_only(checkpoint):
        run = shlex.quote(str(checkpoint.parents[1]))
        newer = "".join(f"{problem}, but " for problem in damage)
        raise CheckpointError(
            f"{newer}{checkpoint} holds only weights, which can be evaluated and exported; to"
            f" continue training from them, export them (dapo export {run} my-model --step"
            f" {step_of(checkpoint)}) and start a new run with model=my-model. A run with"
            f" train.keep_checkpoints={1 + len(damage)} can be continued after its end"
        )


def bytes_below(folder: Path, names: str = "*") -> int:
    """Measure the files of a folder, or the files and folders in it with such names."""
    total = 0
    for path in folder.glob(names):
        files = path.rglob("*") if path.is_dir() else [path]
        total += sum(file.stat().st_size for file in files if file.is_file())
    return total


def numbered(folder: Path) -> list[Path]:
    """List the entries named `step_NNNNNN` in a folder, by step."""
    entries = [path for path in folder.glob("step_*") if _STEP_NAME.fullmatch(path.name)]
    return sorted(entries, key=step_of)


def step_of(path: Path) -> int:
    """Parse the step in a name like `step_000012` or `step_000012.parquet`."""
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"expected a name like step_000012, got {path.name}")
    return int(match[1])


def accuracy_of(checkpoint: Path) -> float | None:
    """Read the accuracy in the evaluation after the checkpoint's step; None if there was none."""
    try:
        value = _read_checkpoint_manifest(checkpoint)["accuracy"]
    except (OSError, ValueError):
        return None  # a damaged checkpoint is not worth keeping
    return value if isinstance(value, float | int) else None


def _write_checkpoint_manifest(directory: Path, step: int, accuracy: float | None) -> None:
    """Flush a checkpoint's files to disk, and write the manifest with their checksums."""
    files = {}
    folders = []
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            folders.append(path)
        elif path.is_file():
            fsync(path)
            name = path.relative_to(directory).as_posix()
            files[name] = {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
    manifest = {"step": step, "accuracy": accuracy, "files": files}
    atomic_write_text(directory / CHECKPOINT_MANIFEST, _sealed(manifest))
    # the names of new files are in their folder: without it they are lost in a crash
    for folder in [*folders, directory]:
        fsync(folder)


def _sealed(manifest: Mapping[str, Any]) -> str:
    """Format a checkpoint's manifest with a checksum of its other entries."""
    crc32 = zlib.crc32(to_json(manifest, indent=2).encode())
    return to_json({**manifest, "crc32": f"{crc32:08x}"}, indent=2) + "\n"


def _read_checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint: step, accuracy, files.

    Raises OSError, or ValueError with the damage.
    """
    path = checkpoint / CHECKPOINT_MANIFEST
    try:
        manifest = read_json(path)
    except ValueError:
        raise ValueError("manifest.json is not readable") from None
    if not isinstance(manifest, dict):
        raise ValueError("manifest.json is not readable")
    manifest.pop("crc32", None)
    if path.read_bytes() != _sealed(manifest).encode():  # so a change of any bit counts
        raise ValueError("manifest.json does not match its checksum")
    if not {"step", "accuracy", "files"} <= manifest.keys() or not manifest["files"]:
        raise ValueError("manifest.json lists no files")
    if manifest["step"] != step_of(checkpoint):
        raise ValueError(f"it is the checkpoint of step {manifest['step']}")
    return manifest


def _find_damage(checkpoint: Path) -> str | None:
    """Describe the damage of a checkpoint in a few words; None if its checksums hold."""
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
    present = set()
    for path in checkpoint.rglob("[!.]*"):
        if path.is_file():
            present.add(path.relative_to(checkpoint).as_posix())
    unlisted = present - files.keys() - {CHECKPOINT_MANIFEST}
    return f"{min(unlisted)} does not belong to it" if unlisted else None


def _mark_for_removal(checkpoint: Path) -> None:
    """Rename a checkpoint to a leftover, so that a half-removed checkpoint never looks whole."""
    os.rename(checkpoint, checkpoint.with_name(f".{checkpoint.name}.old.tmp"))
