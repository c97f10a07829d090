r"""Regular expressions of JSON Schema, which are ECMA 262's, as patterns of Python with the same
meaning.

`$` is the end of the text, not before a last line feed; `\d`, `\w` and `\b` are ASCII; `.` is no
line end; `\s` has the spaces of Unicode.
"""

import re
import sys
import unicodedata
from functools import lru_cache

_SPACES = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_NO_SPACES = (
    r"\x00-\x08\x0e-\x1f!-\u009f\u00a1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff"
    r"\u3001-\ufefe\uff00-\U0010ffff"
)
_ANY_BUT_LINE_ENDS = r"[^\n\r\u2028\u2029]"
_SIGNS = {"$": r"\Z", ".": _ANY_BUT_LINE_ENDS, "{": r"\{"}
_ESCAPES = {"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]", "b": r"\b", "B": r"\B"}
_TOKEN = re.compile(
    r"\\u\{(?P<code>[0-9A-Fa-f]+)\}|\\u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|\\(?P<negated>[pP])\{(?P<property>[^{}]*)\}|\\c(?P<control>[A-Za-z])|\\k<(?P<reference>[A-Za-z_]\w*)>"
    r"|(?P<plain>\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\[dDwWnrtfv]|\\[1-9]\d*|\\[\^$\\.*+?()\[\]{}|/-])"
    r"|\\(?P<escape>[\s\S])|\(\?<(?P<name>[A-Za-z_]\w*)>|(?P<group>\(\?(?:[:=!]|<[=!]))|(?P<other_group>\(\?)"
    r"|(?P<quantifier>(?:[*+?]|\{\d+(?:,\d*)?\})(?P<lazy>\??))|(?P<character>[\s\S])"
)
_CATEGORIES = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Mark": "M", "Uppercase_Letter": "Lu",
               "Lowercase_Letter": "Ll", "Decimal_Number": "Nd", "Separator": "Z"}  # fmt: skip


@lru_cache(1024)
def python_pattern(pattern: str) -> str:
    r"""Return a pattern of ECMA 262, with the flag `u`, as one of Python's `re`.

    Raises:
        ValueError: it has syntax of Python that ECMA 262 does not have, or an unknown property
            `\p{...}`.
        re.error: it is no regular expression.
    """
    pieces: list[str] = []
    in_class = False
    after_quantifier = False
    for token in _TOKEN.finditer(pattern):
        if in_class:
            piece, in_class = _in_class(token)
        elif token["character"] == "[":
            piece = "["
            in_class = True
        elif token["quantifier"]:
            if after_quantifier:
                raise ValueError(
                    f"{pattern[:80]!r} repeats a repetition, which ECMA 262 does not allow"
                )
            piece = token["quantifier"]
        else:
            piece = _outside_class(token)
        after_quantifier = bool(token["quantifier"]) and not in_class
        pieces.append(piece)
    text = "".join(pieces).replace("[^]", r"[\s\S]").replace("[]", r"(?!)")
    translated = f"(?a:{text})"
    re.compile(translated)
    return translated


def translated(schema: object) -> object:
    """Return a JSON schema with Python's forms of `pattern` and `patternProperties` anywhere."""
    if isinstance(schema, list):
        return [translated(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _translated_value(key, value) for key, value in schema.items()}


def _translated_value(key: str, value: object) -> object:
    if key == "pattern" and isinstance(value, str):
        return python_pattern(value)
    if key == "patternProperties" and isinstance(value, dict):
        return {python_pattern(pattern): translated(schema) for pattern, schema in value.items()}
    if key in (
        "properties",
        "$defs",
        "definitions",
        "dependentSchemas",
        "dependencies",
    ) and isinstance(value, dict):
        return {name: translated(schema) for name, schema in value.items()}
    return (
        value if key in ("const", "enum", "default", "examples", "required") else translated(value)
    )


def _outside_class(token: re.Match[str]) -> str:
    if token["name"]:
        return f"(?P<{token['name']}>"
    if token["reference"]:
        return f"(?P={token['reference']})"
    if token["other_group"]:
        raise ValueError(f"{token.string[:80]!r} has a group that ECMA 262 does not have")
    if token["character"] in _SIGNS:
        return _SIGNS[token["character"]]
    if token["escape"] in _ESCAPES:
        return _ESCAPES[token["escape"]]
    if token["property"] is not None:
        negation = "^" if token["negated"] == "P" else ""
        return f"[{negation}{_category(token['property'])}]"
    return token["group"] or token["plain"] or _character(token)


def _in_class(token: re.Match[str]) -> tuple[str, bool]:
    """Return a token in brackets, and whether the brackets go on behind it."""
    if token["character"] == "]":
        return "]", False
    if token["escape"] in ("s", "S"):
        return _SPACES if token["escape"] == "s" else _NO_SPACES, True
    if token["escape"] == "b":
        return r"\b", True
    if token["property"] is not None:
        if token["negated"] == "P":
            raise ValueError(r"\P{...} in brackets is not read")
        return _category(token["property"]), True
    if token["character"] is not None and token["character"] in "[&|~":
        return f"\\{token['character']}", True
    if (
        token["plain"]
        or token["code"]
        or token["high"]
        or token["control"]
        or token["escape"] is not None
    ):
        return token["plain"] or _character(token), True
    return token[0], True


def _character(token: re.Match[str]) -> str:
    """One character, escaped for Python where it was escaped."""
    if token["code"]:
        return re.escape(chr(int(token["code"], 16)))
    if token["high"]:
        pair = bytes.fromhex(token["high"] + token["low"])
        return re.escape(pair.decode("utf-16-be"))
    if token["control"]:
        return re.escape(chr(ord(token["control"]) % 32))
    if token["escape"] is not None:
        return r"\x00" if token["escape"] == "0" else re.escape(token["escape"])  # `\Z` is a Z
    return token[0]


@lru_cache(64)
def _category(name: str) -> str:
    """Return the characters of a general category of Unicode, as ranges of a class."""
    short = name.removeprefix("General_Category=").removeprefix("gc=")
    short = _CATEGORIES.get(short, short)
    members = [
        code
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)).startswith(short)
    ]
    if not members or len(short) > 2:
        raise ValueError(
            f"\\p{{{name}}} is not read: only general categories are, such as \\p{{L}}"
        )
    ranges: list[list[int]] = []
    for code in members:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
