"""`math`: compares the answer that a response states with the reference as mathematics, by
`strict_math`.
"""

from functools import lru_cache

from dapo.libs.strict_math import Reference, extract_answer
from dapo.libs.strict_math.text import only_listed
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict

_CACHE_SIZE = 1024


class MathVerifier:
    """Right if the stated answer has the reference's value; strict about everything around it.

    A response that states no answer is wrong, and so is one that hedges (`3 or 4`), says more on
    the answer's line than the question asks, or repeats the question as an expression. A reference
    that cannot be read gives an error, whatever the response. All right answers share one
    `Verdict.answer`, the reference's normal form.
    """

    def __init__(self) -> None:
        self._read = lru_cache(_CACHE_SIZE)(Reference.read)
        self._read(r"\pi")  # imports mpmath now, outside the time limit of a verdict

    def __call__(self, problem: Problem, response: str) -> Verdict:
        reference = self._read(only_listed(problem.answer), problem.question)
        if reference is None:
            return error_verdict(
                f"math: the reference {problem.answer[:80]!r} cannot be read as mathematics"
            )
        answer = extract_answer(response)
        if answer is None:
            return binary_verdict(False, "")
        correct = reference.matches(answer)
        return binary_verdict(correct, reference.vote(answer, correct=correct))
