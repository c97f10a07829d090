"""`dapo environment test`: plays an environment with nonsense, twice, and prints what it pays. Imports no torch."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo.cli.formatting import right, titled_table
from dapo.config import build_config, parse_data_argument
from dapo.config.load import override
from dapo.core.errors import ConfigError
from dapo.data.problems import load_problems
from dapo.environments.pool import EnvironmentPool
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import verdict_word
from dapo.runs.stored_config import load_run_config
from dapo.types import Problem

EPISODES = 10
_KINDS = ("nothing", "random text", "a number")
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Play:
    """An episode of nonsense: the actions, the answers of the environment, and whether a second play differed."""

    seed: int
    kind: str
    turns: int
    answers: Sequence[dict[str, Any]]
    differs: bool = False

    @property
    def paid(self) -> float:
        return sum(answer.get("reward") or 0.0 for answer in self.answers)

    @property
    def correct(self) -> bool | None:
        return self.answers[-1].get("correct")

    @property
    def error(self) -> str | None:
        return self.answers[-1].get("error")

    def as_json(self) -> dict[str, Any]:
        """The episode as JSON values."""
        names = ("seed", "kind", "turns", "paid", "correct", "error", "differs")
        return {name: getattr(self, name) for name in names}


def play_nonsense(name: str, *, data: str | None, overrides: Sequence[str]) -> list[Play]:
    """Play EPISODES episodes with nonsense, and again in reverse order with the same seeds and actions.

    `name` may be a run, whose environment, tools and problems are taken. The problems are the first of `data`, else
    sums. `overrides` are options of environment. Raises ConfigError or DataError for an argument that cannot be used.
    """
    if not all(item.startswith("environment.") for item in overrides):
        raise ConfigError(
            "dapo environment test takes options of environment only, for example environment.max_turns=4"
        )
    if RunDirectory.is_run(name):
        added = [] if data is None else [override("data.train", parse_data_argument(data))]
        config = load_run_config(RunDirectory.open(name), [*added, *overrides])
        if not config.plays_episodes:
            raise ConfigError(f"{name} plays no episodes: it has no environment and no tools")
    else:
        source = "builtin:sums" if data is None else parse_data_argument(data)
        raw = {"model": "none", "data": {"train": source}, "environment": {"name": name}}
        config = build_config(raw, overrides, where="dapo environment test")
    problems = load_problems(config.data.train_source, require_answer=False)
    with EnvironmentPool(config.environment, memory_gib=config.reward.memory_gib) as pool:
        pool.call_form = "hermes" if pool.tools else None
        tasks = [(problems[seed % len(problems)], seed) for seed in range(EPISODES)]
        first = [_play(pool, *task, max_turns=config.environment.max_turns) for task in tasks]
        second = [_play(pool, *task, max_turns=config.environment.max_turns) for task in reversed(tasks)][::-1]
    return [replace(one, differs=one.answers != other.answers) for one, other in zip(first, second, strict=True)]


def _play(pool: EnvironmentPool, problem: Problem, seed: int, *, max_turns: int) -> Play:
    chance, kind = random.Random(seed), _KINDS[seed % len(_KINDS)]
    episode = pool.open(problem, seed)
    answers, turns = [dict(episode.reset.result())], 0
    while "error" not in answers[-1] and not answers[-1].get("done") and turns < max_turns:
        answers.append(dict(episode.step(_action(kind, chance)).result()))
        turns += 1
    if "error" not in answers[-1] and not answers[-1].get("done"):
        answers.append(dict(episode.end().result()))
    episode.close()
    return Play(seed, kind, turns, answers)


def _action(kind: str, chance: random.Random) -> str:
    if kind == "nothing":
        return ""
    return str(chance.randint(0, 99)) if kind == "a number" else "".join(chance.choices(string.printable, k=40))


def print_plays(plays: Sequence[Play]) -> None:
    """Print a row for each episode, and what the environment pays for nonsense at most."""
    console = SafeConsole()
    table = titled_table("Episodes of nonsense", *right("seed"), "each turn", *right("turns", "paid"), "verdict", "")
    for play in plays:
        verdict = verdict_word(play.correct, play.error)
        remark = "two plays differ" if play.differs else (play.error or "")[:_SHOWN_CHARS]
        table.add_row(f"{play.seed}", play.kind, f"{play.turns}", f"{play.paid:g}", verdict, remark)
    console.print(table)
    console.print(f"most that nonsense is paid: {max(play.paid for play in plays):g}", soft_wrap=True)
    if any(play.differs for play in plays):
        advice = "draw from the global `random` or a generator of `seed`, and keep nothing between episodes"
        console.print(f"the environment is no function of its seed and its actions: {advice}", soft_wrap=True)


def is_suspicious(plays: Sequence[Play]) -> bool:
    """Whether two plays differ, or the environment fails on nonsense."""
    return any(play.differs or play.error is not None for play in plays)
