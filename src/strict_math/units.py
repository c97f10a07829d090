"""Reads units after a value, and currencies before it, into one form: `m/s^2` equals `meters per second squared`."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

from strict_math.tokenizer import Token
from strict_math.vocabulary import BARE_UNITS, CASED_UNITS, NO_UNIT, UNITS

Unit: TypeAlias = tuple[tuple[str, int], ...]  # each factor with its exponent, sorted; empty: no unit

_CANONICAL = {name: unit for unit, names in UNITS.items() for name in (unit, *names.split())}
PERCENT: Unit = (("percent", 1),)
_CONVERTED = (
    {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800},
    {"millimeter": 1, "centimeter": 10, "meter": 1000, "kilometer": 1_000_000},
    {"inch": 1, "foot": 12, "yard": 36, "mile": 63_360},
    {"milligram": 1, "gram": 1000, "kilogram": 1_000_000},
    {"milliliter": 1, "liter": 1000},
    {"cent": 1, "dollar": 100},
)
"""Units with a known ratio, used to reject `2 hours = 5 minutes`, never to accept another unit."""
_COMPOUND = {
    "mph": (("mile", 1), ("hour", -1)),
    "kph": (("kilometer", 1), ("hour", -1)),
    "kmh": (("kilometer", 1), ("hour", -1)),
    "cc": (("centimeter", 3),),
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MONEY = ("$", "€", "£", "¥", "¢")
_MAX_WORDS = 4


def split_unit(tokens: Sequence[Token], names: frozenset[str]) -> tuple[list[Token], Unit, Fraction]:
    """Split tokens into the value, its unit, and the factor of a word such as `million`.

    Args:
        tokens: One value with its unit.
        names: Variables of the reference; they are never units.
    """
    tokens, before = _split_money(list(tokens))
    start = len(tokens) if _ends_in_an_angle(tokens) else _start_of_unit(tokens, names)
    unit, scale = _read(tokens[start:]) if start else (None, Fraction(1))
    if unit is None:
        return tokens, before, Fraction(1)
    if before and unit and unit != before:
        return [], before, Fraction(1)
    return tokens[:start], unit or before, scale


def _ends_in_an_angle(tokens: Sequence[Token]) -> bool:
    r"""Whether the degrees at the end belong to a function: `\\sin 30^\\circ`."""
    return bool(tokens) and tokens[-1].is_sign("°") and any(token.kind == "function" for token in tokens)


def _split_money(tokens: list[Token]) -> tuple[list[Token], Unit]:
    sign = 1 if len(tokens) > 1 and tokens[0].is_sign("-", "+") else 0
    if (
        len(tokens) > sign
        and tokens[sign].text.lower() in ("us", "usd", "eur", "gbp", "rs")
        and tokens[sign].kind == "word"
    ):
        following = tokens[sign + 1 : sign + 2]
        if following and following[0].is_sign("$"):
            del tokens[sign]
        elif following and following[0].kind == "number":
            return tokens[:sign] + tokens[sign + 1 :], ((_canonical(tokens[sign].text), 1),)
    if len(tokens) > sign + 1 and tokens[sign].text in (*_MONEY, "\\cent"):
        money = _canonical(tokens[sign].text)
        rest = tokens[sign + 1 :]
        if sign == 0 and rest[0].is_sign("-"):
            return rest, ((money, 1),)
        return tokens[:sign] + rest, ((money, 1),)
    return tokens, ()


def _start_of_unit(tokens: Sequence[Token], names: frozenset[str]) -> int:
    """The index where the unit starts; 0 if the value would be empty."""
    start = index = len(tokens)
    while index > 0:
        index -= 1
        token = tokens[index]
        if _names_unit(tokens, index, names):
            start = index
        elif not (token.kind == "number" or token.is_sign("^", "/", "*", "-", "{", "}", "(", ")", "+")):
            break
    return start if start < len(tokens) else len(tokens)


def _names_unit(tokens: Sequence[Token], index: int, names: frozenset[str]) -> bool:
    token = tokens[index]
    if token.kind == "word" or token.is_sign("%", "°", *_MONEY) or token.text == "\\cent":
        return True
    if token.kind != "name" or token.text in names:
        return False
    if token.text not in BARE_UNITS:
        previous = tokens[index - 1] if index else None
        return previous is not None and previous.is_sign("°") and token.text in ("C", "F")
    before = tokens[index - 1] if index else None
    if before is None or (index > 1 and before.is_sign("/", "*") and _names_unit(tokens, index - 2, names)):
        return before is not None
    return token.after_space and (before.kind == "number" or before.is_sign("}", "pi", ")") or before.kind == "word")


def _read(tokens: Sequence[Token]) -> tuple[Unit | None, Fraction]:
    """Parse tokens as a unit with an optional factor before it; the unit is None if they are anything else."""
    scale = Fraction(_SCALES.get(tokens[0].text.lower(), 1)) if tokens else Fraction(1)
    reader = _UnitReader()
    index = int(scale != 1)
    while index < len(tokens):
        following = reader.read(tokens, index)
        if following is None:
            return None, scale
        index = following
    return reader.unit(), scale


class _UnitReader:
    """Collects the factors of one unit."""

    def __init__(self) -> None:
        self._factors: Counter[str] = Counter()
        self._nouns: list[str] = []
        self._sign, self._power = 1, 1

    def read(self, tokens: Sequence[Token], index: int) -> int | None:
        """Read the factor at `index`; returns the index after it, or None if it is not a unit."""
        token = tokens[index]
        word = token.text if token.text in CASED_UNITS else token.text.lower()
        if word in ("/", "per"):
            self._sign = -1
        elif word in _POWERS:
            self._power = _POWERS[word]
        elif word in _COMPOUND:
            self._factors.update(dict(_COMPOUND[word]))
        elif word in ("c", "f") and self._factors.get("degree"):
            self._factors = Counter({"celsius" if word == "c" else "fahrenheit": 1})
        elif not (word in ("*", "-") and self._factors):
            return self._factor(tokens, index, word)
        return index + 1

    def unit(self) -> Unit | None:
        """The collected unit; None for a text of many words or the square of an unknown word."""
        if len(self._nouns) > _MAX_WORDS or (self._nouns and self._power != 1):
            return None
        if self._nouns:
            self._factors[" ".join(self._nouns)] += 1
        return tuple(sorted((name, exponent) for name, exponent in self._factors.items() if exponent))

    def _factor(self, tokens: Sequence[Token], index: int, word: str) -> int | None:
        token = tokens[index]
        if token.kind not in ("word", "name") and not token.is_sign("%", "°", *_MONEY) and word != "\\cent":
            return None
        exponent, following = _exponent(tokens, index + 1)
        if exponent is None or word in NO_UNIT:
            return None
        canonical = _canonical(word)
        if canonical in ("celsius", "fahrenheit"):
            self._factors.pop("degree", None)
        if canonical not in UNITS and (len(word) < 3 or not (token.after_space or token.in_text)):
            return None  # neither 6abc nor 6 ab is a number of things
        if canonical in UNITS:
            self._factors[canonical] += self._sign * self._power * exponent
            self._power = 1
        else:
            self._nouns.append(canonical)
        return following


def _exponent(tokens: Sequence[Token], index: int) -> tuple[int | None, int]:
    """The exponent at `index` (`^2`, `^{-1}`, `squared`) and the index after it; None if it is not an integer."""
    if index < len(tokens) and tokens[index].text.lower() in _POWERS_AFTER:
        return _POWERS_AFTER[tokens[index].text.lower()], index + 1
    if index >= len(tokens) or not tokens[index].is_sign("^"):
        return 1, index
    text = ""
    for end in range(index + 1, min(index + 5, len(tokens))):
        text += tokens[end].text
        if match := re.fullmatch(r"(?:\{([-+]?[1-9])\}|([1-9]))", text):
            return int(match[1] or match[2]), end + 1
    return None, index


def _canonical(word: str) -> str:
    word = word if word in CASED_UNITS else word.lower().rstrip(".")
    if word in _CANONICAL:
        return _CANONICAL[word]
    singular = re.sub(r"(?<=[a-z]{2})s$", "", word)
    return _CANONICAL.get(singular, singular)


def conversion(unit: Unit, other: Unit) -> Fraction | None:
    """The number of `other` units in one `unit`; None where unknown."""
    if len(unit) != 1 or len(other) != 1 or unit[0][1] != other[0][1]:
        return None
    (name, exponent), (target, _) = unit[0], other[0]
    for sizes in _CONVERTED:
        if name in sizes and target in sizes:
            return Fraction(sizes[name], sizes[target]) ** exponent
    return None


def format_unit(unit: Unit) -> str:
    """A unit as text: `meter second^-2`."""
    return " ".join(name if exponent == 1 else f"{name}^{exponent}" for name, exponent in unit)
