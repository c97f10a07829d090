"""Rules for finding an answer in text: `Answer:` lines, boxes, code fences, wrappers, plain
numbers.
"""

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

__all__ = [
    "INTEGER", "TEXT_COMMAND", "Box", "answer_line", "answer_lines", "boxes", "fences", "final_answer",
    "final_part", "last_box_list", "last_boxed", "marked_answer", "normalize_number", "numbers_in",
    "only_listed", "outer_boxes", "plain_number", "stated_part", "strip_formatting", "with_braces",
    "without_text_commands",
]  # fmt: skip

TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox|operatorname)\s*\{([^{}]*)\}")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
INTEGER = re.compile(rf"[-+]?{_DIGITS}", re.ASCII)
_NUMBER = re.compile(rf"(?:(?<!\d)[-+])?(?:{_DIGITS}(?:\.\d+)?|\.\d+)", re.ASCII)
_PLAIN_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+)", re.ASCII)
_ANSWER_LINE = re.compile(
    # quote, heading, bullet, bold, number of a step
    r"[ \t>#*_`•\-]*(?:\d{1,3}[.)][ \t*_]+)?(?:\\text(?:bf)?\{\s*)?"
    r"(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?"
    r"[ \t*_`}]*[:：][*_`}]*(?P<content>.*)",
    re.IGNORECASE,
)
_ANSWER_MATHEMATICS = re.compile(
    r"[ \t>#*_`•\-]*(?:the\s+)?(?:final\s+|correct\s+)?answer["
    r" \t*_`]+(?P<content>(?:\$|\\[(\[]).*)",
    re.IGNORECASE,
)
# \{ and \} are text
_BRACE = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
# `\boxed 7` and `\boxed\frac{1}{2}`: to the end of their formula, as MATH writes them
_WITHOUT_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox))(?:[ \t]+|(?=\\))(?=[-+.\d\\]|[A-Za-z](?![A-Za-z]))"
    r"(?P<content>(?:[^$\n\\]|\\[^)\]\n]){1,200})(?=\$|\\[)\]])"
)
# Text between two boxes of one list, with its spacing as one blank
_JOINED = re.compile(
    r"[\s$*]*(?:\\[()\]\[])?\s*(?:[,;]|\\text\{\s*)?\s*(?:and|or)?\s*\}?\s*(?:\\[()\]\[])?[\s$*]*"
)
_SPACING = re.compile(r"(?:\s|\\(?:q?quad(?![A-Za-z])|[,;:! ]))+")
# Text between two boxes where the second does not replace the first: both are stated
_ALTERNATIVE = re.compile(
    r"[^.\n\d]{0,80}\b(?:or(?!"
    r" rather)|alternatively|maybe|perhaps|possibly|otherwise)\b[^.\n\d]{0,80}",
    re.IGNORECASE,
)
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_DISPLAYS = {"$$": "$$", "\\[": "\\]"}  # each opening sign with its closing one
_DISPLAY_LINES = 50  # A bound, so that many answer lines before unclosed displays do not take long
_MAX_WRAPPERS = 50  # Each costs time in proportion to the text
_MARK = re.compile(
    r"\banswer(?:\s+is)?[ \t*_`}]{0,9}[:：]|\\f?box(?:ed)?(?![a-z])|####", re.IGNORECASE
)
# A worked solution without a box, up to its last mark: `#### 8`, `The answer is: 8`
_MARKED_END = re.compile(
    r"(?s:.*)(?:####|\banswer\b(?: is)?)[ \t]*[:：]?[ \t]*(?P<value>[^\s:：][^\n]{0,200}?)[.。]?\s*\Z",
    re.IGNORECASE,
)
# A sentence after an answer that takes it back
_RETRACTED = re.compile(
    r"[.!?\n$)}][\s*_.$]{0,9}(?:(?:but|oh|no|well),? )?"
    r"(?:(?:wait|hmm+|oops|sorry|actually|correction|scratch that|on second thoughts?|never"
    r" ?mind)\b"
    r"|no(?=\s*[,.!;:—]|\s*$))"
    r"|\b(?:that|this|it|which|result|value|answer|box|above)(?: (?:answer|result|value|one))?"
    r"(?: (?:is|was|seems|looks|must be|would be|has to be)| ?['’]s)"
    r" (?:wrong|incorrect|false|mistaken|a mistake|an error|invalid|impossible)\b"
    r"|(?:\bnot|n['’]t|\bcannot)(?: be)? (?:right|correct|true|valid|possible|the answer)\b"
    r"|\bI (?:made an? (?:\w+ )?(?:mistake|error)|was"
    r" (?:mistaken|wrong)|misread|miscounted|miscalculated)\b",
    re.IGNORECASE,
)
_STATED_AGAIN = re.compile(
    r"\b(?:answer|result) (?:is|should be|must be)[:\s$*]{0,5}(-?[\d.,]*\d)", re.IGNORECASE
)
_STATED_NUMBER = re.compile(r"[\s$*_{\\]{0,5}(-?[\d.,]*\d)[\s$*_}.]{0,5}(?:\n|$)")
_MAX_AFTER = 20_000
_WRAPPERS = (
    *((mark, mark) for mark in ("$$", "$", "**", "__", "*", "`", '"')),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("“", "”"),
    ("「", "」"),
    ("『", "』"),
    ("【", "】"),
    ("《", "》"),
    *(
        (f"<{name}>", f"</{name}>")
        for name in ("b", "strong", "i", "em", "u", "mark", "code", "answer", "span")
    ),
)


