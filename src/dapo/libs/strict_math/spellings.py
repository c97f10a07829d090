"""Rewrites spellings of one notation into the one that the tokenizer reads: bases, intervals,
parts, binomials.
"""

import re

from .vocabulary import CARDINALS

_BASES = {word: str(base) for base, word in enumerate(CARDINALS)} | {
    "binary": "2",
    "octal": "8",
    "hexadecimal": "16",
}
_BASE_WORDS = "|".join(sorted((*CARDINALS[2:17], "hex"), key=len, reverse=True))
_IN_BASE = re.compile(
    rf"^\s*\(?(?P<digits>[\dA-Fa-f]{{1,60}})\)?[\s,]*\(?\s*(?:(?:written |expressed )?in )?"
    rf"(?:base[\s-]?\{{?(?P<base>\d{{1,2}}|{_BASE_WORDS})\}}?|(?P<name>binary|octal|hexadecimal|hex))\s*\)?\s*$",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(
    r"\\(?:text|mathrm)\s*\{(\s*\(?\s*(?:in )?(?:base|mod|binary|octal|hex)[^{}]{0,30})\}"
)
_REVERSED = re.compile(
    r"^(?P<before>[^\[\]]{0,30})(?P<open>[\[\]])(?P<ends>[^\[\],;]{1,200}[,;][^\[\],;]{1,200})(?P<close>[\[\]])$"
)
_MODULUS = re.compile(
    r"\(\s*(?:\\(?:text|mathrm)\s*\{\s*)?\\?b?mod(?![a-z])\s*\}?\s*(?P<modulus>[^()]{1,40})\)"
)
_ROW_END = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]|\\cr(?![A-Za-z])")
_ONLY_DIGITS = re.compile(
    r"^\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{\s*(?P<digits>[-+]?[\d.,]+)\s*\}$"
)
_PLUS_MINUS = re.compile(
    r"\bplus[ -]?(?:or[ -])?minus\b|(?<![\d)}])\+\s?/\s?[-−]\s?(?=[\d\\])", re.IGNORECASE
)
_CHOOSE = re.compile(
    r"\{\s*(?P<n>[^{}]{1,20})\\choose(?![A-Za-z])\s*(?P<k>[^{}]{1,20})\}"
    r"|^\s*(?P<above>\w{1,9})\s*\\choose(?![A-Za-z])\s*(?P<below>\w{1,9})\s*$"
)
_APOSTROPHES = re.compile(r"(?<![\d.,'’])\d{1,3}(?:['’]\d{3})+(?!['’\d])")
_LABEL = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?(?:\((?P<round>[a-z]|\d|i{1,3}|iv|vi?)\)|(?<![\w(])(?P<half>[a-z]|\d|i{1,3}|iv)\)"
    r"|Part (?P<part>[a-z]|\d):)\s*\}?[\s:=]*",
    re.IGNORECASE,
)
_ORDERS = ("a b c d e f g h", "1 2 3 4 5 6 7 8", "i ii iii iv v vi")
_COMBINATION = re.compile(
    r"(?<![A-Za-z\\])\\?(?:mathrm\{C\}|text\{C\}|binom|C|nCr|comb)\s*\(\s*(?P<n>[^(),]{1,20}),\s*(?P<k>[^(),]{1,20})\)"
    r"|\{?\}?(?:\^\{?(?P<above>\w{1,6})\}?|_\{?(?P<left>\w{1,6})\}?)\s*\\?(?:mathrm\{C\}|text\{C\}|C)_\{?(?P<below>\w{1,6})\}?"
    r"|(?<![A-Za-z\\])C_\{?(?P<low>\w{1,6})\}?\^\{?(?P<high>\w{1,6})\}?"
    r"|(?<![A-Za-z\\])C\^\{?(?P<high2>\w{1,6})\}?_\{?(?P<low2>\w{1,6})\}?"
    r"|\b(?P<first>\d{1,4})\s?C\s?(?P<second>\d{1,4})\b|\b(?P<one>\w{1,6}) choose"
    r" (?P<other>\w{1,6})\b"
)


def in_one_spelling(text: str) -> str:
    r"""Return the text with `1011 base 2` as `1011_{2}`, `]1, 2[` as `(1, 2)`, `(a) 26 (b) 40` as
    `26, 40` and the like.
    """
    text = _IN_TEXT.sub(r"\1", text) if "\\" in text else text
    if based := _IN_BASE.match(text):
        base = (based["base"] or based["name"]).lower()
        return f"{based['digits'].upper()}_{{{_BASES.get('hexadecimal' if base == 'hex' else base, base)}}}"
    if plain := _ONLY_DIGITS.match(text):
        text = plain["digits"]
    reversed_ends = _REVERSED.match(text)
    if reversed_ends and (reversed_ends["open"] == "]" or reversed_ends["close"] == "["):
        opening = "(" if reversed_ends["open"] == "]" else "["
        closing = ")" if reversed_ends["close"] == "[" else "]"
        text = f"{reversed_ends['before']}{opening}{reversed_ends['ends']}{closing}"
    if "mod" in text:
        text = _MODULUS.sub(lambda label: f"\\pmod{{{label['modulus']}}}", text)
    text = _ROW_END.sub(r"\\\\ ", text) if "\\" in text else text
    text = _PLUS_MINUS.sub(r"\\pm ", text)
    if "choose" in text:
        text = _CHOOSE.sub(_chosen, text)
    if "'" in text or "’" in text:
        text = _APOSTROPHES.sub(lambda label: re.sub(r"\D", "", label[0]), text)
    return _without_labels(text)


def _chosen(match: re.Match[str]) -> str:
    above = match["n"] or match["above"]
    below = match["k"] or match["below"]
    return f"\\binom{{{above}}}{{{below}}}"


def with_binomials(text: str) -> str:
    r"""Return the text with `C(10, 3)`, `10C3`, `{}^{10}C_3` and `10 choose 3` as `\binom{10}{3}`."""

    def binomial(match: re.Match[str]) -> str:
        above = next(
            match[name]
            for name in ("n", "above", "left", "high", "high2", "first", "one")
            if match[name]
        )
        below = next(
            match[name] for name in ("k", "below", "low", "low2", "second", "other") if match[name]
        )
        return f"\\binom{{{above}}}{{{below}}}"

    return _COMBINATION.sub(binomial, text)


def _without_labels(text: str) -> str:
    """Return the values of `(a) 26 (b) 40` as a list: labels in their order, the first at the
    start.
    """
    if ")" not in text and "Part" not in text and "part" not in text:
        return text
    labels = list(_LABEL.finditer(text[:400]))
    if len(labels) < 2 or text[: labels[0].start()].strip(" $"):
        return text
    names = [(label["round"] or label["half"] or label["part"]).lower() for label in labels]
    if not any(order.split()[: len(names)] == names for order in _ORDERS):
        return text
    ends = [label.start() for label in labels[1:]] + [len(text)]
    values = [
        text[label.end() : end].strip(" ,;$.\\n") for label, end in zip(labels, ends, strict=True)
    ]
    values = [
        re.sub(r"[,;\s]*(?:\band|\\text\{ ?and ?\})$", "", value).strip(" ,;") for value in values
    ]
    return ", ".join(values) if all(values) and not any("," in value for value in values) else text
