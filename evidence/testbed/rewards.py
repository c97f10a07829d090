"""Verdicts by strategy: right with a probability that belongs to the first letter of the
response.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dapo.core.rng import keyed_seed
from dapo.data.sources.builtin import REQUEST, is_held_out
from dapo.rewards.verdicts import binary_verdict
from dapo.types import Problem, Verdict
from evidence.rewards import TRUE_VERDICT

ENDED = re.compile(r"([A-Z])[^.]*\.")
"""A whole response: a truncated one has no full stop, and is wrong."""


@dataclass(frozen=True)
class Strategy:
    """A verdict that depends on the seed, the problem and the text alone, so that runs of one seed
    are paired.

    On a held-out question a response is correct if it is of the strategy `shown` and ends: the
    accuracy is the share of that strategy.
    """

    right: Mapping[str, float] = field(default_factory=dict)
    """The probability of a correct verdict by first letter; 0 for other letters."""
    seed: int = 0
    trivial: float = 0.0
    """The fraction of the problems on which every response is correct."""
    impossible: float = 0.0
    """The fraction of the problems on which every response is wrong."""
    shown: str = "B"

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that are no probabilities."""
        wrong = [
            number
            for number in (*self.right.values(), self.trivial, self.impossible)
            if not 0 <= number <= 1
        ]
        if wrong or self.trivial + self.impossible > 1:
            raise ValueError(
                f"expected probabilities from 0 to 1 and fractions of the problems, got {self}"
            )

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """The verdict on a response."""
        found = ENDED.fullmatch(response.strip())
        letter = found[1] if found else ""
        if is_held_out(problem.source, str(problem.prompt).removesuffix(f" {REQUEST}")):
            return binary_verdict(letter == self.shown, letter)
        kind = uniform(self.seed, "kind", problem.id)
        if kind < self.trivial + self.impossible:
            return binary_verdict(kind < self.trivial, letter)
        is_right = uniform(self.seed, "verdict", problem.id, response) < self.right.get(letter, 0.0)
        return binary_verdict(is_right, letter)


def uniform(*key: int | str) -> float:
    """A number above 0 and below 1, of 52 random bits that the key determines."""
    return ((keyed_seed(*key) >> 11) + 0.5) / 2**52


@dataclass(frozen=True)
class Arithmetic:
    """The verdict on the answer line, with a share of problems on which every response is
    correct.
    """

    seed: int = 0
    trivial: float = 0.0
    """That share."""

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """The verdict on a response."""
        if uniform(self.seed, "kind", problem.id) < self.trivial:
            return binary_verdict(True, "")
        return TRUE_VERDICT(problem, response)
