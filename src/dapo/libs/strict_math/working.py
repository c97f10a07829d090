"""Finds the calculations in a sentence: `38 + 44 = 82` of `He bought 38 + 44 = 82 sausages`."""

import re
from fractions import Fraction

from .arithmetic import value_of
from .expressions import Unreadable, parse_expression
from .tokenizer import clean, tokenize
from .vocabulary import NO_UNIT, word_set

_NUMBER = r"(?:\d{1,3}(?:,\d{3}){1,5}|\d{1,30})(?:\.\d{1,30})?|\.\d{1,30}"
_OPERATION = r"\s?[-+*/×·÷−–x]\s?"
# A number with the words behind it: `$18`, `(6 hours`, `8 slices/pizza`, `3 barrels a year`
_TERM = rf"\({{0,3}}[$€£]?(?:{_NUMBER})%?(?:[ /][A-Za-z]{{2,30}}){{0,6}}\){{0,3}}"
_SIDE = rf"{_TERM}(?:{_OPERATION}{_TERM}){{0,9}}"
# Not a part of an expression or of a longer number: behind a letter, a sign or a bracket
_CALCULATION = re.compile(
    rf"(?<![\w.,$(\\])(?<![-+*/×·÷−–=^<>≤≥≈(]\s)(?<![-+*/×·÷−–=^<>≤≥≈])"
    rf"(?P<sides>(?:{_SIDE}\s?=\s?){{1,4}})"
    rf"(?P<result>[$€£]?(?P<number>{_NUMBER})(?P<percent>%?))"
    rf"(?![\d$^(]|[.,]\d|{_OPERATION}[\d.($]|\s?[=<>≤≥≈])"
)
_OPERATES = re.compile(rf"{_OPERATION}[\d.($€£]")
_WORDS = re.compile(r"[ /][A-Za-z]{2,30}")
_SIGNS = str.maketrans("×·÷−–x", "**/--*", "$€£,")
_JOINING = word_set("of per a an the each every")


def without_working(text: str) -> str:
    """Return the text with the result in the place of each calculation that is true: `He bought 82
    sausages`.

    The terms of a calculation may have units (`6 hours * $3`). One that is untrue stays, and so
    does one whose words change a number (`2 dozen * 3 = 6`).
    """
    return _CALCULATION.sub(_result, text)


def _result(calculation: re.Match[str]) -> str:
    """Return the result of a calculation; the whole of it where its value is another."""
    sides = [side for side in calculation["sides"].split("=") if side.strip()]
    result = Fraction(calculation["number"].replace(",", ""))
    results = {result}
    if calculation["percent"]:
        results.add(result / 100)
    is_operation = any(_OPERATES.search(side) for side in sides)
    if is_operation and all(_value(side) in results for side in sides):
        return calculation["result"]
    return calculation[0]


def _value(side: str) -> Fraction | None:
    """Return the value of an operation on numbers with units; None where a word changes one of
    them.
    """
    words = {word[1:].lower() for word in _WORDS.findall(side)}
    if not words.isdisjoint(NO_UNIT - _JOINING):
        return None
    operation = _WORDS.sub("", side).translate(_SIGNS).replace("%", "/100")
    try:
        value = value_of(parse_expression(tokenize(clean(operation))))
    except (Unreadable, ArithmeticError, RecursionError):
        return None
    return value if isinstance(value, Fraction) else None
