"""Reads notations that are one thing as a whole: dates, labels, digits in a named base, and names
of variables.
"""

import re
from collections.abc import Sequence

from .answer import BaseNumber
from .expressions import Unreadable, parse_expression
from .text import without_text_commands
from .token_lists import closes_at_end, is_bracketed, split
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
_POINT_WORDS = frozenset(("the", "point", "ordered", "pair", "vector"))
_LABEL = re.compile(r"(?P<word>[A-Za-z]{3,}) (?P<number>\d{1,4}|[A-Z])")
_HEXADECIMAL = re.compile("[\\dA-Fa-f]{2,}")
_DIGITS = re.compile(r"\d[\dA-Za-z]*|[\dA-F]*\d[\dA-F]*")
_BASE = re.compile(r"\d{1,2}|[a-z]+")
_BASES = {word: str(base) for base, word in enumerate(CARDINALS)} | {"hex": "16"}


def label_of(text: str) -> str | None:
    """Return a date in one form, or a name with a number (`Team 3`); None for any other text."""
    plain = " ".join(without_text_commands(text).split())
    date = _DATE.fullmatch(plain)
    if date:
        return _one_form(date)
    label = _LABEL.fullmatch(plain)
    if label is None:
        return None
    is_label = is_name(label["word"]) and label["word"].lower() not in MONEY_CODES
    return plain if is_label else None


def _one_form(date: re.Match[str]) -> str:
    """Return a date as `mar 14` or `mar 14 2024`."""
    month = date["month"] or date["second"]
    day = int(date["day"] or date["first"])
    text = f"{month.lower()[:3]} {day}"
    if date["year"]:
        text += f" {date['year']}"
    return text


def base_number(tokens: Sequence[Token]) -> BaseNumber | None:
    r"""Return a number in a named base, such as `1011_2` or `(1A)_{16}`; None for anything else."""
    index = next((i for i, token in enumerate(tokens) if token.is_sign("_")), 0)
    if index == 0:
        return None
    digits = "".join(token.text for token in tokens[:index]).strip("()")
    base = "".join(token.text for token in tokens[index + 1 :]).strip("{}()")
    base = _BASES.get(base.lower(), base)
    # `ABC` is a number only where the base says so; elsewhere it is a product
    is_hexadecimal = base == "16" and _HEXADECIMAL.fullmatch(digits) is not None
    if not is_hexadecimal and not _DIGITS.fullmatch(digits):
        return None
    if not _BASE.fullmatch(base):
        return None
    return BaseNumber(digits.upper().lstrip("0") or "0", base)


def name_of(side: Sequence[Token]) -> str | None:
    r"""Return the name if a side is only a name, as `x`, `x_1` and `f(3)` are; else None."""
    if not side or side[0].kind != "name":
        return None
    first = side[0].text
    if len(side) > 3 and side[1].is_sign("(") and side[-1].is_sign(")") and first.isalpha():
        # a value of a function, unlike the product `x(+1)`
        is_call = closes_at_end(side[1:]) and not side[2].is_sign("+", "-")
        return first if is_call else None
    try:
        node = parse_expression(side)
    except Unreadable:
        return None
    if node.op == "name" or node.text == "e":
        return node.text
    return None


def names_of_side(side: Sequence[Token]) -> tuple[str, ...]:
    """Return the names if a side is only names, as `x` and `(x, y)` are; else nothing."""
    name = name_of(side)
    if name:
        return (name,)
    if is_bracketed(side, "("):
        coordinates = split(side[1:-1], ",")
        names = tuple(filter(None, map(name_of, coordinates)))
        if len(names) == len(coordinates) > 1:
            return names
    return ()


def names_points(tokens: Sequence[Token]) -> bool:
    """Return True if tokens introduce coordinates: `A`, `the point`."""
    if len(tokens) == 1 and tokens[0].kind == "name":
        return tokens[0].text.isupper()
    words = {token.text.lower() for token in tokens}
    return bool(words) and words <= _POINT_WORDS
