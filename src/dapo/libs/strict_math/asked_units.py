"""The units in which a question can be answered: the one that it requests, else those of the
quantity it asks for.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TypeAlias

from .tokenizer import clean, tokenize
from .units import (
    ANY_NOUN,
    COMPOUND,
    Unit,
    canonical,
    split_unit,
    unit_phrase,
    unit_symbols,
)
from .vocabulary import (
    DIMENSIONS,
    GENERIC,
    MEASURES,
    QUANTITY_DIMENSIONS,
    SCALES,
    word_set,
)

_Size: TypeAlias = tuple[tuple[str, int], ...]  # each dimension with its exponent, sorted

_DIMENSIONS_OF: dict[str, list[str]] = {}
for _dimension, _names in DIMENSIONS.items():
    for _name in _names.split():
        _DIMENSIONS_OF.setdefault(_name, []).append(_dimension)
_QUANTITY = {word: sizes for words, sizes in QUANTITY_DIMENSIONS.items() for word in words.split()}
_SHARE: _Size = (("share", 1),)
_REQUESTED = re.compile(
    r"\b(?P<by>in|how many|how much|number"
    r" of|what|percentage)\s+(?:(?:more|total|whole|full|additional|extra|fewer) )?"
    r"(?=[A-Za-z$\\(])",
    re.IGNORECASE,
)
_ASKED_NOUN = re.compile(
    r"\b(?:how many|(?:what (?:is|was)|find|determine|compute|calculate) the (?:[a-z]+ )?number"
    r" of)\s+"
    r"((?:[A-Za-z-]+\s+){0,3}[A-Za-z-]+)",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"\b(?:what|how|find|determine|compute|calculate|evaluate|give|express)\b", re.IGNORECASE
)
_DIVISOR = re.compile(
    r"(?:/\s*|\b(?:per|an?|each|every)\s+)(?P<unit>[A-Za-z]+)"
    r"|\b(?P<adverb>hour|dai|week|month|year)ly\b"
)
_AFTER_NUMBER = re.compile(r"\d\}?\$?[ -]?(?:\\(?:text|mathrm)\{ ?)?(?P<unit>[A-Za-z]+)")
_WORD = re.compile(r"[A-Za-z]{3,}")
_VERBS_AFTER_NOUN = word_set(
    "do does did is are was were will would can could has have had should must in of at on for to"
    " from with per such that"
)
_TAKES_TIME = re.compile(
    r"\bhow (?:much )?long(?:er)?(?= [^.?!]{0,200}\b(?:takes?|lasts?)\b)", re.IGNORECASE
)
# A sign of money; `$3$` is mathematics
_AMOUNT = re.compile(
    r"\\[$]|[$](?=\d[\d.,]*(?:[.?!]?$|[.,;?!]? +(?:a |[A-Za-z]{2})))|[€£¥¢]", re.MULTILINE
)
_PERSONS = word_set("people person")


def is_measure(name: str) -> bool:
    """Return True if a unit measures something, as a newton does: not a noun that may follow a
    number.
    """
    return name != "unit" and (name in _DIMENSIONS_OF or name in MEASURES)


@dataclass(frozen=True)
class AskedUnits:
    """The units of a question.

    Attributes:
        text: the question.
        asking: its sentences that ask.
    """

    text: str
    asking: str

    def exclude(self, unit: Unit) -> bool:
        """Return True if an answer with this unit answers another question: minutes where it asks
        for a number of seats.
        """
        if not unit:
            return False
        asks_for_something = self.requested or self.things or self.quantity
        if unit == (("percent", 1),) and not asks_for_something:
            return "%" not in self.text and not re.search(r"\brate\b", self.text)
        # a question about miles per hour may be answered in miles
        undivided = tuple(
            (name, power) for name, power in unit if power > 0 or name not in self._divisors
        )
        if self.requested:
            return self.requested.isdisjoint((unit, undivided))
        if self.things:
            return not all(self._is_thing(name) for name, _ in undivided)
        if self.quantity:
            if self.quantity.isdisjoint(_sizes(unit) | _sizes(undivided)):
                return True
            return self._is_another(unit)
        names = {name for name, _ in unit}
        is_free = names <= {"degree", "radian", "percent"} and not self._named
        if is_free and "how many" not in self.asking.lower():
            return False
        if any(map(is_measure, names - self._named)):
            return True
        return any(power < 0 for _, power in undivided)

    def name(self, word: str) -> bool:
        """Return True if a word is a unit that the question names: `dollars`, where it has `$3`."""
        return canonical(word) in self._named

    def exclude_quantity(self, name: str) -> bool:
        """Return True if a quantity has none of the dimensions that the question asks for: a
        perimeter, asked for an area.
        """
        sizes: set[_Size] = set()
        for unit in self.requested:
            sizes |= _sizes(unit)
        if not sizes and not self.things:
            sizes |= self.quantity
        if not sizes or _SHARE in sizes or name not in _QUANTITY:
            return False  # the fraction that is shaded may be called the shaded area
        return sizes.isdisjoint(map(_size_of, _QUANTITY[name]))

    def asks_quantity(self, name: str) -> bool:
        """Return True if a quantity has a dimension of the one that the question asks for."""
        return name in _QUANTITY and not self.quantity.isdisjoint(map(_size_of, _QUANTITY[name]))

    @cached_property
    def requested(self) -> frozenset[Unit]:
        """The units that the question requests: `in km/h`, `how many square meters`."""
        units: set[Unit] = set()
        for request in _REQUESTED.finditer(self.asking):
            by = request["by"].lower()
            unit = self._requested_unit(by, request.end())
            if not unit or not all(is_measure(name) for name, _ in unit):
                continue
            units.add(unit)
            if by == "how many" and _size_of("length/time") not in _sizes(unit):
                # `how many liters per day` may be answered in liters, unlike a speed
                units.add(tuple((name, power) for name, power in unit if power > 0))
        return frozenset(units)

    def _requested_unit(self, by: str, start: int) -> Unit:
        """Return the unit that stands at `start`, behind the words `by`; empty if there is none."""
        phrase = unit_phrase(self.asking, start)
        if by == "in":
            symbols = unit_symbols(self.asking, start)
            if len(phrase) < len(re.sub(r"\\text|[{}]", "", symbols)):
                return _unit(symbols)
            if phrase.isalpha() and canonical(phrase) == phrase.lower() != "percent":
                return ()  # `in week 3`
        if not phrase or (by == "what" and phrase != "percent"):
            return ()
        return _unit(phrase)

    @cached_property
    def asked_nouns(self) -> frozenset[str]:
        """The words after `how many` and `number of`, among them words that change a number
        elsewhere: `times`.
        """
        nouns: set[str] = set()
        for phrase in _ASKED_NOUN.finditer(self.asking):
            for word in phrase[1].lower().split():
                if word in _VERBS_AFTER_NOUN:
                    break
                nouns.add(word)
        return frozenset(nouns - (SCALES.keys() - {"dozen", "dozens"}))

    @cached_property
    def things(self) -> frozenset[str]:
        """The singulars of `asked_nouns`."""
        return frozenset(map(canonical, self.asked_nouns))

    def _is_thing(self, name: str) -> bool:
        if not (self.things | GENERIC | {"way"}).isdisjoint(name.split()):
            return True
        # persons have many names
        return not self.things.isdisjoint(_PERSONS) and name not in _DIMENSIONS_OF

    @cached_property
    def quantity(self) -> frozenset[_Size]:
        """The dimensions of the quantity that the question asks for, such as `(("length", 2),)` for
        an area.
        """
        asking = _TAKES_TIME.sub("how much time", self.asking)
        start = _ASKS.search(asking)
        if start is None:
            return frozenset()
        for word in map(str.lower, _WORD.findall(asking[start.end() :])):
            for form in (word, word.removesuffix("s")):
                if form in _QUANTITY:
                    return frozenset(map(_size_of, _QUANTITY[form]))
        return frozenset()

    @cached_property
    def _divisors(self) -> frozenset[str]:
        """The units after `per` in the sentences that ask."""
        names = {
            canonical(match["unit"] or match["adverb"].replace("dai", "day"))
            for match in _DIVISOR.finditer(self.asking)
        }
        compounds = set(re.findall(r"[a-z]+", self.asking)) & COMPOUND.keys()
        return frozenset(
            names | {name for word in compounds for name, power in COMPOUND[word] if power < 0}
        )

    @cached_property
    def _named(self) -> frozenset[str]:
        """The units of measurement and of money that the question names."""
        # `the second` is no unit of time
        words = {word for word in _WORD.findall(self.text) if word.lower() != "second"}
        words |= {match["unit"] for match in _AFTER_NUMBER.finditer(self.text)}
        words |= set(_AMOUNT.findall(self.text))
        words |= {match["unit"] or "" for match in _DIVISOR.finditer(self.text)}
        names = {canonical(word.removeprefix("\\")) for word in words}
        names |= {name for word in words & COMPOUND.keys() for name, _ in COMPOUND[word]}
        return frozenset(names & _DIMENSIONS_OF.keys() - {"unit"})

    def _is_another(self, unit: Unit) -> bool:
        """Return True if a unit is not one of the question, which names others of the same
        dimension.
        """
        kinds = {dimension for name in self._named for dimension in _DIMENSIONS_OF[name]}
        names = [name for name, _ in unit if name != "unit" and name not in self._named]
        return any(kinds.intersection(_DIMENSIONS_OF.get(name, ())) for name in names)


def _unit(phrase: str) -> Unit:
    return split_unit(tokenize(clean(f"1 {phrase}"), frozenset()), frozenset(), ANY_NOUN)[1]


def _size_of(text: str) -> _Size:
    """Return the size that `length^2` or `length/time` means."""
    above, _, below = text.partition("/")
    dimension, _, power = above.partition("^")
    size = [(dimension, int(power or 1))]
    if below:
        size.append((below, -1))
    return tuple(sorted(size))


def _sizes(unit: Unit) -> set[_Size]:
    """Return the dimensions that a unit may have: a pound is money or a mass; none for a noun."""
    sizes: set[_Size] = set()
    for choice in product(*(_DIMENSIONS_OF.get(name, []) for name, _ in unit)):
        size: Counter[str] = Counter()
        for dimension, (_, power) in zip(choice, unit, strict=True):
            kind, _, exponent = dimension.partition("^")
            size[kind] += power * int(exponent or 1)
        sizes.add(tuple(sorted((kind, power) for kind, power in size.items() if power)))
    return sizes
