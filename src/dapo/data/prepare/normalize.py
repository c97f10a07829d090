"""Normalize problems and answers: strip the shared instruction, case, spacing, punctuation and
forms of numbers.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

from dapo.libs.strict_math.text import INTEGER, final_answer, plain_number, strip_formatting

AnswerType: TypeAlias = Literal["integer", "number", "fraction", "expression", "letter", "text"]
ANSWER_TYPES: tuple[AnswerType, ...] = (
    "integer",
    "number",
    "fraction",
    "expression",
    "letter",
    "text",
)
MIN_TEXTS = 8  # with fewer distinct texts, what they share may be a coincidence
# shorter shared beginnings and ends, such as `What is the`, belong to the problem
MIN_INSTRUCTION_WORDS = 4
MIN_AGREEMENT = 0.9  # the fraction of rows with a shared beginning that must share the next word
_TOKEN = re.compile(r"\S+")
_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
# without "!": it may be a factorial
_ENDS = " .,:;?\"'“”‘’"
_LAYOUT = re.compile(
    r"\\(?:left|right|big[lr]?|Big[lr]?|displaystyle|text(?:bf|it|rm)?|math(?:rm|bf|it)|[,;:!"
    r" ])(?![a-z])"
)
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-z])")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<a>\d+)\s*/\s*(?P<b>\d+)"
    r"|\\[dtc]?frac\s*(?:\{\s*(?P<inner>-?)(?P<c>\d+)\s*\}\s*\{\s*(?P<d>\d+)\s*\}|(?P<e>\d)\s*(?P<f>\d)))",
    re.ASCII,
)
_LETTER = re.compile(r"\(?\s*([A-Z])\s*\)?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_FUNCTIONS = re.compile(
    r"(?i:arc)?(?i:sin|cos|tan|cot|sec|csc)h?|(?i:log|ln|exp|sqrt|max|min|gcd|lcm|mod|abs|det|lim|inf)"
)
_MAX_DIGITS = 1000


@dataclass(frozen=True)
class InstructionTemplate:
    """The instructions that a data set puts before and after its problems, as words."""

    prefixes: tuple[tuple[str, ...], ...] = ()
    suffixes: tuple[tuple[str, ...], ...] = ()

    def __or__(self, other: "InstructionTemplate") -> "InstructionTemplate":
        """Return the instructions of both templates."""
        prefixes = _longest_first(self.prefixes + other.prefixes)
        return InstructionTemplate(prefixes, _longest_first(self.suffixes + other.suffixes))

    def span(self, text: str) -> tuple[int, int]:
        """Return start and end of the problem in `text`, without the instruction; never empty."""
        spans = [match.span() for match in _TOKEN.finditer(text)]
        tokens = tuple(text[start:end] for start, end in spans)
        # the longest come first; an instruction is never the whole text
        for prefix in self.prefixes:
            size = len(prefix)
            if size < len(tokens) and tokens[:size] == prefix:
                tokens = tokens[size:]
                spans = spans[size:]
                break
        for suffix in self.suffixes:
            size = len(suffix)
            if size < len(tokens) and tokens[-size:] == suffix:
                spans = spans[:-size]
                break
        if not spans:
            return 0, len(text)
        return spans[0][0], spans[-1][1]

    def strip_instruction(self, text: str) -> str:
        """Return `text` without the instruction around the problem."""
        start, end = self.span(text)
        return text[start:end]


def find_instruction_template(
    texts: Iterable[str], *, min_texts: int = MIN_TEXTS
) -> InstructionTemplate:
    """Find the beginnings and ends that most distinct texts share, then most remaining texts, etc.

    Fewer than `min_texts` texts share none.
    """
    rows = [tuple(text.split()) for text in dict.fromkeys(texts)]
    prefixes = _common_prefixes(rows, min_texts)
    # a suffix is a prefix of the reversed words
    reversed_suffixes = _common_prefixes([row[::-1] for row in rows], min_texts)
    suffixes = [suffix[::-1] for suffix in reversed_suffixes]
    return InstructionTemplate(_longest_first(prefixes), _longest_first(suffixes))


def normalize_text(text: str) -> str:
    """Return a text equal for exact duplicates: no case, single spaces, no punctuation at ends."""
    # NFC, not NFKC: x² is not x2
    composed = unicodedata.normalize("NFC", text)
    return " ".join(composed.casefold().split()).strip(_ENDS)


def words(text: str) -> list[str]:
    """Return words of letters and digits in lower case, LaTeX commands by name, without layout."""
    text = unicodedata.normalize("NFKC", text)
    text = _LAYOUT.sub(" ", text)
    text = _FRACTIONS.sub(r"\\frac", text)
    return _WORD.findall(text.casefold())


def numbers(text: str) -> list[str]:
    """Return the numbers in a text as sorted strings, without thousands separators."""
    return sorted(number.replace(",", "") for number in _NUMBER.findall(text))


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return the n-grams in order; a text of fewer than n words is one n-gram."""
    if not tokens:
        return []
    if len(tokens) <= n:
        return [tuple(tokens)]
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def answer_type(answer: str) -> AnswerType:
    r"""Return the form of an answer: `1,234` integer, `2.50` number, `3/4` fraction, `(B)` letter.

    Text is an answer with words; everything else, such as `\sqrt{2}`, is an expression.
    """
    text = _without_formatting(answer)
    if INTEGER.fullmatch(text):
        return "integer"
    if plain_number(text.removesuffix("%").removesuffix("\\")) is not None:
        return "number"
    match = _FRACTION.fullmatch(text)
    if match and _denominator(match):
        return "fraction"
    if _LETTER.fullmatch(text):
        return "letter"
    # `sin` is a function, `apples` is a word
    long_words = _LONG_WORD.findall(_COMMAND.sub(" ", text))
    if any(not _FUNCTIONS.fullmatch(word) for word in long_words):
        return "text"
    return "expression" if re.search(r"\w|\\", text) else "text"


