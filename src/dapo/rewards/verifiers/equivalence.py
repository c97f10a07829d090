"""Decides whether an answer is the same mathematics as the reference; strict where math-verify would guess."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dapo.core.math_text import (
    TEXT_COMMAND,
    depths,
    normalize_math,
    plain_number,
    plain_text,
    split_unit,
    without_text_commands,
)
from dapo.rewards.verifiers.symbolic import Symbolic

_EXTRA_CHARS = 500
"""An answer that is longer than the reference by this is none, and could keep the parser busy for long."""
_MAX_DECIMALS, _MAX_DIGITS = 6, 15
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*)?(?:\\(?:text|mathrm|mbox)\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|[,;])\s*")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)")
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_TEXT = re.compile(r"[A-Za-z][A-Za-z' .-]*[A-Za-z]")
_FREE_SPACE = re.compile(r"(?<!\d) +| +(?!\d)")
_JUXTAPOSED = re.compile(r"(?<!_)\d\s+[\d.]|\d\s*\(\s*-?\d+\s*\)|\d\s*_")
_SKIPPED = ("\\approx", "'", '"', "\\pm", "\\mp", "\\ldots", "\\dots", "\\cdots", "$")
_COSTLY = re.compile(r"\d{4,}\s*!|!\s*!|\^\s*\{?\s*-?\d{5,}|\^\s*\{?\s*\d+\s*\^")
"""Expressions that would take minutes to expand."""
_BASE = re.compile(r"\w+_\{?(\w+)\}?")
_UNFINISHED = ("\\sum", "\\prod", "\\int", "\\lim")
_FUNCTIONS = re.compile(
    "(?:arc)?(?:sin|cos|tan|cot|sec|csc)|sinh|cosh|tanh|log|ln|exp|sqrt|max|min|gcd|lcm|mod|pi|abs|det", re.IGNORECASE
)


@dataclass(frozen=True)
class Part:
    """One of the values of an answer; most answers have one."""

    value: str
    unit: str = ""
    number: Fraction | None = None  # the value of a plain number, which is compared exactly

    @classmethod
    def read(cls, text: str) -> "Part":
        """A part from the output of `normalize_math`."""
        value, unit = split_unit(text)
        return cls(normalize_math(value), unit, _exact_number(normalize_math(value)))

    @property
    def is_text(self) -> bool:
        r"""Whether it is words, not mathematics: `\text{even}`, `Tuesday`."""
        return bool(TEXT_COMMAND.search(self.value) or _TEXT.fullmatch(self.value))


@dataclass(frozen=True)
class Reference:
    """A parsed reference answer."""

    parts: tuple[Part, ...]
    symbolic: Symbolic
    length: int  # the number of characters of the reference

    @classmethod
    def read(cls, answer: str, symbolic: Symbolic) -> "Reference | None":
        """The reference, or None if a part of it is empty or math-verify cannot parse it."""
        parts = _parts(answer)
        readable = [p.number is not None or (p.value and (p.is_text or symbolic.cached_parse(p.value))) for p in parts]
        return cls(parts, symbolic, len(answer)) if parts and all(readable) else None

    def is_answered_by(self, answer: str) -> bool:
        """Whether the answer lists exactly these values, in any order."""
        if len(answer) > self.length + _EXTRA_CHARS:
            return False
        candidates = list(_parts(answer))
        if len(candidates) != len(self.parts):
            return False
        for part in self.parts:
            found = next((c for c in candidates if self._matches(part, c)), None)
            if found is None:
                return False
            candidates.remove(found)
        return True

    def _matches(self, part: Part, candidate: Part) -> bool:
        if part.unit and candidate.unit and part.unit != candidate.unit:
            return False
        if _FREE_SPACE.sub("", part.value) == _FREE_SPACE.sub("", candidate.value):
            return True
        if without_text_commands(candidate.value) in (part.value, f"({part.value})"):
            return True
        if part.is_text:
            return plain_text(part.value) == plain_text(candidate.value)
        sides = [candidate.value] if _EQUALS.search(part.value) else _values_of_equation(candidate.value)
        return bool(sides) and all(self._same_value(part, side) for side in sides)

    def _same_value(self, part: Part, value: str) -> bool:
        number = _exact_number(value)
        if part.number is not None and number is not None:
            return part.number == number
        if not _is_one_expression(value, part.value) or _other_form(value, part.value):
            return False
        return self.symbolic.equal(self.symbolic.cached_parse(part.value), self.symbolic.parse(value))


def _parts(answer: str) -> tuple[Part, ...]:
    r"""The values of a list: `1, 2`, `1 and 2`, `\{1, 2\}`; brackets keep `(1, 2)` in one part."""
    text = normalize_math(answer)
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2].strip()
    return tuple(Part.read(piece) for piece in _split(text, _SEPARATOR)) if text else ()


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The pieces between separators outside all brackets."""
    depth_at, pieces, start = depths(text), [], 0
    for match in separator.finditer(text):
        if depth_at[match.start()] == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    return [*pieces, text[start:].strip()]


def _values_of_equation(value: str) -> Sequence[str]:
    """The sides of `m + n = 34` or `2 + 2 = 4` that state a value: the last, and all without a variable.

    Empty if a side is prose.
    """
    *left, last = _split(value, _EQUALS)
    claims = [side for side in left if not re.search("[A-Za-z]", _COMMAND.sub("", side))]
    names = [side for side in left if side not in claims]
    if any(_prose(side, "") and re.search(r"\d", side) for side in names):
        return []
    return [*claims, last]


def _is_one_expression(value: str, reference: str) -> bool:
    """Whether it is not prose, adjacent numbers, symbols that math-verify skips, or an unevaluated sum or integral."""
    if _prose(value, reference) or (TEXT_COMMAND.search(value) and not TEXT_COMMAND.search(reference)):
        return False
    if any(pattern.search(value) and not pattern.search(reference) for pattern in (_COSTLY, _JUXTAPOSED)):
        return False
    return not any(sign in value and sign not in reference for sign in _SKIPPED + _UNFINISHED)


def _other_form(value: str, reference: str) -> bool:
    """Whether brackets or a number's base differ, which math-verify ignores: `[1, 5]`, `(1, 5)`; `11_2`, `11_3`."""
    if all("," in text and text[0] in "([" and text[-1] in ")]" for text in (value, reference)):
        return (value[0], value[-1]) != (reference[0], reference[-1])
    own, other = (match and match[1] for match in (_BASE.fullmatch(value), _BASE.fullmatch(reference)))
    return own != other


def _prose(value: str, reference: str) -> bool:
    """Whether it contains words; a run of letters may be a product of the reference's variables."""
    words = _WORD.findall(_COMMAND.sub(" ", value))
    return any(not _FUNCTIONS.fullmatch(word) and not set(word) <= set(reference) for word in words)


def _exact_number(text: str) -> Fraction | None:
    whole, _, decimals = text.partition(".")
    digits = len(whole.lstrip("+-")) + len(decimals)
    if decimals and (len(decimals) > _MAX_DECIMALS or digits > _MAX_DIGITS):
        return None
    return plain_number(text)
