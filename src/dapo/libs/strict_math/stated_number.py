"""Reads plain numbers in prose: the one that a text states, or the last one in it.

Several candidates, a denial, a comparison or an expression state no number. Words around a number
are read as `Reference.matches` reads them: a subject that is not the answer or a noun that changes
the number states none.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from fractions import Fraction

from .comparison import Reference
from .extraction import extract_answer
from .question import Question
from .sentences import statements_of, value_in_words_of
from .text import (
    TEXT_COMMAND,
    answer_lines,
    normalize_number,
    numbers_in,
    outer_boxes,
    plain_number,
)

__all__ = ["last_number", "response_number", "stated_number"]

_FULL_WIDTH = {0xFF01 + offset: chr(0x21 + offset) for offset in range(94)}
_CHARACTERS = _FULL_WIDTH | {ord("−"): "-", ord("–"): "-"}
_SIGNS = ((re.compile(r"\\?[$]"), ""),)  # mathematics or money
_MARKUP = (
    (re.compile(r"\\(?:[()\[\]]|(?:left|right)(?![A-Za-z])|(?:boxed|fbox)(?=\s*\{)|(?=[%]))"), ""),
    (TEXT_COMMAND, r" \1 "),
    (re.compile(r"(\*{1,3}|_{1,2}|`)(?=\S)([^*_`]*)(?<=\S)\1"), r"\2"),  # bold, italic, code
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!)(?=\d{3}(?!\d))"), ","),
    # a factorial's sign is an exclamation at the end
    (re.compile(r"\\[,;:! ]|(?<=[\w.])!\s*$"), " "),
    (re.compile(r"^([\s(\[{\"']*[-+])\s+(?=[\d.])"), r"\1"),
    (re.compile(r"(?<=\d)-(?=[A-Za-z]{2})"), " "),  # a 3-day trip
)
# km/h
_JOINED_WORDS = ((re.compile(r"(?<=[A-Za-z])[/-](?=[A-Za-z])|(?<=\d)/(?=[A-Za-z]{2})"), " "),)
_DENIED = re.compile(
    r"\b(?:not|cannot|never|neither|nor|no|wrong|incorrect|false|except|anything"
    r" but|too|or|either|between(?= [-+$]?\d))\b"
    r"|n['’]t\b|≠|\\neq?(?![A-Za-z])",
    re.IGNORECASE,
)
_ANOTHER_VALUE = re.compile(
    r"\b(?:than|at least|at most|up to|about|around|approx\w*|roughly|nearly|almost|close to"
    r"|minus|negative|hundreds?|thousands?|[mbtr]+illions?|dozens?|twice|double|triple|half|squared|cubed|root"
    r"|factorial|point|one of|two of)\b|\bof the\s+\d|\?|\.\d+ ?(?:\.\.|…)",
    re.IGNORECASE,
)
# A letter before a number, or a single one behind it: `x3`, `int(3)`, `3k`
_SCALED = re.compile(r"[A-Za-z][(\['\"]*[-+]?\.?\d|\d(?:[A-Za-z](?![A-Za-z])|(?![A-Za-z])[^\W\d_])")
_NUMBER = re.compile(r"(?<!\d)[-+]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)", re.ASCII)
_PUNCTUATION = frozenset(".,;:'\"()[]{}%#&°‘’“”…—•")
_EQUALS = re.compile(r"(?<![<>!=\\:])=(?![=>])")
_CLAIM = re.compile(
    _EQUALS.pattern + r"|:(?!\d)|→|\b(?:is|are|was|were|(?:would"
    r" )?be|equals?|gives?|makes?|yields?|becomes?|gets?)\b(?: equal to\b)?",
    re.I,
)
_LAST_DIGIT = re.compile(r"\d\D*$")
_THAN = re.compile(r"\sthan\b", re.IGNORECASE)
_OPERATION = re.compile(r"[\d)]\s*(?:[-+*/×·÷^−]|\\(?:times|cdot|div)(?![A-Za-z]))\s*[(\d]")
_LETTER = re.compile(r"[^\W\d_]")
_UNIT = re.compile(r"[^\W\d_]|[%€£¥₹¢]")
_WORD = re.compile(r"[^\W\d_]+")
_CLAUSE = re.compile(r"[,;]| (?:which|because|as|when|with)\b")
_CONCLUSION = re.compile(
    r",? (?:so|thus|hence|therefore|which means|meaning)(?: that)?,? ", re.IGNORECASE
)
_TIMES = str.maketrans("×·÷xX", "**/**")
_SPACES_AND_WORDS = re.compile(r"[^\d+*/^().-]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
# The number of a step of the working
_STEP = re.compile(r"^[ \t*]{0,9}\(?\d{1,3}[.)][ \t*]{1,9}(?=[A-Za-z\\])", re.MULTILINE)
_FEW_WORDS = 3
_MAX_SENTENCE = 500


# An operation on numbers in front of its result, as the working and not as a subject
_ARITHMETIC = re.compile(
    r"(?:(?:so|thus|hence|therefore|then),? )?(?:(?:the )?(?:correct )?(?:answer|result|solution)"
    r" (?:to|of|for) )?"
    r"(?:[\d\s.,()+*/×·÷^−-]|(?<=\d )x(?= \d)|\\(?:times|cdot|div)"
    r"|\b(?:the|sum|product|difference|quotient|of|plus|minus|times|and|(?:multiplied |divided"
    r" )?by|to)\b)*",
    re.IGNORECASE,
)


def stated_number(*texts: str, question: str = "", currency: str = "") -> Fraction | None:
    r"""Return the number that each of these short texts states; None if one states none or several,
    or if they differ.

    A text states its only number, or the one after its last `=`. Words and units around it are
    allowed (`$42`, `42 km/h`, `There are 42.`), and so is one sign (`-42`, `- 42`). Whatever
    changes its value is not: `\pm 42`, `+-42`, `√42`, `3k`, `< 42`, `42 or so`, `not 42`.

    Args:
        texts: the texts.
        question: the question's text, whose units and nouns may follow the number.
        currency: the sign before the reference's number; no other unit of money may stand by the
            number.
    """
    values = {_claimed(text.translate(_CHARACTERS), _EQUALS, question, currency) for text in texts}
    return values.pop() if len(values) == 1 else None


def response_number(text: str, question: str = "") -> Fraction | None:
    """Return the number that a whole response states; None if it states none or several.

    All `Answer:` lines and boxes must state the same number. Without any, the last sentence with a
    number counts, from its last `is`, `=` and the like on; no sentence before it may state another
    number.
    """
    statements = answer_lines(text)
    statements += [box.content for box in outer_boxes(text)]
    if statements:
        statements.append(extract_answer(text) or "")  # with the words around a box
        return stated_number(*statements, question=question)
    sentences = _SENTENCE_END.split(_STEP.sub("", text.translate(_CHARACTERS)))
    sentences = [sentence for sentence in sentences if not sentence.rstrip().endswith("?")]
    numbered = [index for index, sentence in enumerate(sentences) if _has_digit(sentence)]
    if not numbered:
        return None
    *earlier, last = numbered
    if any(map(_DENIED.search, sentences[last:])):
        return None
    value = _claimed(sentences[last], _CLAIM, question)
    for index in earlier:
        parts = _CLAIM.split(sentences[index])
        if _is_claim(parts) and _value(parts) != value:
            return None
    return value


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, whatever stands around it; None without a number."""
    return next(reversed(numbers_in(text)), None)


