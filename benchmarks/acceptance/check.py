"""The result of a check: numbers with stated bounds, or the reason why it cannot run here."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch


@dataclass(frozen=True)
class Setting:
    """Where and how large everything is computed."""

    device: Literal["cuda", "cpu"]
    folder: Path
    """An empty folder of this check alone, which is removed after it."""
    vllm_python: str | None = None
    """The interpreter of an environment with vLLM."""
    references: Path | None = None
    """A file of float32 references, made on a CPU; what it lacks is computed here."""

    @property
    def on_gpu(self) -> bool:
        """Real geometries and speeds; on a CPU everything is tiny and no speed is judged."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Measurement:
    """A number and its bound: `at_least` or `at_most`, or neither where the number is only
    stated.
    """

    what: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    detail: str = ""
    """Explanation of the number, for diagnosing a failure."""

    @property
    def ok(self) -> bool:
        """Within the bound; a number that is not finite never is."""
        if not math.isfinite(self.value):
            return False
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


class Skipped(Exception):
    """A check cannot be made here, for the reason that is its message."""


Measure: TypeAlias = Callable[[Setting], Iterable[Measurement]]
"""A generator gives each number as soon as it is known, so that a later failure does not lose it."""


@dataclass(frozen=True)
class Check:
    """One stage of the acceptance, which runs in a process of its own."""

    name: str
    about: str
    """The comparison in one sentence."""
    measure: Measure
    limit_s: float
    """Its budget on a GPU: the seconds after which it is ended and counts as failed. Those of all
    checks are at most 10 minutes.
    """


def require_gpu(setting: Setting, reason: str) -> None:
    """Raise Skipped on a CPU."""
    if not setting.on_gpu:
        raise Skipped(reason)


def compute_exactly() -> None:
    """Float32 products in float32: TensorFloat-32 would round a comparison away."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def mean_and_largest_gap(
    found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Over all tokens of all responses: the mean and the largest absolute difference of two
    log-probabilities.
    """
    gaps = [
        abs(a - b)
        for row, other in zip(found, expected, strict=True)
        for a, b in zip(row, other, strict=True)
    ]
    return sum(gaps) / len(gaps), max(gaps)
