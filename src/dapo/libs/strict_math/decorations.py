"""Removes what adorns an answer without a meaning: colour, size, spacing, arrows before it, check
marks around it.
"""

import re
import unicodedata

# A colour before a group or a text, which stay
_COLOUR = re.compile(
    r"\\(?:textcolor|colorbox|color)\s*(?:\[[A-Za-z]{1,10}\]\s*)?\{[^{}]{1,40}\}"
    r"|\\fcolorbox\s*\{[^{}]{1,40}\}\s*\{[^{}]{1,40}\}|\\bbox\s*\[[^\[\]]{1,40}\]"
)
_SIZE = re.compile(
    r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|scriptstyle|scriptscriptstyle"
    r"|displaystyle|textstyle|bfseries|itshape|centering|noindent)(?![A-Za-z])"
)
# Commands that print nothing of their argument, or only a number of the formula
_EMPTY = re.compile(
    r"\\(?:[hv]?phantom|hspace\*?|vspace\*?|tag\*?|label|kern|mspace|hskip)\s*\{[^{}]{0,80}\}|\\qedhere(?![A-Za-z])"
)
# Commands whose argument is printed as it is
_GROUP = re.compile(
    r"\\(?:underline|uline|uuline|framebox|ensuremath|pmb|bold|mathstrut|smash|mathclap|mathopen|mathclose"
    r"|textnormal|underbrace|overbrace)\s*(?=\{)"
)
_ARROWS = (
    r"(?:\\(?:Rightarrow|Longrightarrow|rightarrow|longrightarrow|Leftrightarrow|iff|implies|therefore|leadsto"
    r"|rightsquigarrow|to|mapsto)(?![A-Za-z])|[⇒→⟹⟶➜➡➔➤▶►∴⇔⟺↦]|[-=]{1,2}>)"
)
_BEFORE = re.compile(
    rf"^(?:[\s${{]*(?:{_ARROWS}|\\(?:q?quad|star|bullet)(?![A-Za-z])|\\[,;:!](?!\d)))+"
)
_AFTER = re.compile(
    r"(?:(?:(?<!\\not)(?<!\\not"
    r" )\\(?:checkmark|blacksquare|square|Box|qed|QED|qquad|quad|bigstar|star"
    r"|hfill)(?![A-Za-z])"
    r"|∎|[:;]-?[)D](?=\s|$)|\\[,;:!](?=\s|$)|\\\\(?=\s|$)"
    r"|,? ?\b(?:q\.?e\.?d\.?|exactly|precisely|as"
    r" (?:required|desired|wanted|requested|needed|claimed)"
    r"|to be exact)(?=[\s.$]*$)"
    r"|\((?:exact|exactly|final|final answer|answer|exact value|simplified)\))[\s.$]*)+$",
    re.IGNORECASE,
)
_MAX_END = 200
_DENYING_MARKS = frozenset("✗✘❌❎✖⨯☒👎🚫⛔🤔🤷😕❓❔⁉🙅🛑💔⚠")
# The ranges of pictograms: check marks, stars, boxes, emoji
_PICTURES = ((0x2300, 0x2BFF), (0x1F000, 0x1FAFF))


def without_decorations(text: str) -> str:
    r"""Return the text of an answer without its decorations: `\Rightarrow \textcolor{red}{13} ✓` is
    `{13}`.

    Marks that deny an answer (a cross, a thumb down) stay.
    """
    text = without_colour(without_invisible(text))
    text = _GROUP.sub("", text) if "\\" in text else text
    text = _without_pictures(text)
    text = _BEFORE.sub("", text, count=1)
    head = text[:-_MAX_END]
    tail = text[-_MAX_END:]
    stripped = _AFTER.sub("", tail, count=1)
    return _without_pictures(head + stripped) if stripped != tail else text


def without_colour(text: str) -> str:
    """Return the text without commands of colour, size and empty space."""
    if "\\" not in text:
        return text
    for pattern in (_COLOUR, _SIZE, _EMPTY):
        text = pattern.sub(" " if pattern is _SIZE else "", text)
    return text


def without_invisible(text: str) -> str:
    """Return the text without characters that print nothing: zero-width spaces, marks of direction,
    variation selectors.
    """
    if text.isascii():
        return text
    return "".join(c for c in text if unicodedata.category(c) != "Cf" and c not in "\ufe0e\ufe0f")


def _without_pictures(text: str) -> str:
    """Return the text without pictograms at both ends."""
    if text.isascii():
        return text
    start = 0
    end = len(text)
    while start < end and (text[start].isspace() or _is_picture(text[start])):
        start += 1
    while end > start and (text[end - 1].isspace() or _is_picture(text[end - 1])):
        end -= 1
    return text[start:end]


def _is_picture(character: str) -> bool:
    code = ord(character)
    in_range = any(first <= code <= last for first, last in _PICTURES)
    return (
        in_range
        and character not in _DENYING_MARKS
        and unicodedata.category(character) in ("So", "Sk", "Sm")
    )
