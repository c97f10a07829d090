"""Translates messages about options and commands to the words of a Python caller."""

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dapo.config import Config
from dapo.config.messages import SECTIONS
from dapo.config.option_fields import ALIASES, names_by_keyword, options_of

_PHRASES = [
    line.partition("\t")[::2]
    for line in Path(__file__).with_suffix(".tsv").read_text("utf-8").splitlines()
]
"""Patterns of phrases about the command line, with the words for a Python caller."""
_UNKNOWN = re.compile(
    r"unknown option (\S+); (did you mean ([\w.]+)(?: or [\w.]+)*\?|`dapo show options` lists all"
    r" options)(?! Write)"
)
_VALUE = (
    r"\{[^{}`]*\}|\[[^\[\]`]*\]|\"[^\"]*\"|'[^']*'|[^\s`,;()\[\]{}'\"]+?(?=[.:?]?(?:[\s`,;)]|$))"
)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)+")


def in_python(text: str, arguments: Iterable[str] = ()) -> str:
    """Translate a message for the command line to Python; `arguments` may be misspelt.

    >>> in_python("saved; continue with: dapo resume 'runs/my run'")
    "saved; continue with: dapo.resume('runs/my run')"
    >>> in_python("set loss.surrogate=clip, or `{rank: 16}`")
    'set surrogate="clip", or `{"rank": 16}`'
    """
    text = re.sub(r"`([^`\n]+)`", lambda match: f"`{_code_in_python(match[1])}`", text)
    text = _assignments().sub(lambda match: assigned(match[1], _value_text(match[2])), text)
    for typed, call in _PHRASES:
        text = re.sub(typed, call, text)
    return _UNKNOWN.sub(
        lambda match: _with_keyword(match[1], match[2], match[3], arguments) or match[0], text
    )


@cache
def keyword_of(option: str) -> str | None:
    """Return the keyword of an option: an alias, or its last part if that is unique."""
    for alias, name in ALIASES.items():
        if name == option:
            return alias
    last = option.rpartition(".")[2]
    if option == last and option in Config.model_fields:
        return option
    is_unique = names_by_keyword().get(last) == [option] and last not in Config.model_fields
    return last if is_unique else None


def assigned(option: str, value: str) -> str:
    """Return `keyword=value`, or the option by its whole name; `value` is Python."""
    keyword = keyword_of(option)
    return f'**{{"{option}": {value}}}' if keyword is None else f"{keyword}={value}"


@cache
def _assignments() -> re.Pattern[str]:
    """Return the pattern of `option=value` in a message."""
    names = [name for name, _ in options_of() if name not in SECTIONS]
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![\w.\"'*-])({words})=({_VALUE})")


def _value_text(text: str) -> str:
    """Return a value of YAML as Python writes it; a word in capitals stands for a value."""
    if _PLACEHOLDER.fullmatch(text) or text.startswith(("'", '"')):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    # YAML reads 1e-3 as text
    if isinstance(value, str):
        try:
            return repr(float(value)) if re.fullmatch(r"[-+.\de]+", value) else _literal(value)
        except ValueError:
            return _literal(value)
    return _literal(value)


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str)


def _code_in_python(code: str) -> str:
    """Return a piece of code of a message, as YAML or a shell has it, in Python."""
    if any(name == code for name, _ in options_of()):
        keyword = keyword_of(code)
        # a single word says less than the option's whole name, `every`, and so does `top_p`
        is_clear = keyword is not None and "_" in keyword and not code.startswith("eval.")
        return str(keyword) if is_clear else code
    if _IMPORT_PATH.fullmatch(code):
        return json.dumps(code)
    key, _, value = code.partition(": ")
    if value and key in SECTIONS:
        return f"{key}={_value_text(value)}"
    if code[0] in "{[" and code[-1] in "}]":
        return _value_text(code)
    if re.fullmatch(r"[\w.]+=[^\s,]+( [\w.]+=[^\s,]+)+", code):
        return code.replace(" ", ", ")
    return code


def _with_keyword(
    typed: str, suggestion: str, name: str | None, arguments: Iterable[str]
) -> str | None:
    """Answer an unknown option with the keyword that is nearest to it."""
    by_keyword = names_by_keyword()
    last = typed.rpartition(".")[2]
    advice = None
    if name is None:
        near = get_close_matches(typed, arguments, n=1, cutoff=0.75)
        if near:
            advice = f"did you mean {near[0]}?"
    elif near := get_close_matches(
        last, [key for key, names in by_keyword.items() if names == [name]], n=1, cutoff=0
    ):
        advice = suggestion.replace(name, f"{near[0]} ({name})" if near[0] != name else name, 1)
    elif "." in name:
        advice = f'{suggestion} Write the whole name: **{{"{name}": ...}}'
    return advice and f"unknown option {typed}; {advice}"
