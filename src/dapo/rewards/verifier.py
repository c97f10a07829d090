"""The interface of verifiers, and the table in which one is found by its name."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal, Protocol, TypeAlias, get_args, get_origin, runtime_checkable

from dapo.core.errors import RewardError
from dapo.core.loading import load_callable, try_call
from dapo.core.plugins import PluginTable
from dapo.core.text import did_you_mean
from dapo.rewards.verdicts import TokenIds
from dapo.rewards.verifiers.function import function_verifier
from dapo.types import Problem, Verdict


class Verifier(Protocol):
    """Judges one response.

    Never raises because of a response: one that it cannot judge gets an `error_verdict`.
    """

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """Return the verdict on `response` as an answer to `problem`."""


@runtime_checkable
class GroupVerifier(Protocol):
    """A verifier that judges all responses of a group in one call."""

    def judge_group(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> Sequence[Verdict | None]:
        """Return a verdict per response, None where it does not apply; `token_ids` in order."""


@runtime_checkable
class TemplateReader(Protocol):
    """A verifier that renders a chat template, which may read the clock."""

    template_time: datetime
    """The local time that the template reads as now; a run sets that of its first start."""


ANSWER_MARKERS: Mapping[str, str] = {
    "answer:": "a line `Answer: ...`",
    "boxed": "\\boxed{...}",
    "####": "`#### ...`",
}
"""How a prompt requests a marked answer, in lower case, and the name of the marker in messages."""
_FOLDER = "dapo.rewards.verifiers"
RowCheck: TypeAlias = Callable[[Problem], str | None]
"""Why no response to a problem can be judged; None if responses can be."""


@dataclass(frozen=True)
class Registration:
    """A row of VERIFIERS: the class of a verifier, and the facts needed before it is built."""

    factory: str
    """`module:Class` of the verifier; the constructor's parameters are its options."""
    binary: bool = False
    """Every verdict is right or wrong, so that reward.threshold has no effect."""
    score_options: Sequence[str] = ()
    """The options that change scores alone, never right or wrong, so that accuracies compare."""
    reads_answer: Callable[[Mapping[str, Any]], bool] = lambda options: False
    """Whether, with these options, every row needs a reference answer."""
    markers: Sequence[str] = ()
    """The markers of ANSWER_MARKERS that it reads an answer from; empty if it reads unmarked
    answers as well.
    """
    check: Callable[[str, Mapping[str, Any]], RowCheck] | None = None
    """Builds the check of a data set's rows, from the verifier's name and options; `_by_verdict`
    where a verdict on an empty response is cheap, and an error exactly for rows that cannot be
    judged.
    """


def _by_verdict(name: str, options: Mapping[str, Any]) -> RowCheck:
    verifier = get_verifier(name, **options)
    return lambda problem: verifier(problem, "").error


def _by_tests(name: str, options: Mapping[str, Any]) -> RowCheck:
    from dapo.rewards.verifiers.code import CodeVerifier

    return partial(CodeVerifier.check_problem, options=options)


def _always(options: Mapping[str, Any]) -> bool:
    return True


def _for_groups(options: Mapping[str, Any]) -> bool:
    """Return True if the reference is the pattern, or is compared with its captured group."""
    pattern = options.get("pattern")
    if pattern is None:
        return True
    # the constructor names what is no pattern
    compiled = try_call(lambda: re.compile(pattern))
    return isinstance(compiled, re.Pattern) and compiled.groups > 0


