"""The three kinds of verdict a verifier gives, and what is said when its code fails."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from dapo.types import Verdict

T = TypeVar("T")

Opinion: TypeAlias = Verdict | None
"""What one of several verifiers says of a response; None: it does not apply to it."""

OUT_OF_MEMORY = "MemoryError (a worker may use reward.memory_gib)"

_MESSAGE_CHARS = 300


def right_or_wrong(correct: bool, answer: str | None = None) -> Verdict:
    """Eq. 7: +1 or -1; `answer` as in `Verdict`."""
    return Verdict(correct=correct, score=1.0 if correct else -1.0, answer=answer)


def graded(score: float) -> Verdict:
    """A score that does not say right or wrong."""
    return Verdict(correct=None, score=score)


def unjudged(reason: str) -> Verdict:
    """No judgement, and why: the reason names the verifier. The score is a placeholder, not a zero."""
    # a reason may quote what no file can hold: halves of surrogate pairs
    return Verdict(correct=None, score=0.0, error=reason.encode(errors="backslashreplace").decode())


@dataclass(frozen=True)
class Failure:
    """A call that raised instead of returning."""

    reason: str
    """`raised ValueError: its first line (file.py, line 12)`."""


def attempt(call: Callable[[], T]) -> T | Failure:
    """`call()`, or why it failed."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() and the timeouts of some libraries are no Exceptions
        return Failure(f"raised {describe(error)}")


def describe(error: BaseException) -> str:
    """An exception on one line: type, first line of its text, and the innermost place."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception's own text is user code too
        lines = ["(its text cannot be read)"]
    name = OUT_OF_MEMORY if isinstance(error, MemoryError) else type(error).__name__
    text = name + (f": {lines[0][:_MESSAGE_CHARS]}" if lines else "")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
