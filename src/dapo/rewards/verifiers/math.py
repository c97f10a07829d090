"""`math`: finds the answer (a line `Answer:`, else the last box) and compares it with the reference as mathematics."""

import re
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from dapo.core.math_text import answer_line, boxes, final_part
from dapo.rewards.answers.evaluate import load
from dapo.rewards.answers.reference import Reference
from dapo.rewards.answers.sentences import is_doubtful, value_in_sentence, without_preamble
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict

_CACHE_SIZE = 1024
_ONLY_WORDS = re.compile(r"(?:[A-Za-z\s.,:;!*$'’]|\\[()\[\]])*")
_JOINED = re.compile(r"[\s$*]*(?:\\[()\]\[])?\s*(?:[,;]|\\text\{\s*)?\s*(?:and|or)?\s*\}?\s*(?:\\[()\]\[])?[\s$*]*")
"""What may be between two boxes that are one list."""

_ALTERNATIVE = re.compile(
    r"[^.\n\d]{0,80}\b(?:or(?! rather)|alternatively|maybe|perhaps|possibly|otherwise)\b[^.\n\d]{0,80}", re.IGNORECASE
)
"""What may be between two boxes of which the second does not replace the first: a list of both."""


class MathVerifier:
    """Right if the marked answer is the reference's value; strict about everything around it.

    A response without a mark is wrong, and so is one that hedges (`3 or 4`), explains on the answer's line, or repeats
    the question as an expression. A reference that cannot be read gives an error, whatever the response. All right
    answers have one `Verdict.answer`: the reference's normal form.
    """

    binary: ClassVar[bool] = True

    def __init__(self) -> None:
        """Import what irrational numbers need, so that it does not count against the time limit of a verdict."""
        load()
        self._read = lru_cache(_CACHE_SIZE)(Reference.read)

    def __call__(self, problem: Problem, response: str) -> Verdict:
        reference = self._read(problem.answer)
        if reference is None:
            return error_verdict(f"math: the reference {problem.answer[:80]!r} cannot be read as mathematics")
        answer = claimed_answer(response)
        if answer is None:
            return binary_verdict(False, "")
        for text in (answer, value_in_sentence(answer)):
            if text is not None and reference.is_answered_by(text):
                return binary_verdict(True, reference.normal_form)
        return binary_verdict(False, reference.vote(answer, correct=False))


def claimed_answer(response: str) -> str | None:
    r"""The text of the response's last `Answer:` line, else of its last `\boxed{}`, else None.

    A single box on the line `Answer:` with only words around it is the answer; boxes joined by commas, `and` and `or`
    are a list; otherwise boxes are mere brackets.
    """
    text = final_part(response)
    if (line := answer_line(text)) is None:
        return ", ".join(last_boxes(text)) or None
    line = without_preamble(line)
    found = boxes(line)
    if not found:
        return line
    before, after = line[: found[0].start], line[found[-1].end :]
    if len(found) > 1 and not (_ONLY_WORDS.fullmatch(before + after) and _all_joined(line)):
        return _without_boxes(line)
    if _ONLY_WORDS.fullmatch(before + after):
        return line if is_doubtful(before + " " + after) else ", ".join(last_boxes(line))
    return _without_boxes(line)


def last_boxes(text: str) -> list[str]:
    """The content of the last box, with those before it that are joined to it as a list; empty without a box."""
    found = sorted(boxes(text), key=lambda box: box.start)
    contents = [box.content for box in found[-1:]]
    for box, following in zip(reversed(found[:-1]), reversed(found[1:]), strict=True):
        between = text[box.end : following.start]
        if not (_JOINED.fullmatch(between) or _ALTERNATIVE.fullmatch(between)) or box.end > following.start:
            break
        contents.insert(0, box.content)
    return contents


def _without_boxes(text: str) -> str:
    """The text with the content of each box in its place."""
    for box in sorted(boxes(text), reverse=True):
        text = text[: box.start] + box.content + text[box.end :]
    return text


def _all_joined(line: str) -> bool:
    found = boxes(line)
    return all(_JOINED.fullmatch(line[box.end : following.start]) for box, following in pairwise(found))