def _claimed(
    text: str, separator: re.Pattern[str], question: str, currency: str = ""
) -> Fraction | None:
    """Return the number of a text that denies nothing, if its words leave it the answer to the
    question.
    """
    if _DENIED.search(text):
        return None
    # the reader below judges the whole text, with what the number is compared to
    value = _value(separator.split(_without_comparison(text)))
    if value is None:
        value = _number_in_words_of(question, text)
    is_money = text.count("$") % 2 == 1  # two are around mathematics
    if value is None or not (is_money or _UNIT.search(text)):
        return value
    reference = Reference.read(currency + normalize_number(value), question)
    if reference is None:
        return None
    for form in _forms(text if is_money else text.replace("$", ""), text, question):
        plain = _without_markup(form, for_reader=True).replace('"', "")
        if reference.matches(" ".join(plain.split())):
            return value
    return None


def _number_in_words_of(question: str, text: str) -> Fraction | None:
    """Return the number of a sentence that repeats the question with its numbers: 12 of `8 pens
    cost $12`.
    """
    if len(text) > _MAX_SENTENCE:
        return None
    known = Question(question)
    for statement in statements_of(" ".join(text.split()), known):
        value = value_in_words_of(known, statement)
        if value is not None:
            return _only_number(value)
    return None


def _without_comparison(text: str) -> str:
    """Return the text without the words from the first `than` behind its last digit on."""
    last_digit = _LAST_DIGIT.search(text)
    than = last_digit and _THAN.search(text, last_digit.start())
    return text[: than.start()] if than else text


