"""The three kinds of verdict a verifier gives, and what is said when its code fails."""

from typing import TypeAlias

from dapo.types import Verdict

Opinion: TypeAlias = Verdict | None
"""What one of several verifiers says of a response; None: it does not apply to it."""


def binary_verdict(correct: bool, answer: str | None = None) -> Verdict:
    """Eq. 7: +1 or -1; `answer` as in `Verdict`."""
    return Verdict(correct=correct, score=1.0 if correct else -1.0, answer=answer)


def score_verdict(score: float) -> Verdict:
    """A score that does not say right or wrong."""
    return Verdict(correct=None, score=score)


def error_verdict(reason: str) -> Verdict:
    """No judgement, and why: the reason names the verifier. The score is a placeholder, not a zero."""
    # a reason may quote what no file can hold: halves of surrogate pairs
    return Verdict(correct=None, score=0.0, error=reason.encode(errors="backslashreplace").decode())
