"""A user's own function as a verifier: `(problem, response)`, verl's `compute_score`, or TRL's
reward function.
"""

import contextlib
import inspect
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar

from dapo.core.errors import DataError, RewardError
from dapo.core.loading import Failure, own_name, try_call
from dapo.rewards.verdicts import (
    TokenIds,
    error_verdict,
    shown_result,
    to_correct,
    to_verdict,
    to_verdicts,
)
from dapo.types import EpisodeText, Problem, Verdict

if TYPE_CHECKING:
    import asyncio


class EventLoop:
    """An event loop in its own thread from the first coroutine on, also under a running loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, result: Any) -> Any:
        """The result, awaited if it is awaitable."""
        if not inspect.isawaitable(result):
            return result
        # most functions need none, and every verifier process would wait for its import
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_run, args=(self._loop,), daemon=True, name="dapo-reward-coroutines"
            ).start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # would end the loop, and leave the caller waiting for it
        raise RuntimeError(f"sys.exit({error.code!r})") from None


def _run(loop: "asyncio.AbstractEventLoop") -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    with contextlib.closing(loop):
        loop.run_forever()


NOT_APPLIED = "no reward function applied"
_OF_MESSAGES = (
    "; the prompt is a list of messages, so a completion is [{'role': ..., 'content': ...}]: use"
    " c[0]['content']"
)
_GIVEN = ("prompts", "completions", "completion_ids")
_OF_VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})


def function_verifier(
    path: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> "FunctionVerifier | RewardFunction":
    """Wrap a callable as a verifier; a class is instantiated with the options.

    Parameters named `problem` and `response` mean dapo's own protocol, `solution_str` means verl's
    `compute_score`, any others mean TRL's reward functions. `def` and `async def` both work; `path`
    is the name in messages. Raises RewardError if none of them fits.
    """
    path = own_name(path)
    if inspect.isclass(function):
        instance = try_call(lambda: function(**options))
        options_text = ", ".join(options) or "no options"
        if isinstance(instance, Failure):
            raise RewardError(f"{path!r}: making one with {options_text} {instance.reason}")
        function = instance
        options = {}
    parameters = _keyword_parameters(path, function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    keywords = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    _check_options(path, options, None if takes_any else keywords)
    required = (
        frozenset(name for name, p in keywords.items() if p.default is p.empty) - options.keys()
    )
    if {"problem", "response"} <= keywords.keys():
        if unfilled := sorted(required - {"problem", "response"}):
            raise RewardError(
                f"{path!r} needs {', '.join(unfilled)}: set reward.options.{unfilled[0]}"
            )
        return FunctionVerifier(path, function, options, EventLoop())
    if "solution_str" in keywords:
        named = frozenset(keywords)
        accepted_columns = named | _OF_VERL if takes_any else named
        return ScoreFunction(path, function, options, EventLoop(), required, accepted_columns)
    accepted = None if takes_any else frozenset(keywords)
    if not takes_any and "completions" not in keywords:
        raise RewardError(
            f"{path!r} takes ({', '.join(keywords)}): expected (problem, response), or keywords as"
            " in TRL: completions, and of prompts, completion_ids, answer and other data columns"
            " those it uses; or as in verl: solution_str, and of data_source, ground_truth,"
            " extra_info those it uses"
        )
    return RewardFunction(path, function, options, EventLoop(), required, accepted)


@dataclass(frozen=True)
class _UserFunction:
    """A user's function with its options."""

    name: str  # in messages
    function: Callable[..., Any]
    options: Mapping[str, Any]
    loop: EventLoop
    required: frozenset[str] = frozenset()  # parameters without a default that are no options
    accepted: frozenset[str] | None = None  # the names of its parameters; None: it takes `**kwargs`
    given: ClassVar[frozenset[str]] = frozenset()  # parameters that are no data columns

    @property
    def needed_columns(self) -> frozenset[str]:
        return self.required - self.given

    def _missing(self, problem: Problem) -> Verdict | None:
        if absent := missing_columns(self.needed_columns, problem):
            return self._error(
                f"needs {absent}, which the problem does not have; it has {_own(problem)}"
            )
        return None

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        return try_call(lambda: self.loop.finish(self.function(**arguments)))

    def _error(self, reason: str) -> Verdict:
        return error_verdict(f"{self.name} {reason}")


