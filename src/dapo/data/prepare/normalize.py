"""What a problem asks, apart from how it is written: the instruction around it, case, spacing and punctuation."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_TEXTS = 8
"""Fewer different texts than this say nothing about a wrapper that they share."""
MIN_WRAPPER_WORDS = 4
"""Shorter beginnings and ends, such as `What is the`, are the problem's own."""
UNANIMITY = 0.9
"""Of the rows that share a wrapper so far, how many must share its next word."""
_TOKEN = re.compile(r"\S+")
_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
# not "!": a factorial is no punctuation
_ENDS = " .,:;?\"'“”‘’"
_LAYOUT = re.compile(
    r"\\(?:left|right|big[lr]?|Big[lr]?|displaystyle|text(?:bf|it|rm)?|math(?:rm|bf|it)|[,;:! ])(?![a-z])"
)
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-z])")


@dataclass(frozen=True)
class Wrapper:
    """Instructions that a data set puts in front of its problems and behind them, as words."""

    prefixes: tuple[tuple[str, ...], ...] = ()
    suffixes: tuple[tuple[str, ...], ...] = ()

    def __or__(self, other: "Wrapper") -> "Wrapper":
        """What either knows."""
        return Wrapper(_longest_first(self.prefixes + other.prefixes), _longest_first(self.suffixes + other.suffixes))

    def span(self, text: str) -> tuple[int, int]:
        """Where in `text` the problem itself begins and ends; never empty."""
        places = [match.span() for match in _TOKEN.finditer(text)]
        tokens = tuple(text[start:end] for start, end in places)
        first = next((len(p) for p in self.prefixes if len(p) < len(tokens) and tokens[: len(p)] == p), 0)
        tokens, places = tokens[first:], places[first:]
        last = next((len(s) for s in self.suffixes if len(s) < len(tokens) and tokens[-len(s) :] == s), 0)
        places = places[: len(places) - last]
        return (places[0][0], places[-1][1]) if places else (0, len(text))

    def unwrap(self, text: str) -> str:
        """The problem itself."""
        start, end = self.span(text)
        return text[start:end]


def find_wrapper(texts: Iterable[str], *, least: int = MIN_TEXTS) -> Wrapper:
    """The beginnings and ends that most of the different texts share, then most of those without them, and so on.

    Fewer than `least` texts are taken to share nothing.
    """
    rows = [tuple(text.split()) for text in dict.fromkeys(texts)]
    prefixes = _shared_beginnings(rows, least)
    suffixes = _shared_beginnings([row[::-1] for row in rows], least)
    return Wrapper(_longest_first(prefixes), _longest_first([suffix[::-1] for suffix in suffixes]))


def normal_text(text: str) -> str:
    """One spelling for exact copies: case folded, whitespace collapsed, no punctuation at the ends."""
    # NFC, not NFKC: x² is not x2
    return " ".join(unicodedata.normalize("NFC", text).casefold().split()).strip(_ENDS)


def words(text: str) -> list[str]:
    """Letters and digits in lower case, LaTeX commands by their names; layout commands and signs are left out."""
    text = _FRACTIONS.sub(r"\\frac", _LAYOUT.sub(" ", unicodedata.normalize("NFKC", text)))
    return _WORD.findall(text.casefold())


def numbers(text: str) -> list[str]:
    """The numbers of a text, sorted: `1,000` is 1000."""
    return sorted(number.replace(",", "") for number in _NUMBER.findall(text))


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Every run of n words, in order; a shorter text is one run."""
    if len(tokens) <= n:
        return [tuple(tokens)] if tokens else []
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def _shared_beginnings(rows: list[tuple[str, ...]], least: int) -> list[tuple[str, ...]]:
    found = []
    while len(rows) >= least:
        beginning = _shared_beginning(rows)
        if len(beginning) < MIN_WRAPPER_WORDS:
            break
        found.append(beginning)
        rows = [row for row in rows if row[: len(beginning)] != beginning]
    return found


def _shared_beginning(rows: list[tuple[str, ...]]) -> tuple[str, ...]:
    """What more than half of the rows begin with; a word that splits them belongs to the problems already."""
    needed = len(rows) // 2 + 1
    beginning: list[str] = []
    while True:
        depth = len(beginning)
        # a row that would be all wrapper ends here
        following = Counter(row[depth] for row in rows if len(row) > depth + 1)
        token, count = following.most_common(1)[0] if following else ("", 0)
        if count < needed or (beginning and count < UNANIMITY * len(rows)):
            return tuple(beginning)
        beginning.append(token)
        rows = [row for row in rows if len(row) > depth + 1 and row[depth] == token]


def _longest_first(found: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(dict.fromkeys(found), key=len, reverse=True))
