"""Reads the letter of a multiple choice: `B`, `Option (B)`, `(B) 8` where 8 is the text of that
option.
"""

import re

from .text import strip_formatting, without_text_commands

_MAX_CHARS = 400
_CHOICE = re.compile(
    r"(?:(?:the )?(?:correct |right |best |final )?(?:answer|option|choice|letter)(?: choice|"
    r" option| letter)?"
    r"(?: is)?:? ?)?(?:option |choice |letter )?"
    r"(?:(?P<marked>\([A-J]\)|\[[A-J]\]|[A-J][.:)]|[A-J] ?[-–—=])(?:"
    r" ?(?P<text>.+))?|(?P<bare>[A-J]))[.]?",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm|it)|boxed|fbox|quad|qquad|left|right)(?![A-Za-z])|\\[,;:!"
    r" ]|[{}$*`~]"
)
_SPACE = r"(?:[\s~$]|\\[,;:! ]|\\q?quad(?![A-Za-z])|\\hspace\*?\{[^{}]{0,20}\})*"
# `(B) 8`, and `B) 8` without its command of text
_LABELLED = re.compile(
    rf"{_SPACE}(?:\((?P<bracketed>[A-J])\)|(?P<closed>[A-J])\))(?P<space>{_SPACE})(?P<value>.*)",
    re.DOTALL,
)
_END_OF_OPTION = r"(?=(?<![A-Za-z])\(?[A-J][).:]|\n|$|\\\\|\\q|\\text)"


def labelled_value(text: str) -> tuple[str, str]:
    r"""Return the letter and the value of an option such as `\textbf{(B)}\ 8`, as AMC's solutions box
    it; two empty texts if it is none, as the product `(A)(B)`.
    """
    plain = without_text_commands(text)
    option = _LABELLED.fullmatch(plain)
    if option is None:
        return "", ""
    value = option["value"].strip()
    if value and not option["space"] and plain == text.strip():
        return "", ""
    return option["bracketed"] or option["closed"], value


def chosen_letter(text: str, question: str) -> str | None:
    """Return the letter that a text chooses; None if it is anything else, or has another text than
    the option's.
    """
    if len(text) > _MAX_CHARS:
        return None
    plain = " ".join(_MARKUP.sub(" ", without_text_commands(strip_formatting(text))).split())
    choice = _CHOICE.fullmatch(plain.replace("( ", "(").replace(" )", ")"))
    if choice is None:
        return None
    letter = choice["bare"] or choice["marked"].strip("()[].:-–—= ")
    if not letter.isupper():
        return None
    if choice["text"] and _normal(choice["text"]) not in _options(question, letter):
        return None
    return str(letter)


def _options(question: str, letter: str) -> set[str]:
    """Return the texts that a question gives to a letter."""
    option = re.compile(
        rf"(?<![A-Za-z])\(?{letter}[).:]\}}?\s*(?P<text>[^\n]{{1,200}}?)\s*{_END_OF_OPTION}"
    )
    return {_normal(match["text"]) for match in option.finditer(question)} - {""}


def _normal(text: str) -> str:
    return "".join(_MARKUP.sub("", text).split()).strip(".,;()").casefold()
