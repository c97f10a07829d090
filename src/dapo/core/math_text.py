"""Rules for finding an answer in a text (`Answer:` lines, boxes, wrappers, numbers), and one form for equal answers."""

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox|operatorname)\s*\{([^{}]*)\}")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
INTEGER = re.compile(rf"[-+]?{_DIGITS}", re.ASCII)
_NUMBER = re.compile(rf"(?:(?<!\d)[-+])?(?:{_DIGITS}(?:\.\d+)?|\.\d+)", re.ASCII)
_PLAIN_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+)", re.ASCII)
_ANSWER_LINE = re.compile(
    r"[ \t>#*_`•\-]*(?:\\text(?:bf)?\{\s*)?"  # quote, heading, bullet, bold
    r"(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?"
    r"[ \t*_`}]*[:：][*_`}]*(?P<content>.*)",
    re.IGNORECASE,
)
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)  # \{ and \} are text
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_DISPLAY_LINES = 50  # A bound, so that many answer lines before unclosed displays do not take long
_WRAPPERS = (
    *((mark, mark) for mark in ("$$", "$", "**", "__", "*", "`", '"')),
    *(("\\(", "\\)"), ("\\[", "\\]"), ("“", "”")),
)


def final_part(response: str) -> str:
    """What follows the model's private reasoning (`</think>`), or the whole response."""
    return response.rpartition("</think>")[2]


def fences(text: str) -> list[tuple[str, str]]:
    """Language (in lower case) and content of every Markdown code fence; an unclosed one extends to the end."""
    return [(language.lower(), content) for language, content in _FENCE.findall(text)]


def answer_lines(text: str) -> list[str]:
    """The content of each line `Answer: ...`, or of the line or display after it where it has none itself.

    Case is ignored, and so are Markdown bold, headings, quotes and bullets around the word; `Final answer:` and `The
    answer is:` count. `answer:` in the middle of a line does not.
    """
    lines = text.splitlines()
    marked = [(index, match["content"]) for index, line in enumerate(lines) if (match := _ANSWER_LINE.match(line))]
    return [content.strip(" \t*_`") or _first_block(lines, index + 1) for index, content in marked]


def answer_line(text: str) -> str | None:
    """The last of `answer_lines`; None if there is none or it is empty."""
    return next(reversed(answer_lines(text)), None) or None


def _first_block(lines: Sequence[str], after: int) -> str:
    r"""The first line from `after` on that is not blank; if it opens a display (`$$`, `\[`), the whole display."""
    start = next((index for index in range(after, len(lines)) if lines[index].strip()), len(lines))
    filled = [line.strip() for line in lines[start : start + _DISPLAY_LINES] if line.strip()]
    closing = {"$$": "$$", "\\[": "\\]"}.get(filled[0]) if filled else None
    if closing is None or closing not in filled[1:]:
        return filled[0] if filled else ""
    return " ".join(filled[: filled.index(closing, 1) + 1])


