"""One spelling for what means the same: LaTeX and plain text of an answer, before anything is compared."""

import re
from fractions import Fraction

from dapo.rewards.verifiers.answer import normalize_number, plain_number, strip_formatting

_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "÷": "\\div ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "²": "^2",
        "³": "^3",
        "°": None,
        "\xa0": " ",
        "\u202f": " ",
        "\u2009": " ",
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},  # full width
    }
)
_RULES = (
    (re.compile(r"\\(?:left|right|displaystyle|bigl|bigr|big)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(r"\\\$|^\$(?=\d)|(?<=\d)\$$"), ""),  # money; the dollars of mathematics are peeled off in pairs
    (re.compile(r"(?<!\\)%|\bpercent\b"), r"\\%"),
    (re.compile(r"√\s*(\d+|\{[^{}]*\}|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile(r"^([-+])\s+(?=\d)"), r"\1"),
    (re.compile(r"^(-?\d+) +(\d+) ?/ ?(\d+)$"), r"\1\\frac{\2}{\3}"),  # a mixed number
    (re.compile(r"\s+"), " "),
)
_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])"
    r"|(?<![\d.,])(?<![\d.,] )\d{1,3}(?: \d{3})+(?! ?[\d,])"
)
_UNIT_WORD = (
    "(?:cm|mm|km|kg|mg|ml|ft|lbs?|oz|mph|in|inch(?:es)?|feet|foot|yards?|miles?|(?:centi|milli|kilo)?met(?:er|re)s?"
    "|(?:kilo)?grams?|pounds?|ounces?|tons?|lit(?:er|re)s?|gallons?|seconds?|sec|minutes?|min|hours?|hrs?|days?"
    "|weeks?|months?|years?|degrees?|radians?|dollars?|cents?|euros?|USD|EUR|units?|ways?|times|people|square|sq|cubic|per)"
)
_UNIT_PHRASE = rf"{_UNIT_WORD}(?:[ /]+{_UNIT_WORD}|/[hs])*"
_UNIT = re.compile(
    r"(?<=[\d})])\s*"
    # a single letter is a unit only in \text{ }: 5 m may be a product
    rf"(?:\\(?:text|mathrm|mbox|textrm|textit|operatorname)\s*\{{\s*(?:{_UNIT_PHRASE}|[mgsLh])\s*\}}"
    rf"|(?<= ){_UNIT_PHRASE})"
    r"\s*(?:\^\s*\{?\s*[23]\s*\}?)?$",
    re.IGNORECASE,
)
_SIMPLE_FRACTION = re.compile(r"\\frac(?:\{(\d{1,15})\}\{(\d{1,15})\}|(\d)(\d))")
_QUOTIENT = re.compile(r"([-+]?\d{1,15})/(\d{1,15})", re.ASCII)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")


def normalize_math(text: str) -> str:
    """Without wrappings, spacing commands, degree and currency signs, and thousands separators."""
    text = strip_formatting(text).translate(_CHARACTERS)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return join_thousands(strip_formatting(text))


def normalize_answer(answer: str | None) -> str:
    """An answer as `Verdict.answer`: numbers by value (`1/2` and `0.5` are one), the rest in one spelling."""
    text = re.sub(r"\s+", "", normalize_math(answer or "")).casefold()
    text = _SIMPLE_FRACTION.sub(lambda found: "/".join(filter(None, found.groups())), text)
    number = plain_number(text)
    if number is None and (match := _QUOTIENT.fullmatch(text)) and int(match[2]):
        number = Fraction(int(match[1]), int(match[2]))
    return text if number is None else normalize_number(number)


def join_thousands(text: str) -> str:
    """`1,234` and `1 234` become 1234, except in brackets, where a comma separates."""
    depth_at = depths(text)
    return _THOUSANDS.sub(
        lambda match: match[0] if depth_at[match.start()] else match[0].replace(",", "").replace(" ", ""), text
    )


def depths(text: str) -> list[int]:
    """How many brackets are open before each character."""
    depth, found = 0, []
    for character in text:
        found.append(depth)
        depth += (character in "([{") - (character in ")]}")
    return found


def split_unit(part: str) -> tuple[str, str]:
    """`5 \\text{ cm}` -> (`5`, `cm`); a unit only counts behind a number or a bracket."""
    match = _UNIT.search(part)
    if match is None:
        return part, ""
    singular = re.sub(r"(?<=[a-z]{2})s\b", "", plain_text(match[0]))
    return part[: match.start()].strip(), re.sub(r"[^a-z0-9/]", "", singular)


def plain_text(part: str) -> str:
    """The words of `\\text{...}` and the like, in lower case, without brackets around them."""
    words = " ".join(_TEXT_COMMAND.sub(r" \1 ", part).casefold().split())
    return words[1:-1].strip() if words.startswith("(") and words.endswith(")") else words


def without_text_commands(part: str) -> str:
    """`\\text{B}` as `B`."""
    return _TEXT_COMMAND.sub(r"\1", part).strip()


def has_text_command(part: str) -> bool:
    """Does it hold `\\text{...}` or a relative?"""
    return _TEXT_COMMAND.search(part) is not None