@dataclass(frozen=True)
class FunctionVerifier(_UserFunction):
    """A function `(problem, response)` that returns a Verdict, a bool, a number or None."""

    def __call__(self, problem: Problem, response: str) -> Verdict:
        return self.judge(problem, response) or error_verdict(f"{self.name}: {NOT_APPLIED}")

    def judge(self, problem: Problem, response: str) -> Verdict | None:
        """Return the function's result as a verdict, None if it does not apply, or an error."""
        result = self._call({"problem": problem, "response": response, **self.options})
        if isinstance(result, Failure):
            return self._error(result.reason)
        return to_verdict(self.name, result)


@dataclass(frozen=True)
class ScoreFunction(FunctionVerifier):
    """A function in verl's convention, `compute_score(data_source, solution_str, ...)`.

    It receives the data columns in its signature; with `**kwargs` also verl's four, including
    `extra_info`. It returns a number, a bool, None, or a dict whose `score` is one of these. In a
    dict, `acc`, equal to 1 or 0, sets whether the response is correct, and `pred`, a string or a
    number, its answer for majority votes.
    """

    given = frozenset({"solution_str", "extra_info"})

    def judge(self, problem: Problem, response: str) -> Verdict | None:
        if (failure := self._missing(problem)) is not None:
            return failure
        columns = {"extra_info": None, **columns_of(problem), "solution_str": response}
        accepted = self.accepted or frozenset()
        arguments = {name: value for name, value in columns.items() if name in accepted}
        result = self._call({**arguments, **self.options})
        if isinstance(result, Failure):
            return self._error(result.reason)
        if not isinstance(result, Mapping):
            return to_verdict(self.name, result)
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "(none)"
            return self._error(f"returned a dict without score; its keys: {keys[:80]}")
        verdict = to_verdict(self.name, result["score"])
        if verdict is None or verdict.error is not None:
            return verdict
        correct = verdict.correct
        if "acc" in result:
            correct = to_correct(result["acc"])
            if correct is None:
                return self._error(
                    f"returned acc={shown_result(result['acc'])}, expected a value equal to 1 or 0"
                )
        return replace(verdict, correct=correct, answer=_vote(result.get("pred")))


def _vote(pred: Any) -> str | None:
    """Return the answer of a response as text; None for what is neither a text nor a number."""
    if isinstance(pred, str):
        return pred
    return str(pred) if isinstance(pred, Number) and not isinstance(pred, bool) else None


