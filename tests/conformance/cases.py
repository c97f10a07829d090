"""What a family of cases is made of, and numbers for its inputs."""

from collections.abc import Sequence
from typing import Any

import naive

DAPO = "DAPO, arXiv 2503.14476"
TOLERANCE = 1e-12
Case = dict[str, Any]
Family = dict[str, Any]


def family(
    about: str,
    inputs: dict[str, str],
    parameters: dict[str, str],
    expected: dict[str, str],
    **more: Any,
) -> Family:
    return {
        "about": about,
        "inputs": inputs,
        "parameters": parameters,
        "expected": expected,
        **more,
    }


def case(
    name: str,
    why: str,
    source: str,
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    expected: dict[str, Any],
) -> Case:
    return {
        "name": name,
        "why": why,
        "source": source,
        "inputs": inputs,
        "parameters": parameters,
        "expected": expected,
        "tolerance": TOLERANCE,
    }


REFUSED = {"refused": True}


class Digits:
    """Numbers of four decimals that look random and are the same everywhere."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def between(self, low: float, high: float) -> float:
        self.state = (self.state * 1103515245 + 12345) % 2**31
        return round(low + (high - low) * (self.state / 2**31), 4)


def ragged(lengths: Sequence[int], seed: int, spread: float = 0.7) -> tuple[naive.Rows, naive.Rows]:
    """New and old log-probabilities `[i][t]`, whose ratios lie on both sides of the clips."""
    digits = Digits(seed)
    old = [[-digits.between(0.75, 3.0) for _ in range(length)] for length in lengths]
    new = [[round(value + digits.between(-spread, spread), 4) for value in row] for row in old]
    return new, old


def from_log_ratios(rows: naive.Rows, old: float = -4.0) -> tuple[naive.Rows, naive.Rows]:
    return [[round(old + x, 6) for x in row] for row in rows], [[old for _ in row] for row in rows]


def all_of(rows: naive.Rows) -> list[list[bool]]:
    return [[True for _ in row] for row in rows]


def without_masked(rows: naive.Rows, mask: Sequence[Sequence[bool]]) -> list[list[float | None]]:
    """The rows with null, which stands for NaN, wherever nothing trains."""
    return [
        [x if m else None for x, m in zip(*pair, strict=True)]
        for pair in zip(rows, mask, strict=True)
    ]


MODES = ("token", "group", "sequence", "constant")
WEIGHT_SOURCES = {
    "token": f"{DAPO}, Eq. 12, over the minibatch as in its released code",
    "group": f"{DAPO}, Eq. 8 and 12: the mean over groups of each one's token mean",
    "sequence": f"{DAPO}, Eq. 5 (GRPO)",
    "constant": "Dr. GRPO, arXiv 2503.20783",
}
