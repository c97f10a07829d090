"""Makes the kinds of verdict that verifiers give; one that may not apply to a response gives `Verdict | None`."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from dapo.core.secrets import mask_text
from dapo.types import Problem, Verdict

TokenIds: TypeAlias = Sequence[Sequence[int]]  # the tokens of each of several responses


def binary_verdict(correct: bool, answer: str | None = None) -> Verdict:
    """The verdict right or wrong with the score of Eq. 7, +1 or -1; `answer` as in `Verdict`."""
    return Verdict(correct=correct, score=1.0 if correct else -1.0, answer=answer)


def error_verdict(reason: str) -> Verdict:
    """A verdict without judgement; the reason names the verifier, and secrets in it are masked.

    Its score is a placeholder, not a zero.
    """
    # a reason may quote what no file can hold: halves of surrogate pairs
    return Verdict(correct=None, score=0.0, error=mask_text(reason.encode(errors="backslashreplace").decode()))


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem as JSON values, for a judge in another process; `fields` are JSON values already."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
    return {**vars(problem), "prompt": prompt, "fields": dict(problem.fields)}
