"""Reads notations that are one thing as a whole: dates, labels, digits in a named base, and names
of variables.
"""

import re
from collections.abc import Sequence

from .answer import BaseNumber
from .expressions import Unreadable, parse_expression
from .text import without_text_commands
from .token_lists import is_bracketed, returns_only_at_end, split
from .tokenizer import Token, is_name
from .units import MONEY_CODES
from .vocabulary import CARDINALS

_MONTHS = (
    "january|february|march|april|may|june|july|august|september|october|november|december|jan|feb|mar|apr|jun|jul|aug"
    "|sept?|oct|nov|dec"
)
_DATE = re.compile(
    rf"(?:(?P<month>{_MONTHS})\.? (?P<day>\d{{1,2}})(?:st|nd|rd|th)?"
    rf"|(?P<first>\d{{1,2}})(?:st|nd|rd|th)? (?:of )?(?P<second>{_MONTHS})\.?)(?:,?"
    r" (?P<year>\d{4}))?",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?P<word>[A-Za-z]{3,}) (?P<number>\d{1,4}|[A-Z])")
_BASES = {word: str(base) for base, word in enumerate(CARDINALS)} | {"hex": "16"}


def label_of(text: str) -> str | None:
    """A date in one form, or a name with a number (`Team 3`); None for any other text."""
    plain = " ".join(without_text_commands(text).split())
    if date := _DATE.fullmatch(plain):
        month = (date["month"] or date["second"]).lower()[:3]
        day = int(date["day"] or date["first"])
        return f"{month} {day}" + (f" {date['year']}" if date["year"] else "")
    label = _LABEL.fullmatch(plain)
    return (
        plain
        if label and is_name(label["word"]) and label["word"].lower() not in MONEY_CODES
        else None
    )


def base_number(tokens: Sequence[Token]) -> BaseNumber | None:
    r"""A number in a named base, such as `1011_2` or `(1A)_{16}`, if the tokens are one."""
    index = next((i for i, t in enumerate(tokens) if t.is_sign("_")), None)
    if index is None or index == 0:
        return None
    digits = "".join(t.text for t in tokens[:index]).strip("()")
    base = "".join(t.text for t in tokens[index + 1 :]).strip("{}()")
    base = _BASES.get(base.lower(), base)
    is_hexadecimal = base == "16" and re.fullmatch("[\\dA-Fa-f]{2,}", digits) is not None
    is_digits = re.fullmatch(r"\d[\dA-Za-z]*|[\dA-F]*\d[\dA-F]*", digits) is not None
    if not (is_hexadecimal or is_digits) or not re.fullmatch(r"\d{1,2}|[a-z]+", base):
        return None
    return BaseNumber(digits.upper().lstrip("0") or "0", base)


def name_of(side: Sequence[Token]) -> str | None:
    r"""The name if a side is only a name, as `x`, `x_1` and `f(3)` are; else None."""
    if not side or side[0].kind != "name":
        return None
    if len(side) > 3 and side[1].is_sign("(") and side[-1].is_sign(")") and side[0].text.isalpha():
        return (
            side[0].text
            if returns_only_at_end(side[1:]) and not side[2].is_sign("+", "-")
            else None
        )
    try:
        node = parse_expression(side)
    except Unreadable:
        return None
    return node.text if node.op == "name" or node.text == "e" else None


def names_of_side(side: Sequence[Token]) -> tuple[str, ...]:
    """The names if a side is only names, as `x` and `(x, y)` are; else empty."""
    if name := name_of(side):
        return (name,)
    if is_bracketed(side, "("):
        names = [name_of(piece) for piece in split(side[1:-1], ",")]
        if len(names) > 1 and all(names):
            return tuple(name for name in names if name)
    return ()


def names_points(tokens: Sequence[Token]) -> bool:
    """Whether tokens introduce coordinates: `A`, `the point`."""
    if len(tokens) == 1 and tokens[0].kind == "name":
        return tokens[0].text.isupper()
    return bool(tokens) and all(
        t.text.lower() in ("the", "point", "ordered", "pair", "vector") for t in tokens
    )
