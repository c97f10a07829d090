"""The two commits of a comparison: where their sources lie, and rows of figures that hold them
against each other.
"""

import io
import math
import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_commit
from benchmarks.worker_session import ROOT
from dapo.libs.sample_intervals import mean_interval

BASE = "base"
OURS = "ours"
COPIED = ("src", "configs")


@dataclass(frozen=True)
class Side:
    """One of the two commits."""

    name: str
    root: Path
    commit: str

    @property
    def environment(self) -> dict[str, str]:
        """Under which a process imports this commit's package, and the benchmarks of this
        checkout.
        """
        return {"PYTHONPATH": os.pathsep.join((str(ROOT), str(self.root / "src")))}


@dataclass(frozen=True)
class Target:
    """A bound on a measured ratio."""

    ratio: float
    at_most: bool

    def is_met(self, ratio: float) -> bool:
        """Whether a measured ratio is on the right side."""
        return ratio <= self.ratio if self.at_most else ratio >= self.ratio

    def __str__(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {self.ratio:.2f}"


@dataclass(frozen=True)
class Ratio:
    """ours / base over the rounds: the geometric mean, and its 95 % interval (None of fewer than
    two rounds).
    """

    mean: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, ours: Sequence[float], base: Sequence[float]) -> "Ratio":
        """Round by round, so that a drift of the machine cancels; Student's interval of the
        logarithms.
        """
        logs = [math.log(a / b) for a, b in zip(ours, base, strict=True)]
        found = mean_interval(logs, proportions=False) if len(logs) > 1 else None
        interval = (math.exp(found[0]), math.exp(found[1])) if found is not None else None
        return cls(math.exp(sum(logs) / len(logs)), interval)


def open_sides(commit: str, folder: Path, *, root: Path = ROOT) -> tuple[Side, Side]:
    """The base commit and the checkout at `root` as it is now: their sources, each copied to a part
    of `folder`.

    Changes of the checkout in the hours that a comparison takes change neither.

    Raises ValueError for an unknown commit.
    """
    try:
        full = _git(root, "rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
        archive = _git(root, "archive", "--format=tar", full, *COPIED)
    except subprocess.CalledProcessError as error:
        raise ValueError(
            f"git does not know the commit {commit!r}: {error.stderr.decode().strip()}"
        ) from error
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder / BASE, filter="data")
    for name in COPIED:
        shutil.copytree(
            root / name, folder / OURS / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return Side(BASE, folder / BASE, full[:12]), Side(OURS, folder / OURS, describe_commit(root))


def row(
    name: str, unit: str, values: dict[str, list[float]], target: Target | None = None
) -> dict[str, Any]:
    """A row of the results: a value for each round and side, and what their ratio is to be."""
    found: dict[str, Any] = {"name": name, "unit": unit, **values}
    if target is not None:
        found["target"] = {"ratio": target.ratio, "at_most": target.at_most}
    return found


def in_turn(sides: Sequence[Side], round_index: int) -> list[Side]:
    """The sides in the order of a round: the other one begins in every second."""
    return list(sides) if round_index % 2 == 0 else list(reversed(sides))


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True).stdout
