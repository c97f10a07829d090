"""`gsm8k`: numbers after `####`, compared by value."""

from dataclasses import dataclass
from fractions import Fraction

from dapo.libs.strict_math import extract_answer
from dapo.libs.strict_math.stated_number import last_number, stated_number
from dapo.libs.strict_math.text import only_listed, plain_number, stated_part, strip_formatting
from dapo.rewards.verdicts import error_verdict, number_verdict
from dapo.types import Problem, Verdict

_MARK = "####"


@dataclass(frozen=True)
class Gsm8kVerifier:
    r"""Right if the number after `####`, else on an `Answer:` line, else in a `\boxed{}` is equal.

    The marked text must state exactly one number: `#### $1,200.00` and `Answer: 1200 dollars` are
    1200; `#### 3 or 4`, `#### not 3` and `#### \pm 3` are wrong whatever the reference.
    """

    flexible: bool = False  # without any mark, take the last number of the response

    def __call__(self, problem: Problem, response: str) -> Verdict:
        final_text = only_listed(problem.answer).rpartition(_MARK)[2]
        reference = plain_number(_strip_currency(final_text))
        if reference is None:
            return error_verdict(
                f"gsm8k: the reference {problem.answer[-80:]!r} does not end in a number"
            )
        currency = "\\$" if "$" in final_text else ""
        return number_verdict(
            reference, self._number(stated_part(response), problem.question, currency)
        )

    def _number(self, text: str, question: str, currency: str) -> Fraction | None:
        _, mark, tail = text.rpartition(_MARK)
        if mark:
            return stated_number(
                tail.strip().partition("\n")[0], question=question, currency=currency
            )
        if marked := extract_answer(text):
            return stated_number(marked, question=question, currency=currency)
        return last_number(_strip_currency(text)) if self.flexible else None


def _strip_currency(text: str) -> str:
    """Return the text without currency signs and LaTeX's thousands separators in numbers."""
    text = strip_formatting(text).replace("{,}", ",").replace("\\,", "")
    return text.replace("\\$", "").replace("$", "").strip()
