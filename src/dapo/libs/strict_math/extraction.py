"""Finds the answer that a response states."""

import re

from .box_context import with_context
from .decorations import without_colour
from .text import Box, answer_line, last_box_list, outer_boxes, stated_part, with_braces

_ANSWER_IS = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:(?:the )?(?:final |correct )?answer is:? ?)?",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    r"(?:[.!] ?(?:I hope (?:it|this) (?:is correct|helps)|Let me know)[^\d]{0,60}"
    r"|, as (?:wanted|required|desired|requested))[.!]?$",
    re.IGNORECASE,
)
# Where a line ends a sentence and states the final answer
_FINAL_ANSWER = re.compile(r"(?<=[.!?$\])}] )(?=Final Answer:)")
_SPECIAL_TOKEN = re.compile(r"<\|[a-z_]{1,20}\|>")
_MAX_NESTED = 3
_AROUND = " $*()\\"


def extract_answer(response: str) -> str | None:
    r"""Return the text of the answer that a response states: its last `Answer:` line, else its last
    `\boxed{}`, else None.

    Text before `</think>` is ignored. An `Answer:` line is read as if its boxes were not there.
    Without such a line the content of the last box counts, with the rest of its formula and the
    words next to it, unless they only state it; boxes joined by commas, `and` or `or` are a list.
    An answer that the text behind it takes back is none.

    Example:
        >>> extract_answer("6 * 7 is 42.\nAnswer: $42$")
        '$42$'
        >>> extract_answer(r"The roots are \boxed{2} and \boxed{3}.")
        '2, 3'
        >>> extract_answer(r"It is half of \boxed{42}.")
        'It is half of 42'
        >>> extract_answer(r"So $x > \boxed{42}$.")
        'x > 42'
        >>> extract_answer(r"\boxed{42}. Wait, that is wrong.") is None
        True
        >>> extract_answer("It is 42.") is None
        True
    """
    text = _FINAL_ANSWER.sub("\n", without_colour(stated_part(response)))
    line = answer_line(text)
    if line is None:
        return _boxed(text) or None
    line = " ".join(line.split())
    if special := _SPECIAL_TOKEN.search(line):
        line = line[: special.start()].rstrip()
    return _without_boxes(_CLOSING.sub("", _ANSWER_IS.sub("", line, count=1)))


def _boxed(text: str) -> str:
    """Return the contents of the last boxes with what belongs to their value."""
    boxes = last_box_list(text)
    if not boxes:
        return ""
    contents = ", ".join(box.content for box in boxes)
    return with_context(boxes[0], boxes[-1], contents)


def _without_boxes(line: str) -> str:
    """Return the line with each box replaced by its content; it stays apart from digits next to it."""
    line = with_braces(line)
    for _ in range(_MAX_NESTED):
        pieces = []
        end = 0
        for box in outer_boxes(line):
            pieces += [line[end : box.start], _apart(box)]
            end = box.end
        if not pieces:
            break
        line = "".join((*pieces, line[end:]))
    return line.strip()


def _apart(box: Box) -> str:
    """Return the content of a box, in braces next to digits, with which it would be one number."""
    preceding_character = box.text[: box.start].rstrip(_AROUND)[-1:]
    following_character = box.text[box.end :].lstrip(_AROUND)[:1]
    if preceding_character.isdigit() or following_character.isdigit():
        return f" {{{box.content}}} "
    return f" {box.content} "
