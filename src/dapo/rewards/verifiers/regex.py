"""`regex`: the response must match a pattern, from the configuration or the row."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dapo.core.errors import RewardError
from dapo.core.loading import Failure, try_call
from dapo.core.verifier_limits import PATTERN_CPU_S
from dapo.libs.strict_math.text import final_part
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict

Match = Literal["full", "search"]

_NEUTRAL = ("", "The answer is 42.")
"""A pattern that does not answer in time for these is an error for every response."""


@lru_cache(1024)
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    compiled = re.compile(pattern, flags)
    for text in _NEUTRAL:
        compiled.fullmatch(text) or compiled.search(text)
    return compiled


@dataclass(frozen=True)
class RegexVerifier:
    """Right if the response matches a Python regular expression, in one of three ways:

    - no `pattern`: the reference is the pattern;
    - a `pattern` without a group: the same for every problem, for example a format;
    - a `pattern` with one group: the captured text must be the reference. All captures in the
      response must agree, so that listing every possible answer is wrong.

    A pattern such as `(a+)+$` can take forever: a response for which it needs over a second of
    processor time is wrong.
    """

    pattern: str | None = None
    match: Match = "full"
    """`full`: the pattern must match the whole response, stripped of white space; `search`: a part
    of it. A pattern with a group is always searched for.
    """
    ignore_case: bool = False

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        if not isinstance(self.pattern, str) or not self.pattern:
            raise RewardError(f"regex: pattern must be a regular expression, got {self.pattern!r}")
        compiled = self._compile(self.pattern)
        if isinstance(compiled, Failure):
            raise RewardError(f"regex: the pattern {self.pattern!r} {compiled.reason}")
        if compiled.groups > 1:
            raise RewardError(
                f"regex: the pattern {self.pattern!r} has {compiled.groups} groups; "
                "one is compared with the reference: write the others as (?:...)"
            )

    def __call__(self, problem: Problem, response: str) -> Verdict:
        text = final_part(response).strip()
        if self.pattern is not None:
            pattern = self._compile(self.pattern)
            assert not isinstance(pattern, Failure)  # it was compiled above
            if pattern.groups:
                return self._captured(pattern, problem.answer.strip(), text)
        elif not problem.answer:
            return error_verdict(
                "regex: the reference is empty, and there is no reward.options.pattern"
            )
        else:
            pattern = self._compile(problem.answer)
            if isinstance(pattern, Failure):
                return error_verdict(
                    f"regex: the reference {problem.answer[:80]!r} {pattern.reason}"
                )
        match = pattern.fullmatch if self.match == "full" else pattern.search
        return binary_verdict(
            isinstance(try_call(lambda: match(text), cpu_s=PATTERN_CPU_S), re.Match)
        )

    def _captured(self, pattern: re.Pattern[str], reference: str, text: str) -> Verdict:
        if not reference:
            return error_verdict(
                "regex: the reference is empty, and the pattern's group is compared with it"
            )
        groups = try_call(
            lambda: {(match[1] or "").strip() for match in pattern.finditer(text)},
            cpu_s=PATTERN_CPU_S,
        )
        captured = set() if isinstance(groups, Failure) else groups
        if self.ignore_case:
            captured = {value.casefold() for value in captured}
            reference = reference.casefold()
        return binary_verdict(captured == {reference}, captured.pop() if len(captured) == 1 else "")

    def _compile(self, pattern: str) -> re.Pattern[str] | Failure:
        return try_call(
            lambda: _compiled(pattern, re.IGNORECASE if self.ignore_case else 0),
            cpu_s=PATTERN_CPU_S,
        )
