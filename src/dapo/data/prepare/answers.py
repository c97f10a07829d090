"""What kind of thing a reference answer is: integer, number, fraction, letter, expression or text."""

import re
from fractions import Fraction
from typing import Literal, TypeAlias

AnswerType: TypeAlias = Literal["integer", "number", "fraction", "expression", "letter", "text"]
ANSWER_TYPES: tuple[AnswerType, ...] = ("integer", "number", "fraction", "expression", "letter", "text")
_WRAPPINGS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("\\text{", "}"), ("{", "}"))
_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)\.\d*|\.\d+)", re.ASCII)
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<a>\d+)\s*/\s*(?P<b>\d+)"
    r"|\\[dtc]?frac\s*(?:\{\s*(?P<inner>-?)(?P<c>\d+)\s*\}\s*\{\s*(?P<d>\d+)\s*\}|(?P<e>\d)\s*(?P<f>\d)))",
    re.ASCII,
)
_LETTER = re.compile(r"\(?\s*([A-Z])\s*\)?")
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf)|mbox)\s*\{")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_FUNCTIONS = re.compile(
    r"(?i:arc)?(?i:sin|cos|tan|cot|sec|csc)h?|(?i:log|ln|exp|sqrt|max|min|gcd|lcm|mod|abs|det|lim|inf)"
)
_MAX_DIGITS = 1000


def answer_type(answer: str) -> AnswerType:
    """By its form: `1,234` is an integer, `2.50` a number, `3/4` a fraction, `(B)` a letter, `\\sqrt{2}` an expression.

    Text is what has words and no mathematics around them; `2.0` is a number, as it is written.
    """
    text = strip_formatting(answer)
    if _INTEGER.fullmatch(text):
        return "integer"
    without_percent = text.removesuffix("%").removesuffix("\\").rstrip()
    if _DECIMAL.fullmatch(without_percent) or _INTEGER.fullmatch(without_percent):
        return "number"
    if (match := _FRACTION.fullmatch(text)) and _denominator(match):
        return "fraction"
    if _LETTER.fullmatch(text):
        return "letter"
    plain = _COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", text))
    if any(not _FUNCTIONS.fullmatch(word) for word in _LONG_WORD.findall(plain)):
        return "text"
    return "expression" if re.search(r"\w|\\", text) else "text"


def answer_value(answer: str) -> Fraction | None:
    """The value of an integer, a decimal number or a fraction; None for every other answer."""
    text = strip_formatting(answer)
    if len(text) > _MAX_DIGITS:  # Python refuses to read numbers of thousands of digits
        return None
    if _INTEGER.fullmatch(text) or _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None or not _denominator(match):
        return None
    value = Fraction(int(match["a"] or match["c"] or match["e"]), _denominator(match))
    return -value if (match["sign"] == "-") != (match["inner"] == "-") else value


def answer_key(answer: str) -> str:
    """Equal for answers that are surely the same: by value, else by spelling without spaces and case of letters."""
    value = answer_value(answer)
    if value is not None:
        return str(value)
    text = strip_formatting(answer)
    if letter := _LETTER.fullmatch(text):
        return letter[1]
    # f and F are two expressions, yes and Yes one text
    return "".join((text.casefold() if answer_type(text) == "text" else text).split())


def strip_formatting(answer: str) -> str:
    """Without dollars, a box and a final full stop; the minus sign of typography becomes the plain one."""
    text, before = answer.replace("−", "-"), None
    while text != before:
        before = text
        text = text.strip().removesuffix(".").rstrip()
        for opening, closing in _WRAPPINGS:
            inner = text[len(opening) : -len(closing)]
            wraps = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
            if wraps and (opening not in inner if opening[-1] != "{" else _is_balanced(inner)):
                text = inner
    return text


def _is_balanced(text: str) -> bool:
    """Does every closing brace have its opening one before it?"""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def _denominator(match: re.Match[str]) -> int:
    return int(match["b"] or match["d"] or match["f"])
