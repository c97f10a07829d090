"""Cuts the text of an answer, LaTeX or plain, into tokens; notations with the same meaning become
the same token.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from .decorations import without_decorations
from .spellings import in_one_spelling
from .text import strip_formatting
from .vocabulary import COMMAND_OF, FUNCTIONS, GREEK, SHORT_WORDS


class Token(NamedTuple):
    r"""One token.

    `kind` is `number`, `name` (a variable), `word` (other letters), `function`, `sign` (an
    operator, a bracket, a connective) or `command` (any other LaTeX command).
    """

    kind: str
    text: str
    after_space: bool = False  # whether white space comes before it
    in_text: bool = False  # whether it is in a text command

    def is_sign(self, *texts: str) -> bool:
        """Return True if it is one of these signs."""
        return self.kind == "sign" and self.text in texts


_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "ceiling": "ceil", "cosec": "csc"}
_WORD_SIGNS = {
    "and": "and", "or": "or", "pi": "pi", "infinity": "infinity", "inf": "infinity", "oo": "infinity", "mod": "mod",
    "percent": "%", "percentage": "%", "pct": "%", "degrees": "°", "degree": "°", "deg": "°",
}  # fmt: skip
_COMMAND_SIGNS = {
    "times": "*", "cdot": "*", "ast": "*", "div": "÷", "pi": "pi", "infty": "infinity", "infin": "infinity",
    "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠",
    "neq": "≠", "in": "in", "cup": "∪", "cap": "∩", "setminus": "∖", "backslash": "∖", "pm": "±", "mp": "∓",
    "lbrace": "{set", "rbrace": "}set", "{": "{set", "}": "}set", "langle": "⟨", "rangle": "⟩", "lbrack": "[",
    "rbrack": "]", "lparen": "(", "rparen": ")", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lfloor": "⌊",
    "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "emptyset": "∅", "varnothing": "∅", "bmod": "mod", "mod": "mod",
    "pmod": "pmod", "colon": ":", "ratio": ":", "land": "and", "lor": "or", "wedge": "and", "vee": "or",
    "\\": "\\\\", "%": "%", "$": "$", "&": "&", "degree": "°", "circ": "∘", "prime": "'", "frac": "frac",
    "sqrt": "sqrt", "binom": "binom", "choose": "choose", "equiv": "≡", "approx": "≈", "thickapprox": "≈", "R": "ℝ",
    "Z": "ℤ", "N": "ℕ", "Q": "ℚ", "C": "ℂ", "euro": "€", "pounds": "£", "implies": "implies", "to": "to",
}  # fmt: skip
_CHARACTERS: dict[int, str] = {
    **{ord(character): "-" for character in "−–‐‑—"},
    **{ord(character): "*" for character in "⋅∙×·"},
    **{ord(character): " " for character in "\xa0\u2007\u2008"},
    ord("º"): "°",
    ord("∶"): ":",
    ord("。"): ".",
    ord("、"): ",",
    ord("﹣"): "-",
    **{ord(character): "/" for character in "⁄∕"},
    ord("∛"): "\\sqrt[3]",
    **{ord(character): f"\\{command} " for character, command in COMMAND_OF.items()},
}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ", "0123456789+-()n")
_THIN = r"(?:\{,\}|,?\\[!,;: ] ?|[\u2009\u202f\u200a])"
_UNIT_GROUP = r"\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^(?:\d|\{\d\}))?"
_RULES = (
    (
        re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹]+)/([₀₁₂₃₄₅₆₇₈₉]+)"),
        lambda found: f"\\frac{{{found[1].translate(_RAISED)}}}{{{found[2].translate(_LOWERED)}}}",
    ),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+"), lambda found: f"^{{{found[0].translate(_RAISED)}}}"),
    (re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ]+"), lambda found: f"_{{{found[0].translate(_LOWERED)}}}"),
    (
        re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒]"),
        lambda found: f"\\frac{{{_nfkc(found[0]).replace(chr(0x2044), '}{')}}}",
    ),
    (
        re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_THIN}\d{{3}})+(?!\d)"),
        lambda found: re.sub(r"\D", "", found[0]),
    ),
    (re.compile(r"^\s*\\?[~∼](?=\s*[-\d.\\])"), r"\\approx "),
    (re.compile(r"\*\*([^*]+)\*\*"), r" \1 "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"<=|=<"), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), "*"),
    (re.compile(r"(?<=\d)\s*\^\s*(?:\{o\}|o(?![A-Za-z]))"), "°"),
    (re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])"), r"\\cup "),
    (
        re.compile(
            r"^\\(?:textbf|mathbf|boldsymbol|bm|underline|emph)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}$"
        ),
        r"\1",
    ),
    (re.compile(r"(?<![=<>])==(?!=)"), "="),
    (re.compile(r"(?<!\\)\\[()\[\]]|\\\]|\\\)|__"), " "),
    (re.compile(r"~~"), r"\\sout "),  # struck out
    (re.compile(r"\\(?:nice|s)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right)\s*\."), " "),
    (
        re.compile(
            r"\\(?:left|right|displaystyle|textstyle|[bB]igg?[lrm]?|limits|nolimits|mathstrut)(?![A-Za-z])"
        ),
        "",
    ),
    (
        re.compile(
            r"(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|~|[\u2009\u202f\u200a]"
        ),
        " ",
    ),
    (re.compile(r"\{\}"), ""),
    (re.compile(r"\{([:;])\}"), r"\1"),
    (re.compile(r"(?<=[A-Za-z\d)}] )!=(?!=)"), r"\\ne "),
    (re.compile(r"(?<=[A-Za-z])\.(?=\s|\}|$)"), ""),
    (
        re.compile(
            r"^(?:=|[Ee]xactly|[Pp]recisely|[Oo]nly|[Jj]ust|[Ss]imply|[Ee]ither)(?![A-Za-z])\s*(?!=)|\s*\\\\\s*$"
        ),
        "",
    ),
    (re.compile(r"\\?%\s*(?:\\text\{\s*of\s*\}|of\b)"), "/100*"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\not\s*="), r"\\ne "),
    (re.compile(rf"\\frac\s*\{{\s*({_UNIT_GROUP})\s*\}}\s*\{{\s*({_UNIT_GROUP})\s*\}}"), r"\1/\2"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\^\s*\{\s*°\s*\}|\^\s*°"), "°"),
    (re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)\s+([^{}]*)\}"), r"\\text{\1}"),
    (re.compile(r"\\(?:rm|bf|it|sf|tt)(?![A-Za-z])\s*([^{}$]*)$"), r"\\text{\1}"),
    (re.compile(r"\bper ?cent\b"), "%"),
    # a mixed number
    (re.compile(r"(?<![\d.,/^])(\d+) (\d{1,4}) ?/ ?(\d{1,4})(?![\d.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"^([A-Za-z])\s+(?:in|is in)\s+(?=[\[({\\])"), r"\1\\in "),
)
_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])(?!, ?\d{3}\b)"
    r"|(?<![\d.,_^])(?<![\d.,] )\d{1,3}(?: \d{3})+(?! ?[\d,])"
)
_TEXT_NAMES = (
    r"(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt|normal|cal|scr|frak|bb)|mbox|hbox|operatorname\*?"
    r"|bm|boldsymbol|emph|unit)"
)
_LEXEMES = re.compile(
    rf"(?P<text>\\(?P<style>{_TEXT_NAMES})\s*\{{(?P<content>[^{{}}]*)\}})"
    rf"|(?P<blackboard>\\mathbb\s*(?P<set>[RZNQC]))"
    r"|(?P<decorated>\\(?:vec|hat|widehat|bar|overline|tilde|overrightarrow|dot)\s*(?:\{\s*(?P<letters>[A-Za-z]+'*)\s*\}"
    r"|(?P<letter>[A-Za-z])))"
    r"|(?P<environment>\\(?P<side>begin|end)\s*\{(?P<matrix>[a-zA-Z]+)\*?\}(?:(?<=\{array\})\s*\{[clr|\s]*\})?)"
    r"|\\(?P<command>[A-Za-z]+|.)"
    r"|(?P<number>\d+\.(?=\\(?:overline|bar|dot)(?![A-Za-z]))|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+(?![\dA-Za-z.]))?)"
    r"|(?P<abbreviation>[A-Za-z](?:\.[A-Za-z])+(?![A-Za-z])\.?)"
    r"|(?P<unit_function>(?:min|sec|max)(?![A-Za-z]|\s*[({_^]))"
    r"|(?P<letter_run>[A-Za-z]+)"
    r"|(?P<space>\s+)"
    r"|(?P<sign>.)",
    re.ASCII | re.DOTALL,
)
_OVER = re.compile(r"\\over(?![A-Za-z])")
_MAX_OVERS = 10
_PLAIN_SIGNS = frozenset("+-*/^_=<>()[]{}|,;:!'&%$€£¥°")


def clean(text: str, *, thousands: bool = True) -> str:
    """Return the text without wrappers, spacing commands, the dollars of mathematics and thousands
    separators.
    """
    text = strip_formatting(_with_single_backslashes(text))

    text = strip_formatting(without_decorations(text))
    text = in_one_spelling(text)
    if not text.isascii():
        text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
        text = _nfkc_kept(text).translate(_CHARACTERS)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _without_math_dollars(" ".join(text.split()))
    text = _fractions_with_over(text)
    return _without_thousands_separators(text) if thousands else text


def _without_thousands_separators(text: str) -> str:
    """Return `1,234` as `1234`, except in brackets, where a comma separates two numbers."""
    steps = ((character in "([{") - (character in ")]}") for character in text)
    depth_at = list(accumulate(steps, initial=0))  # brackets that are open before each character

    def joined(number: re.Match[str]) -> str:
        is_in_brackets = depth_at[number.start()] != 0
        return number[0] if is_in_brackets else re.sub("[, ]", "", number[0])

    return _THOUSANDS.sub(joined, text)


def tokenize(text: str, names: frozenset[str] | None = None) -> list[Token]:
    """Cut cleaned text into tokens.

    Args:
        text: The output of `clean`.
        names: The variables of the reference: a run of these letters is their product, any other
            run is a word. None for a reference itself, where a run of up to three letters is a
            product unless it is a word or unit.
    """
    return _Lexer(names).read(text)


def is_name(word: str) -> bool:
    """Return True if a word of several letters is no sign, function or unit in front of a number."""
    lower = word.lower()
    return lower not in _WORD_SIGNS and lower not in FUNCTIONS and lower not in _ALIASES


def plain_words(tokens: Sequence[Token]) -> str:
    """Return the tokens as plain text, without brackets around all of it."""
    text = ""
    for token in tokens:
        text += f" {token.text}" if token.after_space else token.text
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return text[1:-1].strip()
    return text


class _Lexer:
    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names

    def read(self, text: str, *, in_text: bool = False) -> list[Token]:
        tokens: list[Token] = []
        after_space = False
        for match in _LEXEMES.finditer(text):
            if match["space"]:
                after_space = True
                continue
            match_tokens = list(self._tokens_of(match, in_text))
            if match_tokens and after_space:
                match_tokens[0] = match_tokens[0]._replace(after_space=True)
            tokens += match_tokens
            # `\text{5 }` ends with a space
            after_space = bool(match["text"]) and match["content"][-1:].isspace()
        return tokens

    def _tokens_of(self, match: re.Match[str], in_text: bool) -> Iterator[Token]:
        if match["text"]:
            yield from self._text_command(match["style"], match["content"])
        elif match["blackboard"]:
            yield Token("sign", _COMMAND_SIGNS[match["set"]])
        elif match["decorated"]:
            yield Token("name", re.sub(r"[\s{}]", "", match[0]))
        elif match["environment"]:
            yield Token(match["side"], match["matrix"])
        elif match["command"]:
            yield self._command(match["command"])
        elif match["number"]:
            yield Token("number", match["number"])
        elif match["abbreviation"]:
            yield Token("word", match["abbreviation"].replace(".", ""))
        elif match["unit_function"]:
            yield Token("word", match["unit_function"])
        elif match["letter_run"]:
            yield from self._letters(match["letter_run"], in_text)
        else:
            kind = "sign" if match["sign"] in _PLAIN_SIGNS else "other"
            yield Token(kind, match["sign"])

    def _text_command(self, style: str, content: str) -> Iterator[Token]:
        r"""Yield the tokens of a command such as `\text{...}` or `\mathbf{...}`."""
        stripped = content.strip()
        is_letter = len(stripped) == 1 and stripped.isalpha()
        is_set = style == "mathbb" and stripped in "RZNQC"
        is_variable = style in ("mathbf", "mathbb", "mathcal", "bm", "boldsymbol")
        if stripped and is_set:
            yield Token("sign", _COMMAND_SIGNS[stripped])
        elif is_letter and (is_variable or stripped in "ei"):
            yield Token("name", stripped)
        else:
            tokens = self.read(content, in_text=True)
            if tokens and content[:1].isspace():
                tokens[0] = tokens[0]._replace(after_space=True)
            yield from tokens

    def _command(self, command: str) -> Token:
        if command in FUNCTIONS and command != "sqrt":
            return Token("function", command)
        if command in _COMMAND_SIGNS:
            return Token("sign", _COMMAND_SIGNS[command])
        return Token("name" if command in GREEK else "command", "\\" + command)

    def _letters(self, run: str, in_text: bool) -> Iterator[Token]:
        lower = run.lower()
        if lower in _WORD_SIGNS:
            yield Token("sign", _WORD_SIGNS[lower])
        elif lower in FUNCTIONS or lower in _ALIASES:
            name = _ALIASES.get(lower, lower)
            kind = "sign" if name == "sqrt" else "function"
            yield Token(kind, name)
        elif len(run) == 1 and not in_text:
            yield Token("name", run)
        elif not in_text and self._is_product(run):
            yield from (Token("name", letter) for letter in run)
        else:
            yield Token("word", run, in_text=in_text)

    def _is_product(self, run: str) -> bool:
        """Return True if a run of letters is a product of variables."""
        if self._names is not None:
            return set(run) <= self._names
        return len(run) <= 3 and run.lower() not in SHORT_WORDS


def _fractions_with_over(text: str) -> str:
    r"""Rewrite TeX's `{3 \over 4}`, and `3 \over 4` that is the whole text, as `\frac{3}{4}`."""
    while (command := _OVER.search(text)) and text.count("\\over") <= _MAX_OVERS:
        start, end = _group_around(text, command.start(), command.end())
        is_whole_text = start == 0 and end == len(text)
        if is_whole_text and re.search("[=,;<>]", text):
            # a statement or a list, of which a part is the fraction
            break
        above = text[start : command.start()].strip()
        below = text[command.end() : end].strip()
        before = text[: max(0, start - 1)]
        behind = text[end + 1 :]
        text = f"{before}\\frac{{{above}}}{{{below}}}{behind}"
    return text