def final_part(response: str) -> str:
    """Return the text after the model's private reasoning (`</think>`); without it, the whole
    response.
    """
    return response.rpartition("</think>")[2]


def stated_part(response: str) -> str:
    """Return the `final_part` of a response; nothing if it takes back the last answer that it
    marks, or states another one.
    """
    text = final_part(response)
    ends = [mark.end() for mark in _MARK.finditer(text)]
    if not ends:
        return text
    remainder = text[ends[-1] :].lstrip()[:_MAX_AFTER].partition("<|")[0]
    if _RETRACTED.search(remainder):
        return ""
    number = _STATED_NUMBER.match(remainder)
    last = _STATED_AGAIN.search(remainder)
    if number and last and plain_number(number[1]) != plain_number(last[1]):
        return ""
    return text


def fences(text: str) -> list[tuple[str, str]]:
    """Return language (in lower case) and content of every Markdown code fence; an unclosed one
    extends to the end.
    """
    return [(language.lower(), content) for language, content in _FENCE.findall(text)]


def answer_lines(text: str) -> list[str]:
    """Return the content of each `Answer:` line, or of the line or display after it if the line
    itself is empty.

    Case is ignored, and so are Markdown bold, headings, quotes and bullets around the word; `Final
    answer:` and `The answer is:` count, and `Answer $9$`, a line of mathematics. `answer:` in the
    middle of a line does not.
    """
    lines = text.splitlines()
    contents: list[str] = []
    for index, line in enumerate(lines):
        stated = _ANSWER_LINE.match(line)
        if stated:
            content = stated["content"].strip(" \t*_`")
            contents.append(content or _first_block(lines, index + 1))
            continue
        mathematics = _ANSWER_MATHEMATICS.match(line)
        if mathematics:
            content = mathematics["content"].strip().rstrip(".")
            if content in _DISPLAYS:
                content = _first_block([content, *lines[index + 1 : index + _DISPLAY_LINES]], 0)
            if strip_formatting(content) != content:
                contents.append(content)
    return contents


def answer_line(text: str) -> str | None:
    """Return the last of `answer_lines`; None if there is none or it is empty."""
    return next(reversed(answer_lines(text)), None) or None


def _first_block(lines: Sequence[str], start: int) -> str:
    r"""Return the first line from `start` on that is not blank; if it opens a display (`$$`, `\[`),
    the whole display.
    """
    while start < len(lines) and not lines[start].strip():
        start += 1
    filled = [line.strip() for line in lines[start : start + _DISPLAY_LINES] if line.strip()]
    if not filled:
        return ""
    closing = _DISPLAYS.get(filled[0])
    if closing is None or closing not in filled[1:]:
        return filled[0]
    return " ".join(filled[: filled.index(closing, 1) + 1])


class Box(NamedTuple):
    r"""A `\boxed{content}` at `text[start:end]`."""

    text: str
    start: int
    content_start: int
    end: int

    @property
    def content(self) -> str:
        """The text between the braces.

        Cut on access: nested boxes would take memory quadratic in the length.
        """
        return self.text[self.content_start : self.end - 1]


def with_braces(text: str) -> str:
    r"""Return the text with `\boxed{7}` for `\boxed 7`."""
    return _WITHOUT_BRACES.sub(
        lambda match: f"{match['box']}{{{match['content'].rstrip(' .')}}}", text
    )


def boxes(text: str) -> list[Box]:
    r"""Return every `\boxed{...}` (or `\fbox{...}`) whose braces balance, in the order in which
    they close; those without braces as if they had them, so `Box.text` is what positions refer to.
    """
    text = with_braces(text)
    closed: list[Box] = []
    # where a box and its content start; None for a bare brace
    open_braces: list[tuple[int, int] | None] = []
    for match in _BRACE.finditer(text):
        if match["box"]:
            open_braces.append((match.start(), match.end()))
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces:
            box = open_braces.pop()
            if box is not None:
                closed.append(Box(text, *box, match.end()))
    return closed


