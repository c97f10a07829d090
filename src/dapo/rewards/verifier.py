"""The interface of verifiers, and how one is found by its name."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal, Protocol, get_args, get_origin, runtime_checkable

from dapo.core.errors import RewardError
from dapo.core.suggest import did_you_mean
from dapo.rewards.verdicts import TokenIds
from dapo.rewards.verifiers.function import load_function
from dapo.types import Problem, Verdict

REGISTERED: Mapping[str, str] = {
    "choice": "dapo.rewards.verifiers.choice:ChoiceVerifier",
    "code": "dapo.rewards.verifiers.code:CodeVerifier",
    "exact": "dapo.rewards.verifiers.exact:ExactVerifier",
    "gsm8k": "dapo.rewards.verifiers.gsm8k:Gsm8kVerifier",
    "gym": "dapo.rewards.verifiers.gym:GymVerifier",
    "json_schema": "dapo.rewards.verifiers.json_schema:JsonSchemaVerifier",
    "math": "dapo.rewards.verifiers.math:MathVerifier",
    "math_dapo": "dapo.rewards.verifiers.math_dapo:MathDapoVerifier",
    "regex": "dapo.rewards.verifiers.regex:RegexVerifier",
    "reward_model": "dapo.rewards.verifiers.reward_model:RewardModelVerifier",
    "server": "dapo.rewards.verifiers.server:ServerVerifier",
}
"""The class behind each name. Its constructor's parameters are the verifier's options."""
_COMPARE_WITH_ANSWER = frozenset({"choice", "exact", "gsm8k", "math", "math_dapo"})


class Verifier(Protocol):
    """Judges one response. It never raises on what a model may write: what it cannot judge is `Verdict.error`."""

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """The verdict on `response` as an answer to `problem`."""


@runtime_checkable
class GroupVerifier(Protocol):
    """A verifier that takes all responses of a group in one call."""

    def judge_group(self, problem: Problem, responses: Sequence[str], token_ids: TokenIds) -> Sequence[Verdict | None]:
        """One verdict per response, None where it does not apply; `token_ids[i]` are the tokens of `responses[i]`."""


def is_binary(name: str) -> bool:
    """Whether the registered verifier `name` gives only right or wrong, so that reward.threshold has no effect."""
    return name in REGISTERED and getattr(resolve_name(REGISTERED[name]), "binary", False)


def problem_check(name: str, options: Mapping[str, Any]) -> Callable[[Problem], str | None] | None:
    """What finds, before a run begins, the rows that the verifier `name` can judge no response to.

    A verifier's class offers it in one of two ways: a static method `check_problem(problem, options)`, or, where a
    verdict on an empty response costs little and is an error exactly for such rows, `checks_reference = True`.

    Args:
        name: one of REGISTERED, or `module:function`.
        options: the verifier's options.

    Returns:
        A function of a problem that gives the reason, None for a row that can be judged; None: there is no such check.

    Raises:
        RewardError: the verifier cannot be built with these options.
    """
    if name not in REGISTERED:
        return None
    factory = resolve_name(REGISTERED[name])
    if getattr(factory, "checks_reference", False):
        verifier = get_verifier(name, **options)
        return lambda problem: verifier(problem, "").error
    check = getattr(factory, "check_problem", None)
    return None if check is None else partial(check, options=options)


def reads_answer(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the registered verifier `name` compares responses with the reference answer; functions say it themselves.

    `code` and `json_schema` read it where a row has no tests or schema of its own.
    """
    if name == "regex":
        pattern = options.get("pattern")
        return pattern is None or re.compile(pattern).groups > 0  # the group is compared with it
    return name in _COMPARE_WITH_ANSWER


def get_verifier(name: str, /, **options: Any) -> Verifier:
    """The verifier called `name`: one of REGISTERED (`math`, `choice`, ...) or `module:function`.

    What it needs is imported here, not within the time limit of a verdict. Raises RewardError for an unknown name or
    option and for a function that cannot be imported.
    """
    if ":" in name:
        return load_function(name, options)
    if name not in REGISTERED:
        suggestion = did_you_mean(name, REGISTERED, otherwise="")
        raise RewardError(
            f"unknown verifier {name!r}; {suggestion}{' ' * bool(suggestion)}known: {', '.join(REGISTERED)}, "
            "or your own function as module:function"
        )
    factory = resolve_name(REGISTERED[name])
    known = inspect.signature(factory).parameters
    for option, value in options.items():
        if option not in known:
            raise RewardError(f"verifier {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
        kind = known[option].annotation
        if kind is bool and not isinstance(value, bool):
            raise RewardError(f"{name}: {option} must be true or false, got {value!r}")
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise RewardError(f"{name}: {option} must be one of {', '.join(get_args(kind))}, got {value!r}")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise RewardError(f"verifier {name} needs the option {option}: reward.options.{option}=...")
    return factory(**options)