@dataclass(frozen=True)
class RewardFunction(_UserFunction):
    """A reward function in TRL's convention: keyword arguments, lists over a group's responses.

    `prompts`, `completions` (texts, or `[{"role": "assistant", "content": text}]` where the prompt
    is a list of messages; an episode's messages), `completion_ids`, and every column of the problem
    by its name, limited to its signature. It returns a list with a number, a bool or None for each
    response.
    """

    given = frozenset(_GIVEN)

    def __call__(self, problem: Problem, response: str) -> Verdict:
        return self.judge_group(problem, [response], [()])[0] or error_verdict(
            f"{self.name}: {NOT_APPLIED}"
        )

    def judge_group(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> list[Verdict | None]:
        """Call the function for the group, or per response if that raises, to find the offender."""
        if (failure := self._missing(problem)) is not None:
            return [failure] * len(responses)
        arguments = self._arguments(problem, responses, token_ids)
        result = self._call(arguments)
        if not isinstance(result, Failure):
            return to_verdicts(self.name, result, len(responses))
        if len(responses) == 1:
            has_messages = isinstance(arguments.get("completions", [""])[0], list)
            # the exception of a text's method, called on messages
            is_confused = has_messages and re.search(r"\b(list|dict)\b", result.reason)
            return [self._error(result.reason + (_OF_MESSAGES if is_confused else ""))]
        return [
            self.judge_group(problem, [text], [ids])[0]
            for text, ids in zip(responses, token_ids, strict=True)
        ]

    def _arguments(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> dict[str, Any]:
        columns = {name: [value] * len(responses) for name, value in columns_of(problem).items()}
        columns["completion_ids"] = [list(ids) for ids in token_ids]
        if isinstance(problem.prompt, str):
            columns["prompts"] = [problem.prompt] * len(responses)
            columns["completions"] = list(responses)
        else:
            # a list of its own for each response: some functions pop messages
            columns["prompts"] = [[dict(message) for message in problem.prompt] for _ in responses]
            columns["completions"] = [
                [{"role": "assistant", "content": text}] for text in responses
            ]
        if any(isinstance(text, EpisodeText) for text in responses):
            columns["completions"] = [
                (
                    [dict(message) for message in text.episode.messages]
                    if isinstance(text, EpisodeText)
                    else text
                )
                for text in responses
            ]
        columns.update(self.options)
        return {
            name: value
            for name, value in columns.items()
            if self.accepted is None or name in self.accepted
        }


def _keyword_parameters(path: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(
            f"{path!r} has no signature that Python can read: wrap it in your own function"
        ) from None
    unnamed = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if unnamed:
        raise RewardError(
            f"{path!r} takes {', '.join(unnamed)} by position only; arguments are given by name"
        )
    return {name: p for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}


def _check_options(
    path: str, options: Mapping[str, Any], keywords: Mapping[str, Any] | None
) -> None:
    reserved = {"problem", "response", "solution_str", *_GIVEN}
    for option in options:
        if option in reserved:
            raise RewardError(
                f"{path!r}: {option!r} is an argument of every call and cannot be an option"
            )
        if keywords is not None and option not in keywords:
            available = ", ".join(name for name in keywords if name not in reserved) or "none"
            raise RewardError(f"{path!r} has no option {option!r}; it has {available}")


def columns_of(problem: Problem) -> dict[str, Any]:
    """Return a problem's columns by name, each with the value that the data has.

    Where the data has no column of that name, `prompt` and `source` are the problem's, `answer` its
    reference answer if it has one (as text), `data_source` the source, and `ground_truth` that of
    `reward_model`, as in verl, or else the reference answer.
    """
    columns: dict[str, Any] = {
        "prompt": problem.prompt,
        "source": problem.source,
        "data_source": problem.source,
    }
    verl_reward = problem.fields.get("reward_model")
    if problem.answer:
        columns["answer"] = problem.answer
        columns["ground_truth"] = problem.answer
    if isinstance(verl_reward, Mapping) and "ground_truth" in verl_reward:
        columns["ground_truth"] = verl_reward["ground_truth"]
    return columns | dict(problem.fields)


def missing_columns(required: Collection[str], problem: Problem) -> str:
    """Return the needed columns that a problem lacks, separated by commas."""
    return ", ".join(sorted(set(required).difference(columns_of(problem)))) if required else ""


def require_columns(
    problems: Sequence[Problem], required: Mapping[str, Collection[str]], *, where: str
) -> None:
    """Raise DataError if rows of the source `where` lack a column that a function needs."""
    for name, columns in required.items():
        lacking = [i for i, problem in enumerate(problems) if missing_columns(columns, problem)]
        if not lacking:
            continue
        first = problems[lacking[0]]
        if len(lacking) == 1:
            rows = f"row {lacking[0] + 1}"
        else:
            rows = f"{len(lacking):,} rows (the first: {lacking[0] + 1})"
        raise DataError(
            f"{name} needs {missing_columns(columns, first)}, which {rows} of the {len(problems):,}"
            f" of {where} do not have; columns there: {_own(first)}. Rename a column, give the"
            " parameter a default value, or set it in reward.options"
        )


def _own(problem: Problem) -> str:
    """Return the names of a problem's columns, for a message."""
    return ", ".join(
        sorted({"prompt", "source", *problem.fields, *(["answer"] if problem.answer else [])})
    )