def outer_boxes(text: str) -> list[Box]:
    """Return the `boxes` outside all other boxes, in the order of the text."""
    outer: list[Box] = []
    for box in reversed(boxes(text)):
        if not outer or box.end <= outer[-1].start:
            outer.append(box)
    return outer[::-1]


def last_box_list(text: str) -> list[Box]:
    """Return the last box and the boxes that form a list with it; empty without a box."""
    text = with_braces(text)
    in_order = sorted(boxes(text), key=lambda box: box.start)
    listed = in_order[-1:]
    for box in reversed(in_order[:-1]):
        following = listed[-1]
        if box.end > following.start:
            break
        between = text[box.end : following.start]
        is_joined = _JOINED.fullmatch(_SPACING.sub(" ", between))
        if not is_joined and not _ALTERNATIVE.fullmatch(between):
            break
        listed.append(box)
    return listed[::-1]


def final_answer(solution: str) -> str:
    r"""Return what a worked solution marks as its answer: the last box, or the list of boxes that
    it ends, else what its end marks by `####` or `The answer is`; a text without a mark as it is.

    Example:
        >>> final_answer(r"So $n > \boxed{4}$ feet."), final_answer("3 + 5 = 8 #### 8"), final_answer("8")
        ('4', '8', '8')
    """
    if listed := last_box_list(solution):
        return ", ".join(box.content for box in listed)
    marked = _MARKED_END.match(solution)
    return marked["value"] if marked else solution


def last_boxed(text: str) -> str | None:
    r"""Return the content of the `\boxed{...}` that starts last, of those whose braces balance;
    None if there is none.
    """
    all_boxes = boxes(text)
    return max(all_boxes, key=lambda box: box.start).content if all_boxes else None


def marked_answer(text: str) -> str | None:
    """Return the content of the last `Answer:` line, else of the last box; None if there is
    neither.
    """
    line = answer_line(text)
    return last_boxed(text) if line is None else line


def only_listed(reference: str) -> str:
    """Return the only item of a JSON list of one text, such as `["36"]`; else the text itself.

    Data sets whose problems may have several right answers write a single one so, too. A list of a
    number, `[36]`, may be mathematics and stays.
    """
    if not reference.lstrip().startswith("["):
        return reference
    try:
        items = json.loads(reference)
    except (ValueError, RecursionError):
        return reference
    if len(items) != 1 or not isinstance(items[0], str) or not items[0].strip():
        return reference
    return items[0]


def strip_formatting(text: str, *, braces: bool = False) -> str:
    r"""Return the text without the bold, code, quotes, dollars, `\( \)` or box around all of it,
    and without final full stops.

    With `braces` also without `{...}` and `\text{...}` around all of it.
    """
    for _ in range(_MAX_WRAPPERS):
        unstripped = text
        text = text.strip()
        if not text.endswith("\\."):  # the end of `\left ... \right\.`
            text = text.rstrip(".。．｡").rstrip()
        text = _without_wrapper(text)
        text = _without_box(text, braces=braces)
        if text == unstripped:
            break
    return text


def _without_wrapper(text: str) -> str:
    """Return the text without the first pair of signs that is around all of it."""
    for opening, closing in _WRAPPERS:
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            # `**a** and **b**` are two texts
            if inner and opening not in inner:
                return inner
    return text


def _without_box(text: str, *, braces: bool) -> str:
    """Return the content of a box that is the whole text; with `braces` also that of a group."""
    box = text
    if braces and text.startswith(("{", "\\text{")):
        box = "\\boxed" + text.removeprefix("\\text")
    if box.startswith(("\\boxed", "\\fbox")):
        for outer in boxes(box):
            if (outer.start, outer.end) == (0, len(outer.text)):
                return outer.content
    return text


def plain_number(text: str) -> Fraction | None:
    """Return the value of a text that is a single number (`-1,234.50`), else None."""
    text = text.strip().replace("−", "-")
    return _value(text) if _PLAIN_NUMBER.fullmatch(text) else None


def numbers_in(text: str) -> list[Fraction]:
    """Return every number of a text, in order: `-3` is one number, `3-4` holds 3 and 4."""
    return [_value(number) for number in _NUMBER.findall(text.replace("−", "-"))]


def normalize_number(number: Fraction) -> str:
    """Return the text of a number of any size; very large ones by their hash, for `str` refuses
    more than 4300 digits.
    """
    is_huge = max(number.numerator.bit_length(), number.denominator.bit_length()) > 10_000
    return f"a number with hash {hash(number)}" if is_huge else str(number)


def _value(number: str) -> Fraction:
    # not Fraction(text), which refuses numbers of more than 4300 digits: a model may write them
    return Fraction(*Decimal(number.replace(",", "")).as_integer_ratio())


def without_text_commands(part: str) -> str:
    r"""Return the text with `\text{B}` replaced by `B`."""
    return TEXT_COMMAND.sub(r"\1", part).strip()