def answer_value(answer: str) -> Fraction | None:
    """Return the value of an integer, a decimal number or a fraction; None for other answers."""
    text = _without_formatting(answer)
    if len(text) > _MAX_DIGITS:  # Python refuses to read numbers of thousands of digits
        return None
    match = _FRACTION.fullmatch(text)
    if match is None or not _denominator(match):
        return plain_number(text)
    value = Fraction(int(match["a"] or match["c"] or match["e"]), _denominator(match))
    is_negative = (match["sign"] == "-") != (match["inner"] == "-")
    return -value if is_negative else value


def answer_key(answer: str) -> str:
    """Return a key that is equal for equivalent answers: the value, or the text without spaces."""
    value = answer_value(answer)
    if value is not None:
        return str(value)
    text = _without_formatting(answer)
    letter = _LETTER.fullmatch(text)
    if letter:
        return letter[1]
    # f and F are two expressions, yes and Yes one text
    if answer_type(text) == "text":
        text = text.casefold()
    return "".join(text.split())


def _without_formatting(answer: str) -> str:
    return strip_formatting(final_answer(answer), braces=True).replace("−", "-")


def _denominator(match: re.Match[str]) -> int:
    return int(match["b"] or match["d"] or match["f"])


def _common_prefixes(rows: list[tuple[str, ...]], min_texts: int) -> list[tuple[str, ...]]:
    """Return the beginning that most rows share, then that of most other rows, and so on."""
    prefixes = []
    while len(rows) >= min_texts:
        prefix = _common_prefix(rows)
        if len(prefix) < MIN_INSTRUCTION_WORDS:
            break
        prefixes.append(prefix)
        rows = [row for row in rows if row[: len(prefix)] != prefix]
    return prefixes


def _common_prefix(rows: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the beginning of more than half of the rows, up to where too few agree on a word."""
    min_count = len(rows) // 2 + 1
    prefix: list[str] = []
    while True:
        depth = len(prefix)
        # the last word of a row is always part of the problem
        longer_rows = [row for row in rows if len(row) > depth + 1]
        if not longer_rows:
            return tuple(prefix)
        token, count = Counter(row[depth] for row in longer_rows).most_common(1)[0]
        if count < min_count or (prefix and count < MIN_AGREEMENT * len(rows)):
            return tuple(prefix)
        prefix.append(token)
        rows = [row for row in longer_rows if row[depth] == token]


def _longest_first(affixes: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(dict.fromkeys(affixes), key=len, reverse=True))