def _forms(claims: str, text: str, question: str) -> Iterator[str]:
    """Yield the texts that may state the answer: all of it, its conclusion, or the result of its
    working.

    Args:
        claims: The text without the signs of mathematics.
        text: The text as it is.
        question: The question's text.
    """
    yield text
    yield _CONCLUSION.split(text)[-1]
    # a subject before the working is none of it: `The radius is 9 * 2 = 18`
    *working, result = [part.strip() for part in _CLAIM.split(claims) if part.strip()]
    if working and all(_has_digit(part) and _ARITHMETIC.fullmatch(part) for part in working):
        yield result.strip(",")
        if _asks_for(working[-1], question):
            yield _CLAUSE.split(result)[0]


def _asks_for(arithmetic: str, question: str) -> bool:
    """Return True if the question contains an operation on numbers; what follows its result does
    not change it.
    """
    operation = _SPACES_AND_WORDS.sub("", arithmetic.translate(_TIMES))
    if not operation:
        return False
    text = _SPACES_AND_WORDS.sub("", question.translate(_TIMES))
    pattern = rf"(?<![\d.]){re.escape(operation)}(?![\d.]*\d)"
    return re.search(pattern, text) is not None


def _is_claim(parts: Sequence[str]) -> bool:
    """Return True if a sentence offers a number (`It is 3.`, `3`), and is no step of the working
    (`3 + 4 is 7`, `3 + 4`).
    """
    if len(parts) > 1:
        return not _has_digit(parts[0])
    return len(_WORD.findall(parts[0])) <= _FEW_WORDS and not _OPERATION.search(parts[0])


def _value(parts: Sequence[str]) -> Fraction | None:
    """Return the number of the last part that has one; each part before it must be working or state
    the same.
    """
    *earlier_parts, last = [part for part in parts if _has_digit(part)] or [""]
    value = _only_number(last)
    for part in earlier_parts:
        # a subject (`12 and 18 is`, `12 is divided by 3 is`), an operation (`12 + 30 =`), or the
        # value itself
        if part is parts[0]:
            is_working = _LETTER.search(part)
        else:
            is_working = _LETTER.match(part.strip())
        if not is_working and not _OPERATION.search(part) and _only_number(part) != value:
            return None
    return value


def _without_markup(text: str, *, for_reader: bool = False) -> str:
    """Return the text without markup around its number; the reader of answers gets money and units
    as they stand.
    """
    for pattern, replacement in _MARKUP if for_reader else (*_SIGNS, *_MARKUP, *_JOINED_WORDS):
        text = pattern.sub(replacement, text)
    return text


def _only_number(text: str) -> Fraction | None:
    text = _without_markup(text)
    numbers = _NUMBER.findall(text)
    if len(numbers) != 1 or _ANOTHER_VALUE.search(text) or _SCALED.search(text):
        return None
    if not all(map(_changes_nothing, _NUMBER.sub(" ", text))):
        return None
    return plain_number(numbers[0])


def _changes_nothing(character: str) -> bool:
    """Return True if it is a letter, white space, punctuation or a pictogram, not a digit or a sign
    of mathematics.
    """
    if character.isalpha() or character.isspace() or character in _PUNCTUATION:
        return True
    return unicodedata.category(character) in ("So", "Mn", "Sc")


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))
