"""Tools as an environment: functions, and classes in TRL's convention with methods as tools."""

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.loading import Failure, try_call
from dapo.core.text import quoted
from dapo.data.begun import is_begun_by_environment
from dapo.environments.calls import CallForm, CallReader, WrongCall, tool_schema
from dapo.environments.environment import StepResult
from dapo.rewards.verifiers.function import EventLoop, columns_of
from dapo.types import Message, Problem, Prompt

_NO_TOOLS = ("reset", "get_reward", "close")


class ToolEnvironment:
    """Calls the tools that a turn names; a turn that calls none ends the episode.

    `state` is an object in the convention of TRL's `environment_factory`: `reset(**columns)` may
    return a text that is appended to the prompt, every other public method is a tool, and
    `get_reward()`, if there is one, gives the reward of the whole episode at its end. Methods may
    be coroutines. A tool that raises is answered with the text of its error.
    """

    def __init__(
        self,
        state: Any,
        functions: Mapping[str, Callable[..., Any]],
        schemas: Sequence[Mapping[str, Any]],
        form: CallForm,
        begun: str = "",
    ) -> None:
        """`form` and `begun` are those of a CallReader."""
        self._state = state
        self._tools = {**methods_of(state), **functions}
        self._reader = CallReader(form, schemas, begun=begun)
        self._loop = EventLoop()

    def reset(self, problem: Problem, seed: int) -> str | Sequence[Message] | None:
        reset = getattr(self._state, "reset", None)
        if reset is None:
            return None
        columns = columns_of(problem)
        parameters = inspect.signature(reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        prompt = "" if is_begun_by_environment(problem) else problem.prompt
        return _joined(prompt, self._loop.finish(reset(**columns)))

    def step(self, action: str) -> StepResult:
        calls = self._reader.read(action)
        if not calls:
            return self.end()
        answers = [
            call.error if isinstance(call, WrongCall) else self._call(call.name, call.arguments)
            for call in calls
        ]
        messages = []
        num_errors = 0
        for call, answer in zip(calls, answers, strict=True):
            text = str(answer.reason) if isinstance(answer, Failure) else answer
            num_errors += isinstance(call, WrongCall) or isinstance(answer, Failure)
            message = {"role": "tool", "content": text}
            if call.name is not None:
                message["name"] = call.name
            messages.append(message)
        return StepResult(messages, tool_calls=len(calls), tool_errors=num_errors)

    def end(self) -> StepResult:
        get_reward = getattr(self._state, "get_reward", None)
        return StepResult(
            reward=None if get_reward is None else self._loop.finish(get_reward()), done=True
        )

    def close(self) -> None:
        close = getattr(self._state, "close", None)
        if close is not None:
            self._loop.finish(close())

    def method_of_state(self, call: str) -> object:
        """Return the method of the user's object from which the answer to a call comes."""
        return getattr(self._state, "reset" if call == "reset" else "get_reward", None)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str | Failure:
        result = try_call(lambda: _shown(self._result(name, arguments)))
        if isinstance(result, Failure):
            return Failure("Error: " + result.reason.removeprefix("raised "))
        return result

    def _result(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return what a tool returns; of an asynchronous generator, the list of its items."""
        result = self._loop.finish(self._tools[name](**arguments))
        if isinstance(result, AsyncIterator):
            return self._loop.finish(_items_of(result))
        return result


async def _items_of(result: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in result]


def _shown(result: Any) -> str:
    """Return what a tool returned as the policy reads it; of a generator, the list of its items."""
    if isinstance(result, str):
        return result
    if isinstance(result, Iterator):
        result = list(result)
    # parts of text, as `reset` may return
    if isinstance(result, list) and result and all(map(_is_text, result)):
        return "".join(part["text"] for part in result)
    try:
        return json.dumps(result, ensure_ascii=False, default=_as_json)
    except (TypeError, ValueError):  # keys that JSON lacks, or a list that contains itself
        return str(result)


def _as_json(value: Any) -> Any:
    """Return numbers and arrays of numpy and torch as those of Python, and else a text."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


def methods_of(state: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of an object that are tools, by name.

    They are those of its class, and what its constructor binds to it; a static method is a helper.
    """
    if state is None:
        return {}
    kind = type(state)
    methods = {}
    for name in dir(state):
        if name.startswith("_") or name in _NO_TOOLS:
            continue
        # without calling it: a property may need what `reset` sets
        member = inspect.getattr_static(state, name)
        if inspect.isclass(member) or isinstance(member, staticmethod | property):
            continue
        is_of_class = callable(getattr(kind, name, None))
        if not is_of_class and not inspect.ismethod(member):
            continue
        method = getattr(state, name)
        if callable(method):
            methods[name] = method
    return methods


def schemas_of(state: Any, functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schemas of the tools.

    Raises DataError for one without types or descriptions, ConfigError for equal names.
    """
    methods = methods_of(state)
    if twice := methods.keys() & functions.keys():
        raise ConfigError(
            f"environment.tools: the environment has a method {min(twice)}, too; rename the"
            " function"
        )
    schemas = []
    for name, function in (methods | dict(functions)).items():
        schema = tool_schema(function)
        # a decorator or a second name of a function leaves another one in it
        schema["function"]["name"] = name
        schemas.append(schema)
    return schemas


def _joined(prompt: Prompt, observation: Any) -> str | Sequence[Message] | None:
    """Append what `reset` returned to the prompt's last message; None if it returned nothing.

    `reset` returns a text, or as TRL's classes may a list of parts of text; a list of messages is
    the whole prompt.
    """
    if observation is None or observation in ("", []):
        return None
    text = observation
    if isinstance(observation, list | tuple) and all(_is_part(part) for part in observation):
        if not all(isinstance(part.get("text"), str) for part in observation):
            raise TypeError(
                f"reset returned {quoted(observation)}; of parts only those of text can be shown"
            )
        text = "".join(part["text"] for part in observation)
    if not isinstance(text, str):
        messages: Sequence[Message] = text  # the pool refuses what is none
        return messages
    if isinstance(prompt, str):
        return f"{prompt}{text}"
    *earlier, last = [dict(message) for message in prompt]
    content: Any = last.get("content")
    if isinstance(content, list):
        return [*earlier, {**last, "content": [*content, {"type": "text", "text": text}]}]
    return [*earlier, {**last, "content": f"{content or ''}{text}"}]


def _is_text(value: object) -> bool:
    return isinstance(value, Mapping) and set(value) == {"type", "text"} and value["type"] == "text"


def _is_part(value: object) -> bool:
    return isinstance(value, Mapping) and "type" in value and "role" not in value
