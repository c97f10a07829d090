"""`exact`: the response must be the answer itself, as the built-in problems ask (`Reply with only the answer.`)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dapo.core.math_text import answer_line, final_part, normalize_number, numbers_in, plain_number, strip_formatting
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict

Extract = Literal["none", "answer_line", "last_number", "final"]


@dataclass(frozen=True)
class ExactVerifier:
    """Right if the texts are equal: `12`, `12.`, `**12**` and `$12$` answer 12; `3 + 9 = 12` and `12 or 13` do not."""

    binary: ClassVar[bool] = True
    checks_reference: ClassVar[bool] = True

    extract: Extract = "none"
    """What is compared: the whole response, its line `Answer:`, its last number (by value: 1,000.0 is 1000), or
    `final`: the last number where the reference is one, else the whole response."""
    ignore_case: bool = True

    def __call__(self, problem: Problem, response: str) -> Verdict:
        text = final_part(response)
        if self.extract == "last_number" or (
            self.extract == "final" and plain_number(strip_formatting(problem.answer)) is not None
        ):
            return _same_number(problem.answer, text)
        reference = self._normalize(problem.answer)
        if not reference:
            return error_verdict(f"exact: the reference is empty ({problem.answer!r})")
        candidate = answer_line(text) if self.extract == "answer_line" else text
        found = self._normalize(candidate or "")
        return binary_verdict(found == reference, found)

    def _normalize(self, text: str) -> str:
        words = " ".join(strip_formatting(text).split())
        return words.casefold() if self.ignore_case else words


def _same_number(answer: str, text: str) -> Verdict:
    reference = plain_number(strip_formatting(answer))
    if reference is None:
        return error_verdict(f"exact: the reference {answer!r} is not a number, which extract=last_number needs")
    found = numbers_in(text)[-1:]
    return binary_verdict(found == [reference], "".join(map(normalize_number, found)))
