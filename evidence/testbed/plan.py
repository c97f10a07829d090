"""The experiments of the testbed and their runs, read from `evidence/testbed/NAME.yaml`.

A file has a title, `refuted_by`, and for all arms `seeds`, `base_models` (the seeds of their
recipes, crossed with those of the runs), `set` (options) and `metrics` (stored besides the shares).
An arm is a curve:

    arms:
      NAME:
        base_model: {strategies: {A: [0.9, 8, 8], B: [0.1, 8, 8]}, updates: 130}
        set: [...]
        levels: [{name: "0.5", at: 0.5, set: [...], base_model: {...}, tabular: {...},
                  rows: {on: {set: [...], tabular: {...}}}}, ...]       # rows: what a row has at this level alone
        rows: {off: [...], on: [...]}

and what evidence.testbed.analysis reads: measure, predicted, delivered and others. `marks` are the
values of `delivered` in the first step of the quickstart and in the first ten of
evidence/base.yaml, unless their names say otherwise.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from evidence.testbed.bases import FOLDER, Recipe, parse_recipe

NAMES = ("overlong", "token_level", "dynamic_sampling", "clip_higher")
"""The experiments in the order in which they run."""
STORED = FOLDER / "results"


@dataclass(frozen=True)
class Job:
    """One run of an experiment."""

    experiment: str
    arm: str
    level: str
    row: str
    seed: int
    recipe: Recipe
    options: tuple[str, ...]
    metrics: tuple[str, ...]
    is_primary: bool = False
    """Whether the arm's contrast decides; these runs come first."""

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """The cell and the sample of the run, unique within its experiment."""
        return self.arm, self.level, self.row, self.recipe.seed, self.seed

    @property
    def kind(self) -> str:
        """Runs of a kind take equally long."""
        return "/".join((self.experiment, self.arm, self.level, self.row))


@cache
def load(name: str) -> dict[str, Any]:
    """The file of an experiment."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def jobs(
    name: str,
    *,
    arms: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    base_models: tuple[int, ...] = (),
) -> Iterator[Job]:
    """The runs of an experiment, the first seed of every cell first; by default those of the file.

    Raises ValueError for an arm that the file lacks.
    """
    experiment = load(name)
    if unknown := set(arms) - set(experiment["arms"]):
        raise ValueError(
            f"{name} has the arms {', '.join(experiment['arms'])}, not {', '.join(sorted(unknown))}"
        )
    chosen = arms or tuple(experiment["arms"])
    for arm in chosen:
        facts = experiment["arms"][arm]
        for seed in seeds or facts.get("seeds", experiment["seeds"]):
            for recipe_seed in base_models or facts.get("base_models", experiment["base_models"]):
                for level in facts["levels"]:
                    recipe = parse_recipe(
                        {**facts["base_model"], **level.get("base_model", {})}, recipe_seed
                    )
                    for row, own in facts["rows"].items():
                        here = level.get("rows", {}).get(row, {}).get("set", ())
                        shared = (
                            *experiment.get("set", ()),
                            *facts.get("set", ()),
                            *level.get("set", ()),
                        )
                        options = (*shared, *own, *here)
                        metrics = tuple(experiment["metrics"])
                        is_primary = bool(facts.get("primary"))
                        yield Job(
                            name,
                            arm,
                            level["name"],
                            row,
                            seed,
                            recipe,
                            options,
                            metrics,
                            is_primary,
                        )


def of_level(arm: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A level of an arm."""
    return next(level for level in arm["levels"] if level["name"] == name)
