"""`exact`: the response must be the answer itself, as the built-in problems request (`Reply with
only the answer.`).
"""

from dataclasses import dataclass
from typing import Literal

from dapo.libs.strict_math.stated_number import last_number, response_number
from dapo.libs.strict_math.text import (
    answer_line,
    final_part,
    only_listed,
    plain_number,
    strip_formatting,
)
from dapo.rewards.verdicts import binary_verdict, error_verdict, number_verdict
from dapo.types import Problem, Verdict

Extract = Literal["none", "answer_line", "last_number", "final"]


@dataclass(frozen=True)
class ExactVerifier:
    """Right if the texts are equal: `12`, `12.`, `**12**`, `$12$` answer 12, not `12 or 13`."""

    extract: Extract = "none"
    """`none` compares the whole response, `answer_line` its `Answer:` line, `last_number` its last
    number by value, and `final` the only number that it states; for a reference that is no number,
    `final` compares the whole response.
    """
    ignore_case: bool = True

    def __call__(self, problem: Problem, response: str) -> Verdict:
        text = final_part(response)
        only_answer = only_listed(problem.answer)
        number = plain_number(strip_formatting(only_answer))
        if self.extract == "last_number":
            if number is None:
                reason = (
                    f"the reference {problem.answer!r} is not a number, which extract=last_number"
                    " needs"
                )
                return error_verdict(f"exact: {reason}")
            return number_verdict(number, last_number(text))
        if self.extract == "final" and number is not None:
            return number_verdict(number, response_number(text, problem.question))
        reference = self._normalize(problem.answer)
        if not reference:
            return error_verdict(f"exact: the reference is empty ({problem.answer!r})")
        candidate = answer_line(text) if self.extract == "answer_line" else text
        answer = self._normalize(candidate or "")
        # the list itself is right as well: a question may ask for one
        only_reference = self._normalize(only_answer)
        is_only_answer = bool(only_reference) and answer == only_reference
        return binary_verdict(answer == reference or is_only_answer, answer)

    def _normalize(self, text: str) -> str:
        words = " ".join(strip_formatting(text).split())
        return words.casefold() if self.ignore_case else words
