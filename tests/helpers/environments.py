"""Environments for tests: scripted ones, and some that misbehave."""

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from dapo.config.environment import EnvironmentConfig
from dapo.environments.environment import Environment, StepResult, prompt_to_json, result_to_json
from dapo.environments.pool import EnvironmentPool
from dapo.processes.output import WorkerOutput
from dapo.types import Problem

PROBLEM = Problem("1", "Q", "A", fields={"digits": [1, 2]})


def open_pool(name: str, *, memory_gib: float = 1.0, **options: Any) -> EnvironmentPool:
    config = EnvironmentConfig(name=name, **{"workers": 1, "timeout_s": 30.0, **options})
    return EnvironmentPool(config, memory_gib=memory_gib, output=WorkerOutput())


class Echo:
    """Answers each turn with its text until there were `turns` of them; pays the number of the
    turn.
    """

    def __init__(self, *, turns: int = 3, prompt: str | None = None) -> None:
        self.turns = turns
        self.prompt = prompt
        self.count = 0

    def reset(self, problem: Problem, seed: int) -> str | None:
        return None if self.prompt is None else f"{self.prompt} {seed % 7}"

    def step(self, action: str) -> StepResult:
        self.count += 1
        done = self.count >= self.turns
        return StepResult(
            f"{self.count}: {action}", reward=self.count, done=done, correct=done or None
        )

    def end(self) -> StepResult:
        return StepResult(reward=-0.5, done=True, correct=False)


class NamesTypes:
    """Begins with the types and texts of the problem's columns."""

    def reset(self, problem: Problem, seed: int) -> str:
        return ", ".join(f"{type(value).__name__} {value}" for value in problem.fields.values())

    def step(self, action: str) -> StepResult:
        return StepResult(done=True)


class Dice:
    """Throws a die of the global generator at each step, as many games do."""

    def reset(self, problem: Problem, seed: int) -> None:
        self.first = random.randint(1, 6)

    def step(self, action: str) -> StepResult:
        return StepResult(f"{self.first} {random.randint(1, 10**9)}")


class DrawsTwice:
    """Draws from the global generators in its constructor, and in `reset`."""

    def __init__(self) -> None:
        self.drawn = (random.random(), float(np.random.random()))

    def reset(self, problem: Problem, seed: int) -> str:
        return f"{self.drawn} {(random.random(), float(np.random.random()))}"

    def step(self, action: str) -> StepResult:
        return StepResult(done=True)


class Forgetful:
    """Answers with the time: no function of the seed and the actions."""

    def reset(self, problem: Problem, seed: int) -> None:
        pass

    def step(self, action: str) -> StepResult:
        if action == "exit":
            os._exit(3)
        return StepResult(str(time.monotonic_ns()))


class LocalEpisode:
    """The handle of an episode that is played in this process."""

    def __init__(self, environment: Environment, problem: Problem, seed: int) -> None:
        self.environment = environment
        self.num_calls = 1
        self.reset = self.latest = _done(
            {"prompt": prompt_to_json(environment.reset(problem, seed))}
        )
        self.is_closed = False

    def step(self, action: str) -> "Future[dict[str, Any]]":
        return self._answered(self.environment.step(action))

    def end(self) -> "Future[dict[str, Any]]":
        return self._answered(self.environment.end())

    def _answered(self, result: StepResult) -> "Future[dict[str, Any]]":
        self.num_calls = self.num_calls + 1
        self.latest = _done(result_to_json(result))
        return self.latest

    def close(self) -> None:
        self.num_calls = self.num_calls + 1
        self.is_closed = True


class LocalPool:
    """An EnvironmentPool without processes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.opened = list[LocalEpisode]()

    def open(self, problem: Problem, seed: int) -> LocalEpisode:
        self.opened.append(LocalEpisode(self.make(), problem, seed))
        return self.opened[-1]

    def close(self) -> None:
        pass


def _done(value: dict[str, Any]) -> "Future[dict[str, Any]]":
    future: Future[dict[str, Any]] = Future()
    future.set_result(value)
    return future


class Digits:
    """Pays 0.25 for each of two turns, and ends with the third, right or wrong by the global random
    state.

    Each step takes up to `delay_s`, by a generator of its own. If the file `to_die` exists, the
    next second turn removes it and kills the process.
    """

    def __init__(self, *, delay_s: float = 0.0, to_die: str | None = None) -> None:
        self.count = 0
        self.delay_s = delay_s
        self.clock = random.SystemRandom()
        self.to_die = to_die

    def reset(self, problem: Problem, seed: int) -> None:
        self.count = 0

    def step(self, action: str) -> StepResult:
        time.sleep(self.delay_s * self.clock.random())
        self.count += 1
        if self.count == 2 and self.to_die is not None and os.path.exists(self.to_die):
            os.remove(self.to_die)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count < 3:
            return StepResult(f"turn {random.randint(1, 9)}", reward=0.25)
        return self.end()

    def end(self) -> StepResult:
        correct = random.random() < 0.5
        return StepResult(reward=1.0 if correct else -1.0, done=True, correct=correct)


class Short:
    """Ends with the first turn, judged as by `is_short`."""

    def reset(self, problem: Problem, seed: int) -> None:
        pass

    def step(self, action: str) -> StepResult:
        correct = len(action) < 20
        return StepResult(reward=1.0 if correct else -1.0, done=True, correct=correct)

    def end(self) -> StepResult:
        return StepResult(reward=-1.0, done=True, correct=False)


def is_short(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[bool]:
    """Right if the model ended the response within 64 tokens, and its text is short."""
    return [
        len(text) < 20 and len(ids) < 64
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


class Broken:
    """Begins, and answers nothing."""

    def reset(self, problem: Problem, seed: int) -> None:
        pass

    def step(self, action: str) -> StepResult:
        raise ConnectionError("the game server is down")

    def end(self) -> StepResult:
        return self.step("")


class BrokenTool(Digits):
    """Counts each turn as a tool call that fails."""

    def step(self, action: str) -> StepResult:
        return replace(super().step(action), tool_calls=1, tool_errors=1)


class Loud(Digits):
    """Prints at each turn."""

    def step(self, action: str) -> StepResult:
        print("a turn is played")
        return super().step(action)


class Hunt:
    """Ends right with the first turn that has a digit, and takes some of the reward for each one
    that has none.
    """

    def reset(self, problem: Problem, seed: int) -> None:
        self.seed = seed

    def step(self, action: str) -> StepResult:
        if any(character.isdigit() for character in action):
            return StepResult(reward=1.0, done=True, correct=True)
        return StepResult(f"{self.seed % 97} {len(action)}", reward=-0.125 * len(action))

    def end(self) -> StepResult:
        return StepResult(reward=-1.0, done=True, correct=False)
