"""`exact`: the response must be the answer itself, as the built-in problems ask (`Reply with only the answer.`)."""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.rewards.verifiers.stated_number import response_number
from dapo.types import Problem, Verdict
from strict_math.text import answer_line, final_part, normalize_number, numbers_in, plain_number, strip_formatting

Extract = Literal["none", "answer_line", "last_number", "final"]


@dataclass(frozen=True)
class ExactVerifier:
    """Right if the texts are equal: `12`, `12.`, `**12**` and `$12$` answer 12; `3 + 9 = 12` and `12 or 13` do not."""

    binary: ClassVar[bool] = True
    checks_reference: ClassVar[bool] = True

    extract: Extract = "none"
    """What is compared: the whole response, its line `Answer:`, its last number by value, whatever stands before it, or
    `final`: where the reference is a number the only one that the response states, else the whole response."""
    ignore_case: bool = True

    def __call__(self, problem: Problem, response: str) -> Verdict:
        text = final_part(response)
        number = plain_number(strip_formatting(problem.answer))
        if self.extract == "last_number" and number is None:
            return error_verdict(
                f"exact: the reference {problem.answer!r} is not a number, which extract=last_number needs"
            )
        if self.extract == "last_number":
            return _same_number(number, next(reversed(numbers_in(text)), None))
        if self.extract == "final" and number is not None:
            return _same_number(number, response_number(text))
        reference = self._normalize(problem.answer)
        if not reference:
            return error_verdict(f"exact: the reference is empty ({problem.answer!r})")
        candidate = answer_line(text) if self.extract == "answer_line" else text
        found = self._normalize(candidate or "")
        return binary_verdict(found == reference, found)

    def _normalize(self, text: str) -> str:
        words = " ".join(strip_formatting(text).split())
        return words.casefold() if self.ignore_case else words


def _same_number(reference: Fraction | None, found: Fraction | None) -> Verdict:
    return binary_verdict(found == reference, "" if found is None else normalize_number(found))
