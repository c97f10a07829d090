"""Reads the options `section.option=value` that a shell script passes to a program."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from foreign_options.formulas import Unknown, compute


def read_shell(text: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The options of a script, with the values of its variables and arrays, or Unknown where they are not known.

    The lines are taken as they are written: of two branches or commands the last one holds. Commands `$(...)` are not
    run. `environment` has the variables that are set outside of the script. Raises ValueError for an open quote.

    Example:
        >>> read_shell("n=4; python3 -m main_ppo data.train_batch_size=$((n * 8))", {})
        {'data.train_batch_size': 32}
    """
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = re.sub(
        r"\$\(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\)|\$\([^()]*\)", lambda m: re.sub(r"\s", "", m[0]), text
    )
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|")
    lexer.whitespace_split = True
    variables = dict(environment)
    found: dict[str, Any] = {}
    array = ""
    for word in lexer:
        if array and word != ")":
            item = word.rstrip(")")
            variables[array] = f"{variables[array]} {item}".strip()
            words, array = [item], array if word == item else ""
        elif match := re.fullmatch(r"([A-Za-z_]\w*)\+?=(\(?)(.*)", word, flags=re.DOTALL):
            name, opens, value = match.groups()
            is_added = word[len(name)] == "+"
            variables[name] = (
                f"{variables.get(name, '') if is_added else ''}{'' if opens else _expanded(value, variables)}"
            )
            array, words = name if opens and not value.endswith(")") else "", [value.rstrip(")")] if opens else []
        else:
            array, words = "", [word]
        for each in words:
            if override := re.fullmatch(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", each, flags=re.DOTALL):
                found[override[1]] = _typed(_expanded(override[2], variables))
    return found


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables, defaults `${x:-y}` and arithmetic; what is not known keeps its `$`."""

    def value_of(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name) or (default if default is not None else f"\0{name}")

    before = None
    while before != text:
        before = text
        text = re.sub(r"\$\{(\w+)(?:\[[@*0]\])?(?::?[-=]([^${}]*))?\}|\$([A-Za-z_]\w*)", value_of, text)
    text = re.sub(r"\$\(\((.+?)\)\)(?!\))", lambda match: _arithmetic(match[1], variables), text)
    return text.replace("\0", "$")


def _arithmetic(text: str, variables: Mapping[str, str]) -> str:
    try:
        numbers = {name: int(value) for name, value in variables.items() if value.lstrip("-").isdigit()}
        return str(compute(text.replace("/", "//"), numbers))
    except (ValueError, TypeError, ArithmeticError):
        return f"$(({text}))"


def _typed(text: str) -> Any:
    if "$" in text or "`" in text:
        return Unknown(text)
    try:
        return float(text) if re.fullmatch(r"-?[\d.]+e-?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text
