"""Finding the answer in a response: the line `Answer:`, the last box, the only number; and taking off its wrapping."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

_ANSWER_LINE = re.compile(
    r"[ \t>#*_`•\-]*(?:\\text(?:bf)?\{\s*)?"  # quote, heading, bullet, bold
    r"(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?"
    r"[ \t*_`}]*[:：][*_`}]*(?P<content>.*)",
    re.IGNORECASE,
)
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)  # \{ and \} are text
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
_PLAIN_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_DISPLAY_LINES = 50
"""A bound, so that many marks before displays without end do not take long."""
_WRAPPINGS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("**", "**"),
    ("__", "__"),
    ("*", "*"),
    ("`", "`"),
    ('"', '"'),
    ("“", "”"),
)


def final_part(response: str) -> str:
    """What follows the model's private reasoning (`</think>`), or everything."""
    return response.rpartition("</think>")[2]


def fences(text: str) -> list[tuple[str, str]]:
    """Language (in lower case) and content of every Markdown fence; one that is not closed goes to the end."""
    return [(language.lower(), content) for language, content in _FENCE.findall(text)]


def answer_line(text: str) -> str | None:
    """What the last line `Answer: ...` says, or the line after it if it says nothing itself; None if there is none.

    Case does not matter, nor do markdown bold, headings, quotes and bullets around the word; `Final answer:` and
    `The answer is:` count. A word `answer:` in the middle of a line does not.
    """
    lines = text.splitlines()
    for index in range(len(lines) - 1, -1, -1):
        if match := _ANSWER_LINE.match(lines[index]):
            return _content(match, lines, index + 1)
    return None


def answer_lines(text: str) -> list[str]:
    """What each line `Answer: ...` says, in order, read as `answer_line` reads the last; empty if it says nothing."""
    lines = text.splitlines()
    marked = [(index, match) for index, line in enumerate(lines) if (match := _ANSWER_LINE.match(line))]
    return [_content(match, lines, index + 1) or "" for index, match in marked]


def _content(match: re.Match[str], lines: Sequence[str], after: int) -> str | None:
    return match["content"].strip(" \t*_`") or _first_block(lines, after)


def _first_block(lines: Sequence[str], after: int) -> str | None:
    """The first line from there on that is not blank; if it opens a display (`$$`, `\\[`), all of the display."""
    start = next((index for index in range(after, len(lines)) if lines[index].strip()), None)
    if start is None:
        return None
    filled = [line.strip() for line in lines[start : start + _DISPLAY_LINES] if line.strip()]
    closing = {"$$": "$$", "\\[": "\\]"}.get(filled[0])
    if closing is None or closing not in filled[1:]:
        return filled[0]
    return " ".join(filled[: filled.index(closing, 1) + 1])


@dataclass(frozen=True)
class Box:
    """A `\\boxed{content}` at `text[start:end]`."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    """Every `\\boxed{...}` (or `\\fbox{...}`) whose braces balance, in the order in which they close."""
    found: list[Box] = []
    open_braces: list[tuple[int, int] | None] = []  # where a box and its content start; None for a bare brace
    for match in _BRACE.finditer(text):
        if match["box"]:
            open_braces.append((match.start(), match.end()))
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces and (box := open_braces.pop()):
            found.append(Box(box[0], match.end(), text[box[1] : match.start()]))
    return found


def last_boxed(text: str) -> str | None:
    """What is in the `\\boxed{...}` that starts last, of those whose braces balance."""
    found = boxes(text)
    return max(found, key=lambda box: box.start).content if found else None


def strip_formatting(text: str) -> str:
    """The text without bold, code, quotes, dollars, `\\( \\)`, a box around all of it, and final full stops."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        text = text.rstrip(".").rstrip() if not text.endswith("\\.") else text
        for opening, closing in _WRAPPINGS:
            inner = text[len(opening) : -len(closing)]
            if inner and text.startswith(opening) and text.endswith(closing) and opening not in inner:
                text = inner
                break
        if text.startswith(("\\boxed", "\\fbox")):
            text = next((box.content for box in boxes(text) if (box.start, box.end) == (0, len(text))), text)
    return text


def plain_number(text: str) -> Fraction | None:
    """The value of a text that is one number (`-1,234.50`), else None."""
    text = text.strip().replace("−", "-")
    return _value(text) if _PLAIN_NUMBER.fullmatch(text) else None


def normalize_number(number: Fraction) -> str:
    """A number as text, of any size: `str` refuses more than 4300 digits."""
    is_huge = max(number.numerator.bit_length(), number.denominator.bit_length()) > 10_000
    return f"a number with hash {hash(number)}" if is_huge else str(number)


def numbers_in(text: str) -> list[Fraction]:
    """Every number of a text, in order: `-3` is one, `3-4` holds 3 and 4."""
    return [_value(number) for number in _NUMBER.findall(text.replace("−", "-"))]


def _value(number: str) -> Fraction:
    # not Fraction(text), which refuses numbers of more than 4300 digits: a model may write them
    return Fraction(*Decimal(number.replace(",", "")).as_integer_ratio())
