"""The marks around a model's private reasoning: `<think>` and `</think>`, `[THINK]`,
`<|START_THINKING|>` and so on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("<thought>", "</thought>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought", "<channel|>"),
)
"""Pairs of marks in public chat templates."""

_MARK = re.compile(
    r"[<\[◁]\|?(?P<way>/|begin_of_|end_of_|begin_|end_|start_of_|start_)?(?:[a-z]+:)?"
    r"(?:think|thinking|thought|thoughts|reason|reasoning)\|?[>\]▷]|(?P<channel><\|channel>thought\b)|<channel\|>",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ThoughtMark:
    """A mark in a text: its place, and whether it opens a thought."""

    start: int
    end: int
    opens: bool


def thought_marks(text: str, start: int = 0, end: int | None = None) -> Iterator[ThoughtMark]:
    """The marks of thoughts in a text, in order, from the character `start` to `end`."""
    for match in _MARK.finditer(text, start, len(text) if end is None else end):
        closes = match["way"] is not None and not match["way"].lower().startswith(
            ("begin", "start")
        )
        is_channel_end = match.group() == "<channel|>"
        yield ThoughtMark(match.start(), match.end(), opens=not (closes or is_channel_end))


def ends_in_thought(text: str) -> bool:
    """Whether the last mark of the text opens a thought."""
    is_open = False
    for mark in thought_marks(text):
        is_open = mark.opens
    return is_open


def closing_mark(text: str, start: int) -> ThoughtMark | None:
    """The first mark from the character `start` on that closes a thought."""
    return next((mark for mark in thought_marks(text, start) if not mark.opens), None)
