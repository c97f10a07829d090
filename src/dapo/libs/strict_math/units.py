"""Reads units after a value, and currencies before it, into one form: `m/s^2` equals `meters per
second squared`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from .tokenizer import Token
from .vocabulary import (
    BARE_UNITS,
    COUNTED,
    GENERIC,
    KINDS,
    NO_UNIT,
    PREFIXES,
    SCALES,
    SYMBOLS,
    UNITS,
)

# each factor with its exponent, sorted; empty: no unit
Unit: TypeAlias = tuple[tuple[str, int], ...]

_PREFIXED = {
    **{
        prefix + symbol: PREFIXES[prefix] + name
        for symbol, name in SYMBOLS.items()
        for prefix in PREFIXES
    },
    **{f"{prefix}B": f"{PREFIXES.get(prefix, 'tera')}byte" for prefix in "kMGT"},
}
_SYMBOLS = _PREFIXED | SYMBOLS


def _forms_in_other_case() -> dict[str, str]:
    counts = Counter(map(str.lower, _SYMBOLS))
    forms = {}
    for symbol, name in _SYMBOLS.items():
        if counts[symbol.lower()] > 1:
            continue  # Mg and mg
        forms[symbol.lower()] = name
        forms[symbol.upper()] = name
        forms["K" + symbol[1:] if symbol[0] == "k" else symbol] = name
    return forms


# Symbols in lower case, in capitals, and with a capital K; any other case is another symbol: `cM`
# is no `cm`
_IN_OTHER_CASE = _forms_in_other_case()
_NAMES = {name: unit for unit, names in UNITS.items() for name in (unit, *names.split())}
_NAMES |= {name: name for name in _SYMBOLS.values()}
_NAMES |= {name[:-2] + "re": name for name in _NAMES.values() if name.endswith(("meter", "liter"))}
_KNOWN = frozenset(_NAMES.values())
PERCENT: Unit = (("percent", 1),)
# Units of one dimension with their ratio (0: none), used to reject `2 hours = 5 minutes`, never to
# accept a unit
_CONVERTED = (
    {
        "second": 1,
        "minute": 60,
        "hour": 3600,
        "day": 86_400,
        "week": 604_800,
        "month": 0,
        "year": 0,
    },
    {
        "millimeter": 1,
        "centimeter": 10,
        "meter": 1000,
        "kilometer": 1_000_000,
        "inch": 0,
        "foot": 0,
        "yard": 0,
        "mile": 0,
    },
    {"inch": 1, "foot": 12, "yard": 36, "mile": 63_360},
    {"milligram": 1, "gram": 1000, "kilogram": 1_000_000, "ton": 0, "pound": 0, "ounce": 0},
    {"milliliter": 1, "liter": 1000, "gallon": 0, "quart": 0, "pint": 0, "cup": 0},
    {"cent": 1, "dollar": 100, "euro": 0},
)
COMPOUND = {
    "mph": (("mile", 1), ("hour", -1)),
    "kph": (("kilometer", 1), ("hour", -1)),
    "kmh": (("kilometer", 1), ("hour", -1)),
    "cc": (("centimeter", 3),),
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_CHANGING_WORDS = frozenset((*SCALES, *_POWERS_AFTER, "factorial", "times"))
_MONEY = ("$", "€", "£", "¥", "¢")
MONEY_CODES = ("us", "usd", "eur", "gbp", "rs")
_DIGIT_IN_BRACES = re.compile(r"(?:\{([-+]?[1-9])\}|([1-9]))")
_MAX_WORDS = 4
_UNIT_PHRASE = re.compile(
    r"(?:(?=per |/)|(?:(?:square|sq|cubic|cu)[.]? )?(?P<name>[A-Za-z]+)(?:\^\{?\d\}?|[²³]|"
    r" (?:squared|cubed)\b)?)"
    r"(?P<divided>(?: per | ?/ ?| (?:an?|each|every) |per"
    r" )(?P<divisor>[A-Za-z]+)(?:\^\{?\d\}?|[²³])?)?",
    re.IGNORECASE,
)

_MAX_SYMBOLS = 80
_FRACTION_OF_UNITS = re.compile(
    r"\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\}){1,30})\}\s*\{((?:[^{}]|\{[^{}]*\}){1,30})\}"
)
_UNIT_MARKUP = re.compile(
    r"\$|\\[()\[\],;:! ]|\\(?:text|mathrm|textrm|rm|operatorname|mbox|left|right)(?![A-Za-z])|[{}~]"
)
_COMMON_WORDS = ("in", "am")  # inches and a time of day as symbols
_UNIT_NAME = re.compile(r"[A-Za-z]+")
_POWER = r"(?:\^?-?[1-9](?!\d)|[²³])?"
_UNIT_SYMBOLS = re.compile(
    rf"[A-Za-z]+{_POWER}(?: ?(?:/|\*| per ) ?[A-Za-z]+{_POWER}){{0,3}}(?![A-Za-z])"
)
_ENDS_PHRASE = re.compile(r"\s*(?:[?.,;:!)]|$|of (?:the|this|its|each)\b)")


@dataclass(frozen=True)
class Nouns:
    """The nouns that may follow a number, besides units."""

    singulars: frozenset[str] | None = None
    """None for any noun."""
    counted: frozenset[str] = frozenset()
    """Words that the question counts (`how many times`), even if they change a number elsewhere."""

    def allow(self, word: str) -> bool:
        """Return True if a word, in lower case, may follow a number."""
        if self.counts(word):
            return True
        if word in NO_UNIT:
            return False
        name = canonical(word)
        return self.singulars is None or name in self.singulars or name in GENERIC

    def counts(self, word: str) -> bool:
        """Return True if the question counts the word, which may be a singular."""
        return word in self.counted or f"{word}s" in self.counted


ANY_NOUN = Nouns()


def split_unit(
    tokens: Sequence[Token], names: frozenset[str], nouns: Nouns
) -> tuple[list[Token], Unit, Fraction]:
    """Split tokens into the value, its unit, and the factor of a word such as `million`.

    Args:
        tokens: One value with its unit.
        names: Variables of the reference; they are never units.
        nouns: The nouns that may follow the value.
    """
    tokens, money = _split_money(list(tokens))
    start = len(tokens) if _ends_in_an_angle(tokens) else _start_of_unit(tokens, names)
    if money and 1 < start < len(tokens):
        divides_number = tokens[start - 1].is_sign("/") and tokens[start - 2].kind == "number"
        start -= divides_number  # `$42/hour`
    if start == 0:
        return tokens, money, Fraction(1)
    unit, scale = _read(tokens[start:], nouns)
    if unit is None or dict(unit).get("percent", 1) != 1:
        return tokens, money, Fraction(1)
    if money and all(power < 0 for _, power in unit):
        return tokens[:start], tuple(sorted((*money, *unit))), scale
    if money and unit != money:
        return [], money, Fraction(1)  # `$3 kg`: no value
    return tokens[:start], unit or money, scale


def _ends_in_an_angle(tokens: Sequence[Token]) -> bool:
    r"""Return True if the degrees at the end belong to a function: `\\sin 30^\\circ`."""
    if not tokens or not tokens[-1].is_sign("°"):
        return False
    return any(token.kind == "function" for token in tokens)


def _split_money(tokens: list[Token]) -> tuple[list[Token], Unit]:
    sign = 1 if len(tokens) > 1 and tokens[0].is_sign("-", "+") else 0
    if (
        len(tokens) > sign
        and tokens[sign].text.lower() in MONEY_CODES
        and tokens[sign].kind == "word"
    ):
        following = tokens[sign + 1 : sign + 2]
        if following and following[0].is_sign("$"):
            del tokens[sign]
        elif following and following[0].kind == "number":
            return tokens[:sign] + tokens[sign + 1 :], ((canonical(tokens[sign].text), 1),)
    if len(tokens) > sign + 1 and tokens[sign].text in (*_MONEY, "\\cent"):
        money = canonical(tokens[sign].text)
        amount = tokens[sign + 1 :]
        if sign == 0 and amount[0].is_sign("-"):
            return amount, ((money, 1),)
        return tokens[:sign] + amount, ((money, 1),)
    return tokens, ()


def _start_of_unit(tokens: Sequence[Token], names: frozenset[str]) -> int:
    """Return the index where the unit starts; 0 if the value would be empty."""
    start = position = len(tokens)
    while position > 0:
        position -= 1
        token = tokens[position]
        if _names_unit(tokens, position, names):
            start = position
        elif not (
            token.kind == "number" or token.is_sign("^", "/", "*", "-", "{", "}", "(", ")", "+")
        ):
            break
    return start if start < len(tokens) else len(tokens)


def _names_unit(tokens: Sequence[Token], index: int, names: frozenset[str]) -> bool:
    if index >= len(tokens):
        return False
    token = tokens[index]
    if token.kind == "word" or _is_unit_sign(token):
        return True
    if token.kind != "name" or token.text in names:
        return False
    if token.text not in BARE_UNITS:
        previous = tokens[index - 1] if index else None
        return previous is not None and previous.is_sign("°") and token.text in ("C", "F")
    previous_sign = tokens[index - 1] if index else None
    if previous_sign is None or (
        index > 1 and previous_sign.is_sign("/", "*") and _names_unit(tokens, index - 2, names)
    ):
        return previous_sign is not None
    return token.after_space and (
        previous_sign.kind == "number"
        or previous_sign.is_sign("}", "pi", ")")
        or previous_sign.kind == "word"
    )


def _is_unit_sign(token: Token) -> bool:
    return token.is_sign("%", "°", *_MONEY) or token.text == "\\cent"


def _read(tokens: Sequence[Token], nouns: Nouns) -> tuple[Unit | None, Fraction]:
    """Parse tokens as a unit with an optional factor before it; the unit is None if they are
    anything else.
    """
    first = tokens[0].text.lower() if tokens else ""
    scale = Fraction(1)
    if not nouns.counts(first):
        scale = Fraction(SCALES.get(first, 1))
    reader = _UnitReader(nouns)
    index = int(scale != 1)
    while index < len(tokens):
        following = reader.read(tokens, index)
        if following is None:
            return None, scale
        index = following
    return reader.unit(), scale


class _UnitReader:
    """Collects the factors of one unit."""

    def __init__(self, nouns: Nouns) -> None:
        self._allowed = nouns
        self._factors: Counter[str] = Counter()
        self._nouns: list[str] = []
        self._sign = 1
        self._power = 1

    def read(self, tokens: Sequence[Token], index: int) -> int | None:
        """Read the factor at `index`; returns the index after it, or None if it is not a unit."""
        token = tokens[index]
        word = token.text.lower()
        if word in ("/", "per"):
            self._sign = -1
        elif word in _POWERS:
            self._power = _POWERS[word]
        elif word in COMPOUND:
            self._factors.update(dict(COMPOUND[word]))
        elif word in ("c", "f") and self._factors.get("degree"):
            self._factors = Counter({"celsius" if word == "c" else "fahrenheit": 1})
        elif not (
            (word in ("*", "-") and self._factors) or (word in KINDS and index + 1 < len(tokens))
        ):
            return self._factor(tokens, index)
        return index + 1

    def unit(self) -> Unit | None:
        """Return the collected unit; None for a text of many words or the square of an unknown
        word.
        """
        if len(self._nouns) > _MAX_WORDS or (self._nouns and self._power != 1):
            return None
        if self._nouns:
            self._factors[" ".join(self._nouns)] += 1
        return tuple(
            sorted((name, exponent) for name, exponent in self._factors.items() if exponent)
        )

    def _factor(self, tokens: Sequence[Token], index: int) -> int | None:
        token = tokens[index]
        if token.kind not in ("word", "name") and not _is_unit_sign(token):
            return None
        exponent, following = _exponent(tokens, index + 1)
        if exponent is None or (token.text == "in" and _names_unit(tokens, index + 1, frozenset())):
            return None  # `in percent` has no inches
        name = canonical(token.text)
        if name in ("celsius", "fahrenheit"):
            self._factors.pop("degree", None)
        if name in _KNOWN:
            self._factors[name] += self._sign * self._power * exponent
            self._power = 1
        elif self._is_noun(token) and self._sign < 0:
            self._factors[name] -= 1  # `chairs per row`
        elif self._is_noun(token) and name not in self._nouns:
            self._nouns.append(name)
        else:
            return None
        return following

    def _is_noun(self, token: Token) -> bool:
        """Return True if the word can be a counted noun after a number (`6 apples`, not `6abc`)."""
        if len(token.text) < 3 or not (token.after_space or token.in_text):
            return False
        return self._allowed.allow(token.text.lower())


def _exponent(tokens: Sequence[Token], index: int) -> tuple[int | None, int]:
    """Return the exponent at `index` (`^2`, `^{-1}`, `squared`) and the index after it; None if it
    is not an integer.
    """
    if index >= len(tokens):
        return 1, index
    word = tokens[index].text.lower()
    if word in _POWERS_AFTER:
        return _POWERS_AFTER[word], index + 1
    if not tokens[index].is_sign("^"):
        return 1, index
    text = ""
    for end in range(index + 1, min(index + 5, len(tokens))):
        text += tokens[end].text
        match = _DIGIT_IN_BRACES.fullmatch(text)
        if match:
            return int(match[1] or match[2]), end + 1
    return None, index


@lru_cache(10_000)
def canonical(word: str) -> str:
    """Return the name of a unit for any of its names and symbols; of any other word its singular in
    lower case.
    """
    for symbol in (word, *_singulars(word)):
        if symbol in _SYMBOLS:
            return _SYMBOLS[symbol]
    if len(word) == 1:
        return _NAMES.get(word, word)
    lower = word.lower().rstrip(".")
    for form in (lower, *_singulars(lower)):
        if len(form) > 1 and form in _NAMES:
            return _NAMES[form]
    plain = word.rstrip(".")
    for form in (plain, *_singulars(plain)):
        if len(form) > 1 and form in _IN_OTHER_CASE:
            return _IN_OTHER_CASE[form]
    return (_singulars(lower) or [lower])[0]


def _singulars(word: str) -> list[str]:
    if len(word) < 3 or not word.endswith("s") or word.endswith("ss"):
        return []
    if word.endswith("ies") and len(word) > 4 and word[:-1] not in COUNTED:
        return [word[:-3] + "y"]
    if word.endswith(("xes", "ches", "shes", "sses")):
        return [word[:-2]]
    return [word[:-1]]


def words_of_unit(text: str) -> str:
    """Return the unit, the factor or the power that begins a text: `km per hour`, `thousand`,
    `squared`; else nothing.
    """
    phrase = _UNIT_PHRASE.match(text)
    if phrase is None:
        return ""
    name = phrase["name"] or ""
    if name.lower() in _CHANGING_WORDS:
        return name
    if not name and is_unit(phrase["divisor"]):
        return phrase[0]
    return unit_phrase(text, 0)


def unit_phrase(text: str, start: int) -> str:
    """Return the unit that stands at `start`, such as `square meters`, `km/h` and `percent`; else
    nothing.
    """
    phrase = _UNIT_PHRASE.match(text, start)
    if phrase is None:
        return ""
    name = phrase["name"] or ""
    if not is_unit(name) or name.lower() in _COMMON_WORDS:
        return ""
    if len(name) == 1 and phrase[0] == name:
        return ""  # a letter alone may be a variable
    if phrase["divided"] and not is_unit(phrase["divisor"]):
        return phrase[0].removesuffix(phrase["divided"])
    return phrase[0]


def unit_symbols(text: str, start: int) -> str:
    r"""Return the unit in symbols that stands at `start`, in LaTeX or plain, as in `in
    $\text{cm}^2$` and `in km/h?`; else "".

    One letter counts only in a text command or before a sign of punctuation: `in m?`, not `in m
    minutes`.
    """
    passage = text[start : start + _MAX_SYMBOLS]
    plain = _FRACTION_OF_UNITS.sub(r"\1/\2", passage)
    plain = _UNIT_MARKUP.sub("", plain).replace("·", "*").replace("\\cdot", "*")
    symbols = _UNIT_SYMBOLS.match(plain.lstrip(" ("))
    if symbols is None:
        return ""
    is_wrapped = passage.lstrip(" $(").startswith("\\")
    is_bare_letter = len(symbols[0].strip()) == 1 and not is_wrapped
    if is_bare_letter and not _ENDS_PHRASE.match(symbols.string, symbols.end()):
        return ""
    names = _UNIT_NAME.findall(symbols[0])
    if names[0].lower() in _COMMON_WORDS or not all(map(is_unit, set(names) - {"per"})):
        return ""
    return _UNIT_NAME.sub(_in_text_command, symbols[0])


def _in_text_command(name: re.Match[str]) -> str:
    if name[0] == "per":
        return name[0]
    return f"\\text{{{name[0]}}}"


def is_unit(word: str) -> bool:
    """Return True if a word or symbol is a unit of measurement or of money."""
    return canonical(word) in _KNOWN


def conversion(unit: Unit, target_unit: Unit) -> Fraction | None:
    """Return the number of `other` units in one `unit`; None where unknown."""
    if len(unit) != 1 or len(target_unit) != 1 or unit[0][1] != target_unit[0][1]:
        return None
    name, exponent = unit[0]
    target, _ = target_unit[0]
    for sizes in _CONVERTED:
        if sizes.get(name) and sizes.get(target):
            return Fraction(sizes[name], sizes[target]) ** exponent
    return None


def format_unit(unit: Unit) -> str:
    """Return a unit as text: `meter second^-2`."""
    return " ".join(name if exponent == 1 else f"{name}^{exponent}" for name, exponent in unit)