def _group_around(text: str, start_index: int, end_index: int) -> tuple[int, int]:
    """Return the bounds of the text in the braces around `text[start_index:end_index]`; all of it
    outside of braces.
    """
    depth = 0
    start = 0
    for index in reversed(range(start_index)):
        depth += (text[index] == "}") - (text[index] == "{")
        if depth < 0:
            start = index + 1
            break
    depth = 0
    for index in range(end_index, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth < 0:
            return start, index
    return start, len(text)


def _with_single_backslashes(text: str) -> str:
    r"""Return the text with `\\\\frac` as `\\frac`, if every backslash is doubled, as after JSON
    was encoded twice.
    """
    has_double = re.search(r"(?<!\\)\\\\(?:\\\\)*[A-Za-z]{2}", text) is not None
    has_single = any(len(run) % 2 for run in re.findall(r"\\+", text))
    if not has_double or has_single:
        return text
    return text.replace("\\\\", "\\")


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _nfkc_kept(text: str) -> str:
    """Normalize to NFKC, except characters that the rules handle."""
    return "".join(c if c in _KEPT or c in COMMAND_OF else _nfkc(c) for c in text)


_KEPT = frozenset("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒\u2009\u202f\u200a°º")


def _without_math_dollars(text: str) -> str:
    r"""Remove `$` around mathematics; a single one next to a number is money, like `\$`."""
    num_dollars = len(re.findall(r"(?<!\\)\$", text))
    if num_dollars == 1 and re.search(r"(?<!\\)\$\s*[\d.]|\d\s*\$", text):
        return text
    return " ".join(re.sub(r"(?<!\\)\$", " ", text).split())
