"""Environments for tests of nonsense: the forms that there are, and what is wrong with some."""

import os
import time
from typing import Any

import numpy as np

from dapo.environments.environment import StepResult
from dapo.types import Problem


class Good:
    """Asks for a number, and is lost by any other turn."""

    def reset(self, problem: Problem, seed: int) -> str | None:
        self.number = seed % 1000
        return "Guess."

    def step(self, action: str) -> StepResult:
        if not action.strip().isdigit():
            return self.end()
        return StepResult("higher" if int(action) < self.number else "lower")

    def end(self) -> StepResult:
        return StepResult(reward=-1.0, done=True)


class Tool:
    """A class in the form of TRL's."""

    def reset(self, **columns: Any) -> str | None:
        return None

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: what to add
        """
        return number

    def get_reward(self) -> float:
        return 0.0


class ToolWithText(Tool):
    def reset(self, **columns: Any) -> str | None:
        return f" Level {columns['level']}."


class WithoutColumns(Tool):
    def reset(self, **columns: Any) -> str | None:
        return "Count to 5."


class NoReward(Tool):
    get_reward = None


class Coroutines(Good):
    async def reset(self, problem: Problem, seed: int) -> Any:
        return super().reset(problem, seed)

    async def step(self, action: str) -> Any:
        return await self.end()

    async def end(self) -> Any:
        return StepResult(reward=-1.0, done=True)

    async def close(self) -> None: ...


class GymTuple(Good):
    def step(self, action: str) -> Any:
        return "observation", 1.0, True, {}


class GymnasiumReset(Good):
    def reset(self, problem: Problem, seed: int) -> Any:
        return "Guess.", {"seed": seed}


class Raises(Good):
    def step(self, action: str) -> StepResult:
        raise ConnectionError("the server is down")


class RaisesInLibrary(Good):
    def step(self, action: str) -> StepResult:
        return StepResult(reward=float(np.linalg.inv(np.zeros((2, 2)))[0, 0]))


class RaisesWithoutNumber(Good):
    def step(self, action: str) -> StepResult:
        return StepResult("higher" if int(action) < self.number else "lower")


class WrongReward(ToolWithText):
    def get_reward(self) -> Any:
        return "much"


class RandomPrompt(Good):
    def reset(self, problem: Problem, seed: int) -> str:
        super().reset(problem, seed)
        return f"Guess {os.urandom(4).hex()}."


class RandomNumber(Good):
    def reset(self, problem: Problem, seed: int) -> str:
        self.number = seed % 1000
        self.hidden = os.urandom(4).hex()
        return "Guess."

    def step(self, action: str) -> StepResult:
        return StepResult(self.hidden)


class Shared(Good):
    """Has a state that one episode leaves to the next."""

    episodes = 0

    def reset(self, problem: Problem, seed: int) -> str:
        Shared.episodes += 1
        return "Guess."

    def step(self, action: str) -> StepResult:
        return StepResult(reward=float(Shared.episodes), done=True)


class PaysForCuts(Good):
    """The page's first example as it was: it has no `end`, and goes on after a wrong form."""

    end = None  # type: ignore[assignment]

    def step(self, action: str) -> StepResult:
        if not action.strip().isdigit():
            return StepResult("That is no number.", reward=-0.1)
        return StepResult("higher" if int(action) < self.number else "lower")


class PaysForCutsAtOnce(Good):
    def step(self, action: str) -> StepResult:
        return StepResult(reward=-1.0, done=True)

    end = StepResult  # type: ignore[assignment]


class Slow(Good):
    def step(self, action: str) -> StepResult:
        time.sleep(0.3)
        return StepResult("slow")


def triple(number: int) -> int:
    """Triples.

    Args:
        number: the number
    """
    return 3 * number


class SeedAlone(Good):
    """As in Gymnasium."""

    def reset(self, seed: Any = None, options: Any = None) -> str | None:
        return "Guess."


class TwoInputs(Good):
    def step(self, action: str, state: Any) -> StepResult:
        return StepResult("higher")


class NeedsModel(Good):
    def __init__(self, model: str) -> None:
        self.model = model
