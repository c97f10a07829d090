"""The interface of an environment: it answers the policy's turns with observations and rewards."""

import json
import math
import operator
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dapo.core.errors import DataError
from dapo.core.text import quoted
from dapo.core.verifier_limits import MAX_SCORE
from dapo.types import Message, Problem, content_text

__all__ = ["Environment", "StepResult"]
_MAX_TOOL_CALLS = 10**6


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to one turn.

    Example: `StepResult("The calculator shows 8798")`, and after the next turn
    `StepResult(reward=1.0, done=True, correct=True)`.
    """

    observation: str | Sequence[Message] = ""
    """What the policy reads next.

    A text is a message of role `tool` after a call of one of the environment's tools, else `user`.
    """
    reward: float | None = None
    """The reward of this turn; None: 0."""
    done: bool = False
    """Whether the episode is over."""
    correct: bool | None = None
    """With `done`, whether the episode was solved; None: only the rewards count."""
    tool_calls: int = 0
    """The number of tools that the turn called."""
    tool_errors: int = 0
    """The number of those calls that failed, and whose error the policy reads."""


class Environment(Protocol):
    """Plays one episode at a time.

    Every answer is a function of the problem, the seed and the actions so far.
    """

    def reset(self, problem: Problem, seed: int) -> str | Sequence[Message] | None:
        """Begin an episode. Returns the prompt; None: the problem's own prompt."""

    def step(self, action: str) -> StepResult:
        """Answer the text of a turn."""

    def end(self) -> StepResult:
        """Give the last reward of an episode that is cut because no tokens or turns are left.

        Optional.
        """

    def close(self) -> None:
        """Free the episode's resources. Optional."""


def prompt_to_json(prompt: Any) -> Any:
    """Check what `reset` returned, and return it as JSON values.

    Raises TypeError if it is neither None, a text nor a list of messages.
    """
    if prompt is None or isinstance(prompt, str):
        return prompt
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if (
        not is_list
        or not prompt
        or not all(isinstance(message, Mapping) and _has_role(message) for message in prompt)
    ):
        expected = "a text or a list of messages with the texts `role` and `content`"
        advice = ""
        # as in Gymnasium: the observation and information
        if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], str):
            advice = "; return the observation alone"
        if isinstance(prompt, Mapping) and _has_role(prompt):
            advice = "; put the message into a list"
        raise TypeError(
            f"reset returned {type(prompt).__name__} {str(prompt)[:80]!r}, expected"
            f" {expected}{advice}"
        )
    from dapo.data.sources.rows import as_message  # imports the configuration, which takes long

    try:
        messages = [
            dict(as_message(message, f"message {i}")) for i, message in enumerate(prompt, start=1)
        ]
    except DataError as error:
        raise TypeError(f"reset returned messages that cannot be shown: {error}") from None
    json.dumps(messages)  # they are sent to another process
    return messages


def _has_role(message: Mapping[Any, Any]) -> bool:
    """Return True if a message has a role and a content, which may be null or a list of parts."""
    if not isinstance(message.get("role"), str) or "content" not in message:
        return False
    return isinstance(message["content"], str | list | None)


def result_to_json(result: Any) -> dict[str, Any]:
    """Check a StepResult, and return its fields as JSON values.

    Raises TypeError or ValueError with the reason.
    """
    if not isinstance(result, StepResult):
        raise TypeError(
            f"expected a StepResult, got {type(result).__name__}{_as_step_result(result)}"
        )
    observation = result.observation
    if not isinstance(observation, str):
        observation = _messages(observation, "the observation is")
    reward = result.reward
    if reward is not None:
        reward = _number(reward)
        if not math.isfinite(reward) or abs(reward) > MAX_SCORE:
            raise ValueError(
                f"the reward is {reward:g}, expected a finite number of at most {MAX_SCORE:g} in"
                " size"
            )
    return {
        "observation": observation,
        "reward": reward,
        "done": _flag("done", result.done),
        "correct": None if result.correct is None else _flag("correct", result.correct),
        "tool_calls": _count("tool_calls", result.tool_calls),
        "tool_errors": _count("tool_errors", result.tool_errors),
    }


def _as_step_result(result: Any) -> str:
    """Return advice for a result in another form, such as the tuples of Gym; empty if none."""
    if isinstance(result, tuple) and len(result) == 5:
        return "; return StepResult(observation, reward, terminated or truncated)"
    if isinstance(result, tuple) and len(result) in (3, 4):
        return "; return StepResult(observation, reward, done)"
    if isinstance(result, Mapping):
        return "; return StepResult(observation, reward, done)"
    if isinstance(result, str):
        return "; return StepResult(observation)"
    if isinstance(result, int | float):
        return "; return StepResult(reward=REWARD, done=True)"
    if result is None:
        return "; each path through it must return one"
    if isinstance(result, Awaitable):
        return "; write `return await` in place of `return`"
    if isinstance(result, Iterator):
        return "; write `return` in place of `yield`"
    return ""


def _number(reward: Any) -> float:
    """Return a reward as a number; also one of numpy or torch. Raises TypeError if it is none."""
    try:
        if not isinstance(reward, str | bytes):
            return float(reward)
    except (TypeError, ValueError, RuntimeError):  # a list, a tensor of several numbers
        pass
    raise TypeError(
        f"the reward is {type(reward).__name__} {quoted(reward)}, expected a number or None"
    )


def _flag(name: str, value: Any) -> bool:
    if value not in (True, False):  # bool("no") is True
        raise TypeError(f"{name} is {type(value).__name__} {quoted(value)}, expected True or False")
    return bool(value)


def _count(name: str, value: Any) -> int:
    number = operator.index(value)
    if not 0 <= number <= _MAX_TOOL_CALLS:
        raise ValueError(f"{name} is {number}, expected a number from 0 to {_MAX_TOOL_CALLS:,}")
    return number


def _messages(value: Any, what: str) -> list[dict[str, str]]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not is_list or not all(_is_message(item) for item in value):
        expected = "a text or a list of messages with the texts `role` and `content`"
        raise TypeError(f"{what} {type(value).__name__} {str(value)[:80]!r}, expected {expected}")
    messages = []
    for message in value:
        texts = {str(name): str(item) for name, item in message.items() if item is not None}
        texts["content"] = content_text(message)
        messages.append(texts)
    return messages


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and _is_text_part(part) for part in content)
    return isinstance(content, str)


def _is_text_part(part: Mapping[Any, Any]) -> bool:
    return part.get("type", "text") == "text" and isinstance(part.get("text"), str)
