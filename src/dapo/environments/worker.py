"""The process that plays episodes for an EnvironmentPool. Imports no torch."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.core.loading import OUT_OF_MEMORY, Failure, place_of, try_call
from dapo.environments.adapters import environment_maker
from dapo.environments.adapters.tools import ToolEnvironment
from dapo.environments.environment import Environment, StepResult, prompt_to_json, result_to_json
from dapo.processes.worker import Answer, run
from dapo.rewards.verdicts import problem_of_frame
from dapo.rewards.verifiers.function import EventLoop

_MAX_REASON_CHARS = 1000
_WRONG_RESULT = (TypeError, ValueError, ArithmeticError)
_LOOP = EventLoop()
"""Awaits methods that are coroutines, of all episodes of this process."""


@dataclass
class _Episode:
    """An episode with its own state of the global random generators, which many games use."""

    environment: Environment
    random_state: Any
    numpy_state: Any

    def call(
        self, function: "Callable[[], dict[str, Any] | Failure]"
    ) -> "dict[str, Any] | Failure":
        random.setstate(self.random_state)
        np.random.set_state(self.numpy_state)
        result = try_call(function)
        self.random_state = random.getstate()
        self.numpy_state = np.random.get_state()
        return result

    def close(self) -> dict[str, Any]:
        close = getattr(self.environment, "close", None)
        if close is not None:
            _LOOP.finish(close())
        return {}


def _playing(spec: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Return the tools of an environment, and a function that plays episodes with it.

    Raises ConfigError or DataError.
    """
    maker = environment_maker(**spec)
    episodes = dict[str, _Episode]()

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        result = _answer(maker.make, episodes, message)
        if not isinstance(result, Failure):
            return result
        # the memory may still be full
        return {
            "error": result.reason[:_MAX_REASON_CHARS],
            "needs_restart": OUT_OF_MEMORY in result.reason,
        }

    return {"tools": maker.tools, "has_reward": maker.has_reward}, answer


def _answer(
    make: Callable[..., Environment], episodes: dict[str, _Episode], message: dict[str, Any]
) -> dict[str, Any] | Failure:
    name = message["episode"]
    seed = message.get("seed", 0)
    if message["call"] == "reset":
        problem = problem_of_frame(message["problem"])
        random.seed(seed)
        np.random.seed(seed % 2**32)
        game = try_call(lambda: make(message["form"], message["begun"]))
        if isinstance(game, Failure):
            return game
        # behind what the constructor has drawn, which `reset` would draw again
        episodes[name] = _Episode(game, random.getstate(), np.random.get_state())
        return episodes[name].call(lambda: _prompt(game, _LOOP.finish(game.reset(problem, seed))))
    if message["call"] == "close" and name not in episodes:  # its constructor raised
        return {}
    episode = episodes[name]
    environment = episode.environment
    if message["call"] == "step":
        action = message["action"]
        return episode.call(
            lambda: _result(environment, "step", _LOOP.finish(environment.step(action)))
        )
    if message["call"] == "end":
        end = getattr(environment, "end", None) or StepResult
        return episode.call(lambda: _result(environment, "end", _LOOP.finish(end())))
    del episodes[name]
    return episode.call(episode.close)


def _prompt(environment: Environment, prompt: Any) -> dict[str, Any] | Failure:
    """Return what `reset` returned, or why it cannot be used, and where it is defined."""
    place = place_of(_users_method(environment, "reset"))
    if isinstance(prompt, str) and not prompt.strip():
        advice = "return the prompt, or None for the problem's own"
        return Failure(f"reset returned an empty text; {advice}{place}")
    try:
        return {"prompt": prompt_to_json(prompt)}
    except _WRONG_RESULT as error:
        return Failure(f"{error}{place}")


def _result(environment: Environment, call: str, value: Any) -> dict[str, Any] | Failure:
    """Return what a method returned, or why it cannot be used, and where it is defined."""
    try:
        return result_to_json(value)
    except _WRONG_RESULT as error:
        method = _users_method(environment, call)
        name = getattr(method, "__name__", call)
        return Failure(f"{name}: {error}{place_of(method)}")


def _users_method(environment: Environment, call: str) -> object:
    """Return the method that answers a call; that of the user, where an adapter stands before it."""
    if isinstance(environment, ToolEnvironment):
        return environment.method_of_state(call)
    return getattr(environment, call, None)


if __name__ == "__main__":
    run(_playing)
