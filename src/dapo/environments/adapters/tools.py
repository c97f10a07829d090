"""Tools as an environment: functions, and classes in TRL's convention, whose public methods are tools."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.loading import Failure, try_call
from dapo.environments.calls import CallForm, CallReader, WrongCall, tool_schema
from dapo.environments.environment import StepResult
from dapo.rewards.verifiers.function import EventLoop, columns_of
from dapo.types import Message, Problem, content_text

_NO_TOOLS = ("reset", "get_reward", "close")


class ToolEnvironment:
    """Calls the tools that a turn names; a turn that calls none ends the episode.

    `state` is an object in the convention of TRL's `environment_factory`: `reset(**columns)` may return a text that is
    appended to the prompt, every other public method is a tool, and `get_reward()`, if there is one, pays for the whole
    episode at its end. Methods may be coroutines. A tool that raises is answered with the text of its error.
    """

    def __init__(
        self,
        state: Any,
        functions: Mapping[str, Callable[..., Any]],
        schemas: Sequence[Mapping[str, Any]],
        form: CallForm,
    ) -> None:
        self._state, self._tools = state, {**methods_of(state), **functions}
        self._reader, self._loop = CallReader(form, schemas), EventLoop()

    def reset(self, problem: Problem, seed: int) -> str | Sequence[Message] | None:
        reset = getattr(self._state, "reset", None)
        if reset is None:
            return None
        columns = columns_of(problem)
        parameters = inspect.signature(reset).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        prompt: str | Sequence[Message] | None = _joined(problem.prompt, self._loop.finish(reset(**columns)))
        return prompt

    def step(self, action: str) -> StepResult:
        calls = self._reader.read(action)
        if not calls:
            return self.end()
        answers = [
            call.error if isinstance(call, WrongCall) else self._call(call.name, call.arguments) for call in calls
        ]
        names = [call.name for call in calls]
        texts = [str(answer.reason) if isinstance(answer, Failure) else answer for answer in answers]
        errors = [isinstance(call, WrongCall) or isinstance(a, Failure) for call, a in zip(calls, answers, strict=True)]
        messages = [
            {"role": "tool", "content": text, **({} if name is None else {"name": name})}
            for name, text in zip(names, texts, strict=True)
        ]
        return StepResult(messages, tool_calls=len(calls), tool_errors=sum(errors))

    def end(self) -> StepResult:
        get_reward = getattr(self._state, "get_reward", None)
        return StepResult(reward=None if get_reward is None else self._loop.finish(get_reward()), done=True)

    def close(self) -> None:
        close = getattr(self._state, "close", None)
        if close is not None:
            self._loop.finish(close())

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str | Failure:
        result = try_call(lambda: self._loop.finish(self._tools[name](**arguments)))
        if isinstance(result, Failure):
            return Failure("Error: " + result.reason.removeprefix("raised "))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def methods_of(state: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an object that are tools, by name."""
    if state is None:
        return {}
    names = [name for name in dir(type(state)) if not name.startswith("_") and name not in _NO_TOOLS]
    return {name: getattr(state, name) for name in names if callable(getattr(state, name))}


def schemas_of(state: Any, functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """The schemas of the tools. Raises DataError for one without types or descriptions, ConfigError for equal names."""
    methods = methods_of(state)
    if twice := methods.keys() & functions.keys():
        raise ConfigError(f"environment.tools: the environment has a method {min(twice)}, too; rename the function")
    return [tool_schema(function) for function in (methods | dict(functions)).values()]


def _joined(prompt: Any, text: Any) -> Any:
    """The prompt with the text that `reset` returned at its end; None where it returned none."""
    if not text:
        return None
    if not isinstance(text, str) or isinstance(prompt, str):
        return f"{prompt}{text}" if isinstance(text, str) else text
    *earlier, last = [dict(message) for message in prompt]
    return [*earlier, {**last, "content": f"{content_text(last)}{text}"}]