_OWN_VERIFIERS: Mapping[str, Registration] = {
    "choice": Registration(
        f"{_FOLDER}.choice:ChoiceVerifier", binary=True, reads_answer=_always, check=_by_verdict
    ),
    # the answer where a row has no tests
    "code": Registration(f"{_FOLDER}.code:CodeVerifier", binary=True, check=_by_tests),
    "environment": Registration(f"{_FOLDER}.environment:EnvironmentVerifier"),  # of episodes
    "exact": Registration(
        f"{_FOLDER}.exact:ExactVerifier", binary=True, reads_answer=_always, check=_by_verdict
    ),
    "gsm8k": Registration(
        f"{_FOLDER}.gsm8k:Gsm8kVerifier",
        binary=True,
        score_options=("partial_credit",),
        reads_answer=_always,
        markers=("answer:", "boxed", "####"),
        check=_by_verdict,
    ),
    "gym": Registration(
        f"{_FOLDER}.gym:GymVerifier", check=lambda *_: resolve_name(f"{_FOLDER}.gym:missing_field")
    ),
    "json_schema": Registration(
        f"{_FOLDER}.json_schema:JsonSchemaVerifier", binary=True, check=_by_verdict
    ),
    "math": Registration(
        f"{_FOLDER}.math:MathVerifier",
        binary=True,
        reads_answer=_always,
        markers=("answer:", "boxed"),
        check=_by_verdict,
    ),
    "math_dapo": Registration(
        f"{_FOLDER}.math_dapo:MathDapoVerifier",
        binary=True,
        reads_answer=_always,
        markers=("answer:",),
        check=lambda *_: resolve_name(f"{_FOLDER}.math_dapo:unmatchable_reference"),
    ),
    "regex": Registration(
        f"{_FOLDER}.regex:RegexVerifier", binary=True, reads_answer=_for_groups, check=_by_verdict
    ),
    "reward_model": Registration(f"{_FOLDER}.reward_model:RewardModelVerifier"),
    "server": Registration(f"{_FOLDER}.server:ServerVerifier"),
}
VERIFIERS: Mapping[str, Registration] = PluginTable("dapo.verifiers", _OWN_VERIFIERS, Registration)
"""Every verifier that has a name: nothing else in the package names one.

Another package adds one by an entry point to its `Registration`.
"""


def is_binary(name: str) -> bool:
    """Return True if verifier `name` gives only right or wrong; False for functions."""
    return name in VERIFIERS and VERIFIERS[name].binary


def deciding_options(verifier: object, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options without those that change only the scores of the one verifier named.

    `verifier` is `reward.verifier`: of several, a mapping, all options are returned.
    """
    if not isinstance(verifier, str) or verifier not in VERIFIERS:
        return options
    ignored = VERIFIERS[verifier].score_options
    return {name: value for name, value in options.items() if name not in ignored}


def problem_check(name: str, options: Mapping[str, Any]) -> RowCheck | None:
    """Return the check that finds the rows that the verifier `name` cannot judge, if it has one.

    Raises RewardError if the verifier cannot be built with these options.
    """
    check = VERIFIERS[name].check if name in VERIFIERS else None
    return None if check is None else check(name, options)


def reads_answer(name: str, options: Mapping[str, Any]) -> bool:
    """Return True if verifier `name` needs a reference answer; functions name their columns."""
    return name in VERIFIERS and VERIFIERS[name].reads_answer(options)


def get_verifier(name: str, /, **options: Any) -> Verifier:
    """Return a verifier by name: one of VERIFIERS (`math`, ...) or `module:function`.

    Its packages are imported here, outside the time limit of a verdict. Raises RewardError for an
    unknown name or option and for a function that cannot be imported.
    """
    if ":" in name:
        return function_verifier(name, load_callable(name, error=RewardError), options)
    if name not in VERIFIERS:
        suggestion = did_you_mean(name, VERIFIERS, otherwise="")
        raise RewardError(
            f"unknown verifier {name!r}; {suggestion}{' ' * bool(suggestion)}known:"
            f" {', '.join(VERIFIERS)}, or your own function as module:function"
        )
    factory = resolve_name(VERIFIERS[name].factory)
    parameters = inspect.signature(factory).parameters
    for option, value in options.items():
        if option not in parameters:
            names = ", ".join(parameters) or "none"
            raise RewardError(f"verifier {name} has no option {option!r}; it has {names}")
        kind = parameters[option].annotation
        if kind is bool and not isinstance(value, bool):
            raise RewardError(f"{name}: {option} must be true or false, got {value!r}")
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise RewardError(
                f"{name}: {option} must be one of {', '.join(get_args(kind))}, got {value!r}"
            )
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise RewardError(
                f"verifier {name} needs the option {option}: reward.options.{option}=..."
            )
    return factory(**options)
