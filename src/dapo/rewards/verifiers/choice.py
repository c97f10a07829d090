"""`choice`: multiple choice by one letter; an answer with two letters is no choice."""

import re
import string
import unicodedata
from dataclasses import dataclass

from dapo.core.errors import RewardError
from dapo.libs.strict_math import extract_answer
from dapo.libs.strict_math.text import (
    answer_lines,
    outer_boxes,
    stated_part,
    strip_formatting,
    without_text_commands,
)
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict

_LETTER = r"[\(\[]?(?P<letter>[A-Za-z])[\)\]]?"
_NAMED = (
    r"(?:the\s+)?(?:correct\s+|right\s+|best\s+)?(?:option|choice|answer|letter)?\s*(?:is|:)?\s*"
)
_ALONE = re.compile(rf"{_NAMED}{_LETTER}\s*[.:]?", re.IGNORECASE)
_WITH_TEXT = re.compile(
    rf"{_NAMED}(?:[\(\[](?P<bracketed>[A-Za-z])[\)\]]|(?P<bare>[A-Za-z])(?:[).:]|\s[-–—]\s))\s*(?P<text>.+)",
    re.I,
)
_LAST_LINE = re.compile(
    rf"(?:{_LETTER}|(?:so|thus|hence|therefore)?,?\s*(?:the\s+)?(?:final\s+|correct\s+|right\s+|best\s+)?"
    r"(?:answer|option|choice)(?:\s+is)?\s*(?::|(?<=\s))\s*\**(?P<stated>.+?))\s*[.]?",
    re.IGNORECASE,
)
_MAX_CHARS = 2000
"""Longest text that may name a choice; stripping nested commands from longer texts could take
minutes.
"""
_OTHER_LETTER = re.compile(
    r"(?<![A-Za-z'’])(?:(?!A"
    r" [a-z])(?P<capital>[A-Z])(?![A-Za-z'’])|(?P<marked>[a-z])(?:\)|\]|[.:](?=\s|$)))"
)
"""Isolated letters that may name a second choice; an `A` before a lower-case letter is an article.
"""
_CLAUSE = re.compile(
    r"[;?!]|\b(?:(?:is|are|was|were|be|being|been|has|have|had|do|does|did|can|could|may|might|must|shall|should|will|would"
    r"|seems?|looks?|fails?|holds?|or|nor|if|unless|otherwise|else|because|since|but|except|instead|rather|not|no|none"
    r"|never|neither|either|maybe|perhaps|possibly|probably|likely|unlikely|definitely|certainly|wrong|false|incorrect"
    r"|untrue|invalid|impossible|bad|right|true|correct|alternatively|both|all|any|guess|unsure)|[a-z]{3,}(?<!e)ed"
    r"|[a-z]+n['’]t)\b",
    re.IGNORECASE,
)
"""Marks of a clause about the choice, where only the text of an option may stand."""
_TOKEN = re.compile(r"\w+")
_ARTICLES = frozenset(("a", "an", "the"))
_MAX_WORDS = 12


@dataclass(frozen=True)
class ChoiceVerifier:
    r"""Right if the response marks the reference's letter: `B`, `(B)`, `B.`, `B) the text`,
    `\boxed{\text{B}}`.

    A text after the letter must be the option's text in the question. If the question lists no
    options, it must be a short phrase: a clause (`(B) is wrong`, `(B) if x > 0`) makes the answer
    no choice.

    The answer stands on `Answer:` lines, else in boxes, else on the last line if that is only a
    letter or `The answer is B) 42`. All must name the same letter: `A or B`, and `Answer: A`
    followed by `Answer: B`, are wrong whatever the reference; so is a choice that the text behind
    it takes back.
    """

    letters: str = "ABCDE"  # the available choices

    def __post_init__(self) -> None:
        valid = isinstance(self.letters, str) and set(self.letters) <= set(string.ascii_uppercase)
        if not valid or len(set(self.letters)) != len(self.letters) or len(self.letters) < 2:
            raise RewardError(
                f"choice: letters must be different capitals such as ABCDE, got {self.letters!r}"
            )

    def __call__(self, problem: Problem, response: str) -> Verdict:
        reference = self._letter(problem.answer, "")
        if reference is None:
            return error_verdict(
                f"choice: the reference {problem.answer[:80]!r} is not one of the letters"
                f" {self.letters}"
            )
        chosen = self._chosen(response, problem.question)
        return binary_verdict(chosen == reference, chosen or "")

    def _chosen(self, response: str, prompt: str) -> str | None:
        """Return the letter that a response marks, or None if it marks none or several."""
        text = unicodedata.normalize("NFKC", stated_part(response))
        boxed = [box.content for box in outer_boxes(text)]
        for marked in (answer_lines(text), [*boxed, extract_answer(text) or ""] if boxed else []):
            if marked:
                letters = {self._letter(content, prompt) for content in marked}
                return letters.pop() if len(letters) == 1 else None
        lines = [_strip_formatting(line) for line in text.splitlines() if line.strip()]
        matches = [_LAST_LINE.fullmatch(line) for line in lines]
        line_letters = [
            self._letter(match["letter"] or match["stated"], prompt) if match else None
            for match in matches
        ]
        if line_letters and len(set(line_letters) - {None}) == 1:
            return line_letters[-1]
        return None

    def _letter(self, text: str, prompt: str) -> str | None:
        stripped = _strip_formatting(text)
        if match := _ALONE.fullmatch(stripped):
            return self._known(match["letter"])
        match = _WITH_TEXT.fullmatch(stripped)
        letter = self._known(match["bracketed"] or match["bare"]) if match else None
        if match is None or letter is None:
            return None
        if options := [
            marker.end() for marker in re.finditer(rf"(?<![A-Za-z]){letter}[).:\]]", prompt)
        ]:
            phrase = _words(match["text"])
            if any(_words(prompt[start:])[: len(phrase)] == phrase for start in options):
                return letter
            return None
        mentioned = {
            self._known(mention["capital"] or mention["marked"])
            for mention in _OTHER_LETTER.finditer(match["text"])
        }
        is_phrase = len(match["text"].split()) <= _MAX_WORDS and not _CLAUSE.search(match["text"])
        return letter if is_phrase and mentioned <= {None, letter} else None

    def _known(self, letter: str) -> str | None:
        return letter.upper() if letter.upper() in self.letters else None


def _words(text: str) -> list[str]:
    """Return the first words of a text without articles and signs."""
    words = _TOKEN.findall(unicodedata.normalize("NFKC", text[:_MAX_CHARS]).casefold())
    return [word for word in words if word not in _ARTICLES]


def _strip_formatting(text: str) -> str:
    if len(text) > _MAX_CHARS:
        return ""
    previous = None
    while text != previous:
        previous = text
        text = without_text_commands(strip_formatting(text)).replace("**", "").strip()
    return text
