"""A user's own function as a verifier: `(problem, response)`, or TRL's calling convention for a group."""

import asyncio
import contextlib
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.core.errors import RewardError
from dapo.core.loading import Failure, load_callable, try_call
from dapo.rewards.verdicts import TokenIds, error_verdict
from dapo.rewards.verifiers.results import to_verdict, to_verdicts
from dapo.types import Problem, Verdict


class EventLoop:
    """An event loop in its own thread, started by the first coroutine; works under a running loop as well."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, result: Any) -> Any:
        """The result itself, or what it yields if it is awaitable."""
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="dapo-reward-coroutines").start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # would end the loop, and leave the caller waiting for it
        raise RuntimeError(f"sys.exit({error.code!r})") from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    with contextlib.closing(loop):
        loop.run_forever()


NOT_APPLIED = "no reward function applied"
_GIVEN = ("prompts", "completions", "completion_ids")


def load_function(path: str, options: Mapping[str, Any]) -> "FunctionVerifier | RewardFunction":
    """The callable at `module:name` as a verifier; a class is instantiated with the options, a function gets them.

    Parameters named `problem` and `response` make it a verifier of our own protocol, anything else is called as TRL
    calls reward functions. `def` and `async def` both work. Raises RewardError if it cannot be either.
    """
    function = load_callable(path, error=RewardError)
    if inspect.isclass(function):
        made, given = try_call(lambda: function(**options)), ", ".join(options) or "no options"
        if isinstance(made, Failure):
            raise RewardError(f"{path!r}: making one with {given} {made.reason}")
        function, options = made, {}
    parameters = _keyword_parameters(path, function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    _check_options(path, options, None if takes_any else named)
    if {"problem", "response"} <= named.keys():
        return FunctionVerifier(path, function, options, EventLoop())
    if not takes_any and "completions" not in named:
        raise RewardError(
            f"{path!r} takes ({', '.join(named)}): expected (problem, response), or keywords as in TRL: completions, "
            "and of prompts, completion_ids, answer and other data columns those it uses"
        )
    required = frozenset(name for name, p in named.items() if p.default is p.empty)
    return RewardFunction(path, function, options, EventLoop(), required, None if takes_any else frozenset(named))


@dataclass(frozen=True)
class FunctionVerifier:
    """A user's `(problem, response)`: returns a Verdict, a bool, a number, or None where it does not apply."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    loop: EventLoop

    def __call__(self, problem: Problem, response: str) -> Verdict:
        return self.judge(problem, response) or error_verdict(f"{self.name}: {NOT_APPLIED}")

    def judge(self, problem: Problem, response: str) -> Verdict | None:
        """The function's result as a verdict, None where it does not apply; what is wrong with it is its error."""
        result = try_call(lambda: self.loop.finish(self.function(problem=problem, response=response, **self.options)))
        if isinstance(result, Failure):
            return error_verdict(f"{self.name} {result.reason}")
        return to_verdict(self.name, result)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function as TRL calls it: keywords, each a list over the responses of one group.

    `prompts`, `completions` (texts, or `[{"role": "assistant", "content": text}]` where the prompt is a list of
    messages), `completion_ids`, `answer`, `source`, and every field of the problem; what its signature does not accept
    is left out. It returns a list with a number, a bool or None for each response.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    loop: EventLoop
    required: frozenset[str]  # parameters without a default
    accepted: frozenset[str] | None  # the names of its parameters; None: it takes `**kwargs`

    def __call__(self, problem: Problem, response: str) -> Verdict:
        return self.judge_group(problem, [response], [()])[0] or error_verdict(f"{self.name}: {NOT_APPLIED}")

    def judge_group(self, problem: Problem, responses: Sequence[str], token_ids: TokenIds) -> list[Verdict | None]:
        """One call for the group. If it raises, one call per response, so that only the offender has an error."""
        columns = self._columns(problem, responses, token_ids)
        if missing := sorted(self.required - columns.keys()):
            has = ", ".join(sorted({"answer", "source", *problem.fields}))
            reason = f"{self.name} needs {', '.join(missing)}, which the problem does not have; it has {has}"
            return [error_verdict(reason) for _ in responses]
        result = try_call(lambda: self.loop.finish(self.function(**columns)))
        if not isinstance(result, Failure):
            return to_verdicts(self.name, result, len(responses))
        if len(responses) == 1:
            return [error_verdict(f"{self.name} {result.reason}")]
        return [self.judge_group(problem, [text], [ids])[0] for text, ids in zip(responses, token_ids, strict=True)]

    def _columns(self, problem: Problem, responses: Sequence[str], token_ids: TokenIds) -> dict[str, Any]:
        same = {"source": problem.source, **problem.fields, "answer": problem.answer}
        columns: dict[str, Any] = {name: [value] * len(responses) for name, value in same.items()}
        columns["completion_ids"] = [list(ids) for ids in token_ids]
        if isinstance(problem.prompt, str):
            columns["prompts"] = [problem.prompt] * len(responses)
            columns["completions"] = list(responses)
        else:
            # a list of its own for each response: some functions pop messages
            columns["prompts"] = [[dict(message) for message in problem.prompt] for _ in responses]
            columns["completions"] = [[{"role": "assistant", "content": text}] for text in responses]
        columns.update(self.options)
        return {name: value for name, value in columns.items() if self.accepted is None or name in self.accepted}


def _keyword_parameters(path: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"{path!r} does not say which arguments it takes: wrap it in your own function") from None
    unnamed = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if unnamed:
        raise RewardError(f"{path!r} takes {', '.join(unnamed)} by position only; arguments are given by name")
    return {name: p for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}


def _check_options(path: str, options: Mapping[str, Any], named: Mapping[str, Any] | None) -> None:
    reserved = {"problem", "response", *_GIVEN}
    for option in options:
        if option in reserved:
            raise RewardError(f"{path!r}: {option!r} is an argument of every call and cannot be an option")
        if named is not None and option not in named:
            known = ", ".join(name for name in named if name not in reserved) or "none"
            raise RewardError(f"{path!r} has no option {option!r}; it has {known}")
