"""`gsm8k`: numbers after `####`, compared by value."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dapo.libs.strict_math import extract_answer
from dapo.libs.strict_math.stated_number import last_number, stated_number
from dapo.libs.strict_math.text import (
    numbers_in,
    only_listed,
    plain_number,
    stated_part,
    strip_formatting,
)
from dapo.rewards.verdicts import error_verdict, number_verdict
from dapo.types import Problem, Verdict

_MARK = "####"
# an equals sign and the number behind it, which is no result where an operation goes on
_RESULT = re.compile(
    r"=[\s*]{0,4}(?:\\?[$£€]\s?)?(?P<number>[-−]?(?:\d[\d,]*+(?:\.\d++)?+|\.\d++))"
    r"(?![\s%]{0,3}(?:[-+*/×÷x−]|\\(?:times|cdot|div))\s{0,3}\\?[$£€]?[\d(.])(?!\s?\(\s?\d)",
    re.ASCII,
)


@dataclass(frozen=True)
class Gsm8kVerifier:
    r"""Right if the number after `####`, else on an `Answer:` line, else in a `\boxed{}` is equal.

    The marked text must state exactly one number: `#### $1,200.00` and `Answer: 1200 dollars` are
    1200; `#### 3 or 4`, `#### not 3` and `#### \pm 3` are wrong whatever the reference.

    With `partial_credit` a wrong response scores between -1 and 0: -1 plus the share of the worked
    solution's n results that are among its own first n. A result is the number behind an equals
    sign, as in `48 / 2 = 24` and `<<48/2=24>>`. The solution is the text before `####` in a column
    of the row. Without results it gives no credit.
    """

    flexible: bool = False  # without any mark, take the last number of the response
    partial_credit: bool = False

    def __call__(self, problem: Problem, response: str) -> Verdict:
        final_text = only_listed(problem.answer).rpartition(_MARK)[2]
        reference = plain_number(_strip_currency(final_text))
        if reference is None:
            return error_verdict(
                f"gsm8k: the reference {problem.answer[-80:]!r} does not end in a number"
            )
        solution = _worked_solution(problem) if self.partial_credit else ""
        if solution is None:
            return error_verdict(
                "gsm8k: partial_credit compares with a worked solution, and no column of the row"
                f" has text before {_MARK}"
            )
        currency = "\\$" if "$" in final_text else ""
        verdict = number_verdict(
            reference, self._number(stated_part(response), problem.question, currency)
        )
        if verdict.correct or not self.partial_credit:
            return verdict
        credit = share_found(results_of(response), results_of(solution))
        return Verdict(False, verdict.score + credit, answer=verdict.answer)

    def _number(self, text: str, question: str, currency: str) -> Fraction | None:
        _, mark, tail = text.rpartition(_MARK)
        if mark:
            return stated_number(
                tail.strip().partition("\n")[0], question=question, currency=currency
            )
        if marked := extract_answer(text):
            return stated_number(marked, question=question, currency=currency)
        return last_number(_strip_currency(text)) if self.flexible else None


def results_of(text: str) -> list[Fraction]:
    """Return the results of the calculations that a text writes out, in their order."""
    numbers = [match["number"].replace(",", "") for match in _RESULT.finditer(text)]
    return [value for number in numbers for value in numbers_in(number)]


def share_found(results: Sequence[Fraction], references: Sequence[Fraction]) -> float:
    """Return the share of n references that are among the first n results; 0 without references.

    Only n count, so that a list of guesses gains nothing. Results beyond them cost nothing, so that
    ending early, before a calculation that is likely to be wrong, gains nothing either.
    """
    if not references:
        return 0.0
    shared = Counter(results[: len(references)]) & Counter(references)
    return shared.total() / len(references)


def _worked_solution(problem: Problem) -> str | None:
    """Return the text before `####` of the answer, else of the first column that has it."""
    texts = (problem.answer, *problem.fields.values())
    for text in texts:
        if isinstance(text, str):
            solution, mark, _ = text.rpartition(_MARK)
            if mark and solution.strip():
                return solution
    return None


def _strip_currency(text: str) -> str:
    """Return the text without currency signs and LaTeX's thousands separators in numbers."""
    text = strip_formatting(text).replace("{,}", ",").replace("\\,", "")
    return text.replace("\\$", "").replace("$", "").strip()
