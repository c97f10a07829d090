"""`math`: finds the answer (a line `Answer:`, else the last box) and compares it with the reference as mathematics."""

import re
from functools import lru_cache
from typing import ClassVar

from dapo.core.math_text import answer_line, boxes, final_part, last_boxed, normalize_answer
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.rewards.verifiers.equivalence import Reference
from dapo.rewards.verifiers.symbolic import Symbolic
from dapo.types import Problem, Verdict

_CACHE_SIZE = 1024
_ANSWER_IS = re.compile(r"(?:so\s+|thus\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s+is:?\s*", re.IGNORECASE)
_ONLY_WORDS = re.compile(r"(?:[A-Za-z\s.,:;!*$]|\\[()\[\]])*")


class MathVerifier:
    """Right if the marked answer is equivalent to the reference; strict about everything around it.

    A response without a mark is wrong, and so is one that hedges (`3 or 4`) or explains on the answer's line. A
    reference that cannot be read gives an error, whatever the response.
    """

    binary: ClassVar[bool] = True

    def __init__(self) -> None:
        """Import math-verify, so that it does not count against the time limit of the first verdict."""
        symbolic = Symbolic()
        self._read = lru_cache(_CACHE_SIZE)(lambda answer: Reference.read(answer, symbolic))

    def __call__(self, problem: Problem, response: str) -> Verdict:
        reference = self._read(problem.answer)
        if reference is None:
            return error_verdict(f"math: the reference {problem.answer[:80]!r} cannot be read as mathematics")
        answer = claimed_answer(response)
        return binary_verdict(answer is not None and reference.is_answered_by(answer), normalize_answer(answer))


def claimed_answer(response: str) -> str | None:
    r"""The text of the response's last `Answer:` line, else of its last `\boxed{}`, else None.

    A single box on the line `Answer:` with only words around it is the answer; otherwise boxes are mere brackets.
    """
    text = final_part(response)
    if (line := answer_line(text)) is None:
        return last_boxed(text)
    line = _ANSWER_IS.sub("", line, count=1) if _ANSWER_IS.match(line) else line
    found = boxes(line)
    if len(found) != 1:
        return line
    (box,) = found
    before, after = line[: box.start], line[box.end :]
    return box.content if _ONLY_WORDS.fullmatch(before + after) else before + box.content + after
