"""The base models of the testbed, from tables of strategies: a hundred updates, seconds each."""

import json
import random
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from dapo.core.rng import keyed_seed
from dapo.types import Problem
from evidence import base_model
from evidence.corpus import Solution

FOLDER = Path(__file__).parent
CONFIG = FOLDER / "base.yaml"
Lengths = tuple[int, int]


@dataclass(frozen=True)
class Recipe(base_model.Recipe):
    """A small model and the texts that it learns: the share of each strategy, and the lengths of its texts."""

    strategies: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """For each letter: its share, and its smallest and largest number of characters, the full stop included."""
    lengths: dict[str, dict[str, Lengths]] = field(default_factory=dict)
    """Other lengths on the problems of a source: source, letter, smallest and largest number."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=lambda: {"sums": {"terms": 3, "high": 20}})
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
        letter = rng.choices(list(self.strategies), weights=[share for share, _, _ in self.strategies.values()])[0]
        _, low, high = self.strategies[letter]
        low, high = self.lengths.get(problem.source, {}).get(letter, (low, high))
        length, first = rng.randint(low, high), rng.randrange(10)
        return Solution(letter, letter + "".join(str((first + i) % 10) for i in range(length - 2)) + ".", 0, True)

    def facts(self) -> dict[str, Any]:
        return {}


def parse_recipe(given: dict[str, Any], seed: int) -> Recipe:
    """The recipe of a base model, as an experiment's file writes it."""
    rows = given["strategies"].items()
    strategies = {letter: (float(share), int(low), int(high)) for letter, (share, low, high) in rows}
    return Recipe(**{**given, "strategies": strategies, "seed": seed})