class Box(NamedTuple):
    r"""A `\boxed{content}` at `text[start:end]`."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    r"""Every `\boxed{...}` (or `\fbox{...}`) whose braces balance, in the order in which they close."""
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
    r"""The content of the `\boxed{...}` that starts last, of those whose braces balance; None if there is none."""
    found = boxes(text)
    return max(found, key=lambda box: box.start).content if found else None


def marked_answer(text: str) -> str | None:
    """The content of the last `Answer:` line, else of the last box; None if there is neither."""
    line = answer_line(text)
    return last_boxed(text) if line is None else line


def strip_formatting(text: str, *, braces: bool = False) -> str:
    r"""The text without bold, code, quotes, dollars, `\( \)` and boxes around all of it, and final full stops.

    With `braces` also without `{...}` and `\text{...}` around all of it.
    """
    before = None
    while text != before:
        before = text
        text = text.strip()
        text = text.rstrip(".").rstrip() if not text.endswith("\\.") else text
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if inner and text.startswith(opening) and text.endswith(closing) and opening not in inner:
                text = inner
                break
        box = "\\boxed" + text.removeprefix("\\text") if braces and text.startswith(("{", "\\text{")) else text
        if box.startswith(("\\boxed", "\\fbox")):
            text = next((found.content for found in boxes(box) if (found.start, found.end) == (0, len(box))), text)
    return text


def plain_number(text: str) -> Fraction | None:
    """The value of a text that is one number (`-1,234.50`), else None."""
    text = text.strip().replace("−", "-")
    return _value(text) if _PLAIN_NUMBER.fullmatch(text) else None


def numbers_in(text: str) -> list[Fraction]:
    """Every number of a text, in order: `-3` is one number, `3-4` holds 3 and 4."""
    return [_value(number) for number in _NUMBER.findall(text.replace("−", "-"))]


def normalize_number(number: Fraction) -> str:
    """A number of any size as text: `str` refuses more than 4300 digits."""
    is_huge = max(number.numerator.bit_length(), number.denominator.bit_length()) > 10_000
    return f"a number with hash {hash(number)}" if is_huge else str(number)


def _value(number: str) -> Fraction:
    # not Fraction(text), which refuses numbers of more than 4300 digits: a model may write them
    return Fraction(*Decimal(number.replace(",", "")).as_integer_ratio())


_FULL_WIDTH_DIGITS = "".join(chr(0xFF10 + digit) for digit in range(10))
_LATEX = ("\\times ", "\\cdot ", "\\div ", "\\pi ", "\\infty ", "\\le ", "\\ge ", "^2", "^3")
_CHARACTERS = {
    **str.maketrans("−–\xa0\u202f\u2009" + _FULL_WIDTH_DIGITS, "--   0123456789", "°"),
    **{ord(sign): latex for sign, latex in zip("×·÷π∞≤≥²³", _LATEX, strict=True)},
}
_RULES = (
    (re.compile(r"\\(?:left|right|displaystyle|bigl|bigr|big)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(r"\\\$|^\$(?=\d)|(?<=\d)\$$"), ""),  # money; the dollars of mathematics are stripped in pairs
    (re.compile(r"(?<!\\)%|\bpercent\b"), r"\\%"),
    (re.compile(r"√\s*(\d+|\{[^{}]*\}|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile(r"^([-+])\s+(?=\d)"), r"\1"),
    (re.compile(r"^(-?\d+) +(\d+) ?/ ?(\d+)$"), r"\1\\frac{\2}{\3}"),  # a mixed number
    (re.compile(r"\s+"), " "),
)
_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])"
    r"|(?<![\d.,])(?<![\d.,] )\d{1,3}(?: \d{3})+(?! ?[\d,])"
)
_UNIT_WORD = (
    "(?:cm|mm|km|kg|mg|ml|ft|lbs?|oz|mph|in|inch(?:es)?|feet|foot|yards?|miles?|(?:centi|milli|kilo)?met(?:er|re)s?"
    "|(?:kilo)?grams?|pounds?|ounces?|tons?|lit(?:er|re)s?|gallons?|seconds?|sec|minutes?|min|hours?|hrs?|days?"
    "|weeks?|months?|years?|degrees?|radians?|dollars?|cents?|euros?|USD|EUR|units?|ways?|times|people|square|sq|cubic|per)"
)
_UNIT_PHRASE = rf"{_UNIT_WORD}(?:[ /]+{_UNIT_WORD}|/[hs])*"
_UNIT = re.compile(
    r"(?<=[\d})])\s*"
    # a single letter is a unit only in \text{ }: 5 m may be a product
    rf"(?:\\(?:text|mathrm|mbox|textrm|textit|operatorname)\s*\{{\s*(?:{_UNIT_PHRASE}|[mgsLh])\s*\}}"
    rf"|(?<= ){_UNIT_PHRASE})"
    r"\s*(?:\^\s*\{?\s*[23]\s*\}?)?$",
    re.IGNORECASE,
)
_SIMPLE_FRACTION = re.compile(r"\\frac(?:\{(\d{1,15})\}\{(\d{1,15})\}|(\d)(\d))")
_QUOTIENT = re.compile(r"([-+]?\d{1,15})/(\d{1,15})", re.ASCII)


def normalize_math(text: str) -> str:
    """The text without wrappers, spacing commands, degree and currency signs and thousands separators."""
    text = strip_formatting(text).translate(_CHARACTERS)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = strip_formatting(text)
    depth_at = depths(text)  # in brackets a comma separates
    return _THOUSANDS.sub(lambda found: found[0] if depth_at[found.start()] else re.sub("[, ]", "", found[0]), text)


def normalize_answer(answer: str | None) -> str:
    """An answer as `Verdict.answer`: numbers by value (`1/2` and `0.5` are equal), the rest as normalized text."""
    text = re.sub(r"\s+", "", normalize_math(answer or "")).casefold()
    text = _SIMPLE_FRACTION.sub(lambda found: "/".join(filter(None, found.groups())), text)
    number = plain_number(text)
    if number is None and (match := _QUOTIENT.fullmatch(text)) and int(match[2]):
        number = Fraction(int(match[1]), int(match[2]))
    return text if number is None else normalize_number(number)


def depths(text: str) -> list[int]:
    """The number of open brackets before each character."""
    return list(accumulate(((c in "([{") - (c in ")]}") for c in text), initial=0))[:-1]


def split_unit(part: str) -> tuple[str, str]:
    r"""Value and unit: `5 \text{ cm}` -> (`5`, `cm`); a unit only counts after a number or a bracket."""
    match = _UNIT.search(part)
    if match is None:
        return part, ""
    singular = re.sub(r"(?<=[a-z]{2})s\b", "", plain_text(match[0]))
    return part[: match.start()].strip(), re.sub(r"[^a-z0-9/]", "", singular)


def plain_text(part: str) -> str:
    r"""The words of `\text{...}` and the like, in lower case, without brackets around them."""
    words = " ".join(TEXT_COMMAND.sub(r" \1 ", part).casefold().split())
    return words[1:-1].strip() if words.startswith("(") and words.endswith(")") else words


def without_text_commands(part: str) -> str:
    r"""The text with `B` for `\text{B}`."""
    return TEXT_COMMAND.sub(r"\1", part).strip()
