"""The base models of the testbed, from tables of strategies: a hundred updates, seconds each.

Those of the second floor can do arithmetic: the evidence's base model, trained further on other
shares of its texts.
"""

import json
import random
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from dapo.core.rng import keyed_seed
from dapo.policy.model import LoadedModel, load_model
from dapo.types import Problem
from evidence import base_model, corpus
from evidence.corpus import Solution

FOLDER = Path(__file__).parent
CONFIG = FOLDER / "base.yaml"
Lengths = tuple[int, int]


@dataclass(frozen=True)
class Recipe(base_model.Recipe):
    """A small model and the texts that it learns: the share of each strategy, and the lengths of
    its texts.
    """

    strategies: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """For each letter: its share, and its smallest and largest number of characters, the full stop
    included.
    """
    lengths: dict[str, dict[str, Lengths]] = field(default_factory=dict)
    """Other lengths on the problems of a source: source, letter, smallest and largest number."""
    tasks: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"sums": {"terms": 3, "high": 20}}
    )
    """The problems that the texts answer."""
    hidden_size: int = 64
    intermediate_size: int = 192
    num_hidden_layers: int = 2
    updates: int = 130
    lr: float = 3.0e-3

    @property
    def name(self) -> str:
        """The model's folder, which differs for recipes that differ."""
        digest = sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"testbed-{digest[:10]}-{self.seed}"

    @property
    def config(self) -> Path:
        return CONFIG

    def data_options(self) -> list[str]:
        return [f"data.train={json.dumps({'builtin': self.tasks, 'size': 6000, 'seed': 1})}"]

    def solve(self, problem: Problem, *key: int) -> Solution:
        """A letter by its share, digits that count on from a random one, and a full stop."""
        rng = random.Random(keyed_seed("testbed", *key))
        letter = rng.choices(
            list(self.strategies), weights=[share for share, _, _ in self.strategies.values()]
        )[0]
        _, low, high = self.strategies[letter]
        low, high = self.lengths.get(problem.source, {}).get(letter, (low, high))
        length = rng.randint(low, high)
        first = rng.randrange(10)
        return Solution(
            letter,
            letter + "".join(str((first + i) % 10) for i in range(length - 2)) + ".",
            0,
            True,
        )

    def facts(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class ArithmeticRecipe(Recipe):
    """The evidence's base model after more updates, on texts in which its ways of answering have
    other shares.
    """

    ways: dict[str, float] = field(default_factory=dict)
    """The share of each way of `WAYS`."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=lambda: {"remainders": {"digits": 3}})
    updates: int = 150
    lr: float = 5.0e-4

    @property
    def config(self) -> Path:
        return FOLDER / "arithmetic.yaml"

    def initial_model(self) -> LoadedModel:
        folder, _ = base_model.base_model(lambda text: None)
        return load_model(str(folder), dtype=torch.float32)

    def solve(self, problem: Problem, *key: int) -> Solution:
        """A text in one of the ways."""
        rng = random.Random(keyed_seed("testbed arithmetic", *key))
        way = rng.choices(list(self.ways), weights=list(self.ways.values()))[0]
        writer = corpus.Writer(rng)
        return Solution(way, WAYS[way](problem, writer), writer.slips, True)

    def facts(self) -> dict[str, Any]:
        return {"begins with": base_model.recipe_of(base_model.Recipe())}


def stall(problem: Problem, writer: corpus.Writer) -> str:
    """A guess behind as many sentences as make it as long as a worked solution."""
    guessed = corpus.guess(problem, writer)
    worked = corpus.work_out(problem, corpus.Writer(random.Random(0)))
    return STALLING * round((len(worked) - len(guessed)) / len(STALLING)) + guessed


STALLING = "Hmm. "
WAYS = {
    "guessed": corpus.guess,
    "stalled": stall,
    "worked": corpus.work_out,
    "checked": corpus.check,
}
"""The first letter of a text tells whether it is a guess: `Answer` and `Hmm`, or else the first
digit of a working.
"""


def parse_recipe(given: dict[str, Any], seed: int) -> Recipe:
    """The recipe of a base model, as an experiment's file writes it."""
    if "ways" in given:
        return ArithmeticRecipe(**{**given, "seed": seed})
    rows = given["strategies"].items()
    strategies = {
        letter: (float(share), int(low), int(high)) for letter, (share, low, high) in rows
    }
    return Recipe(**{**given, "strategies": strategies, "seed": seed})
