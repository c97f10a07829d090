"""Finds the answer that a response states."""

import re

from strict_math.text import Box, answer_line, final_part, last_box_list, outer_boxes
from strict_math.units import words_of_unit

_ANSWER_IS = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:(?:the )?(?:final |correct )?answer is:? ?)?", re.IGNORECASE
)
_CLOSING = re.compile(
    r"(?:[.!] ?(?:I hope (?:it|this) (?:is correct|helps)|Let me know)[^\d]{0,60}"
    r"|, as (?:wanted|required|desired|requested))[.!]?$",
    re.IGNORECASE,
)
_FINAL_ANSWER = re.compile(r"(?<=[.!?$\])}] )(?=Final Answer:)")
"""Where a line ends a sentence and states the final answer."""
_SPECIAL_TOKEN = re.compile(r"<\|[a-z_]{1,20}\|>")
_BEFORE = re.compile(
    "(?:"
    + "|".join(
        [
            # words: `twice the`, `not equal to`, `isn't`
            r"\b(?:minus|negative|not|never|cannot|twice|double|triple|half|third|quarter|root|reciprocal|opposite"
            r"|inverse|square|cube|logarithm|except|than|times)(?: (?:of|be|equal(?: to)?))?(?: the)?",
            r"n['’]t(?: (?:be|equal(?: to)?))?",
            # a share: `10% of`, `three fifths of the`
            r"(?:\d|\\?%|percent|thirds|quarters|(?:fourth|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|teenth"
            r"|twentieth|hundredth|thousandth)s?) of(?: the)?",
            # an operation, a factor, a sign of inequality or a root: `2 +`, `3 \times`, `\neq`, `5`
            r"[\d)}] ?(?:[-+*/^×·÷−]|\\(?:times|cdot|div))",
            r"\\(?:times|cdot|div|pm|mp|neq?)",
            r"[≠√±]",
            r"[\d^/−-](?! )",
            # the argument of a command that is not about the looks: `\sqrt[3]{`
            r"\\(?!text|math|mbox|display|underline|boxed|fbox|color|large)[a-z]+(?:\[\w*\])?(?:\{[^{}]*\})?\{",
        ]
    )
    + r")[ $(\\]*$",
    re.IGNORECASE,
)
"""Words and signs right before a box that make its content another number."""
_CHANGED_AFTER = re.compile(
    r"[ $)}]*(?:\\text ?\{ ?)?(?:(?:[-+*/^×·÷−]|\\(?:times|cdot|div|pm)) ?[\d({\\$]|\d"
    r"|(?:is|was|would be|seems|must be) (?:not|wrong|incorrect|false|untrue|too|impossible|invalid)\b)",
    re.IGNORECASE,
)
"""Text right behind a box that makes its content another number, or denies it."""
_AFTER = re.compile(r"(?:[ $)]|\\[\])])*(?:\\(?:text|mathrm) ?\{ ?)?(?P<words>\\?%|[A-Za-z]+(?:(?: per |/)[A-Za-z]+)?)")
_SPACES = re.compile(r"\s+")
_WINDOW = 40
_MAX_NESTED = 3
_AROUND = " $*()\\"


def extract_answer(response: str) -> str | None:
    r"""The text of the answer that a response states: its last `Answer:` line, else its last `\boxed{}`, else None.

    Text before `</think>` is ignored. An `Answer:` line is read as if its boxes were not there. Without such a line the
    content of the last box counts, with the words and signs next to it that change its number or name its unit; boxes
    joined by commas, `and` or `or` are a list.

    Example:
        >>> extract_answer("6 * 7 is 42.\nAnswer: $42$")
        '$42$'
        >>> extract_answer(r"The roots are \boxed{2} and \boxed{3}.")
        '2, 3'
        >>> extract_answer(r"It is half of \boxed{42}.")
        'half of 42'
        >>> extract_answer("It is 42.") is None
        True
    """
    text = _FINAL_ANSWER.sub("\n", final_part(response))
    line = answer_line(text)
    if line is None:
        return _boxed(text) or None
    line = " ".join(line.split())
    if special := _SPECIAL_TOKEN.search(line):
        line = line[: special.start()].rstrip()
    return _without_boxes(_CLOSING.sub("", _ANSWER_IS.sub("", line, count=1)))


def _boxed(text: str) -> str:
    """The contents of the last boxes with the words around them that belong to their value."""
    found = last_box_list(text)
    if not found:
        return ""
    before = text[max(0, found[0].start - _WINDOW) : found[0].start].rpartition("\n")[2]
    before = _SPACES.sub(" ", before)
    after = " ".join(text[found[-1].end : found[-1].end + _WINDOW].partition("\n")[0].split())
    changed = _BEFORE.search(before)
    following = _AFTER.match(after)
    unit = (
        following["words"]
        if following and "%" in following["words"]
        else words_of_unit(following["words"] if following else "")
    )
    if denied := _CHANGED_AFTER.match(after):
        unit = denied[0]
    contents = ", ".join(box.content for box in found)
    return " ".join(part for part in (changed[0].strip() if changed else "", contents, unit) if part)


def _without_boxes(line: str) -> str:
    """The line with each box replaced by its content; it stays apart from digits next to it."""
    for _ in range(_MAX_NESTED):
        pieces, end = [], 0
        for box in outer_boxes(line):
            pieces += [line[end : box.start], _apart(box)]
            end = box.end
        if not pieces:
            break
        line = "".join((*pieces, line[end:]))
    return line.strip()


def _apart(box: Box) -> str:
    around = box.text[: box.start].rstrip(_AROUND)[-1:] + box.text[box.end :].lstrip(_AROUND)[:1]
    return f" {{{box.content}}} " if any(map(str.isdigit, around)) else f" {box.content} "
