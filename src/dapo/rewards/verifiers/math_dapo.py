"""`math_dapo`: the verifier that DAPO was released with, exactly, including its quirks (verl's
`math_dapo`).
"""

import re
from dataclasses import dataclass

from dapo.libs.strict_math.text import only_listed
from dapo.rewards.verdicts import binary_verdict
from dapo.types import Problem, Verdict

WINDOW_CHARS = 300  # characters at the end of a response that are read

_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)

# in this order: articles go while the space after them is still there
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits"
    " cents degrees cm gm pounds meters meals edges students childrentickets multiples"
)
_LEFTOVERS = (
    "\\text{s} \\text{.} \\text{\ns} \\text{}^2 \\text{}^3 \\text{\n} \\text{} "
    '\\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)
_REMOVED = f"{_UNITS} {_LEFTOVERS}".split(" ")

# pattern -> replacement, in this order: what stands in $ $, then the contents of commands, then
# TeX's shorthand
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


@dataclass(frozen=True)
class MathDapoVerifier:
    """Right if the last `Answer:` in the last 300 characters equals the reference, both normalized.

    Texts are compared, not values: `0.5` does not match `1/2`, and a box without `Answer:` is
    wrong.
    """

    def __call__(self, problem: Problem, response: str) -> Verdict:
        answers = _ANSWER.findall(response[-WINDOW_CHARS:])
        answer = normalize(answers[-1] if answers else "[INVALID]")
        reference = normalize(only_listed(problem.answer))
        return binary_verdict(answer == reference, answer if answers else "")


def unmatchable_reference(problem: Problem) -> str | None:
    """Return why no response can equal the reference of a problem, or None.

    An answer is one line of the response's end.
    """
    reference = normalize(only_listed(problem.answer))
    if "\n" in reference or len(reference) > WINDOW_CHARS:
        return (
            f"math_dapo: the reference {problem.answer[:80]!r} is no answer of one line; expected"
            " the final answer, for example 18"
        )
    return None


def normalize(answer: str) -> str:
    """Return the Minerva normalization of a final answer, as released."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for removed in _REMOVED:
        answer = answer.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()
