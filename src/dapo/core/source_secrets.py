"""Recognizes secrets in Python source that is to be written into a file: by name, by form, and by
the environment.
"""

import ast
import os
import re
from collections.abc import Iterator
from typing import Any

from dapo.core.environment import worker_environment
from dapo.core.secrets import has_secret_form, is_password_name, is_secret_name, words_of

_MIN_SECRET_CHARS = 6
_MIN_CHARS = 8
_MIN_CHARS_WITHIN = 16
"""Shortest values of variables that are compared: of one with a secret's name; of others, as a
whole and as a part.
"""
_TOKEN = re.compile(r"(?=.*[A-Z\d])[\w.+/=~-]{8,}")
_TOKEN_WITH_DIGIT = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=~-]{8,}")


def find_in_source(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the secrets in source, each with the reason.

    >>> list(find_in_source("HEADERS = {'X-Api-Key': '4f9a02c77d'}"))
    [('X-Api-Key', 'looks like a secret')]
    """
    harmless = worker_environment()
    variables = {name: held for name, held in os.environ.items() if held and name not in harmless}
    nodes = list(ast.walk(ast.parse(text)))
    secrets = [
        secret
        for node in nodes
        for target, value in _assignments(node)
        for secret in _constants(target, value)
    ]
    for names, value in [
        *secrets,
        *(((), node.value) for node in nodes if isinstance(node, ast.Constant)),
    ]:
        if isinstance(value, str | bytes | int | float) and not isinstance(value, bool):
            plain = value.decode("latin-1") if isinstance(value, bytes) else str(value)
            name = names[-1] if names else "a constant"
            if variable := next(
                (variable for variable, held in variables.items() if _holds(plain, variable, held)),
                "",
            ):
                yield name, f"holds the value of the environment variable {variable}"
            elif has_secret_form(plain) or (
                isinstance(value, str | bytes) and _is_named_secret(names, plain)
            ):
                yield name, "looks like a secret"
    if any(map(has_secret_form, re.findall(r"#\s*([^\n]*)", text))):
        yield "a comment", "holds what looks like a secret"


def _holds(value: str, variable: str, held: str) -> bool:
    """Return True if a constant is or holds the value of a variable, whatever its name is."""
    if held not in value or (is_secret_name(variable) and len(held) >= _MIN_SECRET_CHARS):
        return held in value
    return len(held) >= (_MIN_CHARS if held == value else _MIN_CHARS_WITHIN) and not os.path.exists(
        held
    )


def _assignments(node: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Yield the targets of a statement, keyword, mapping or signature, each with its value."""
    match node:
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign() | ast.NamedExpr():
            yield node.target, node.value
        case ast.keyword():
            yield ast.Name(node.arg or ""), node.value
        case ast.Dict():
            yield from zip(node.keys, node.values, strict=True)
        case ast.arguments():
            plain = [*node.posonlyargs, *node.args]
            defaults = [
                *[None] * (len(plain) - len(node.defaults)),
                *node.defaults,
                *node.kw_defaults,
            ]
            names = [ast.Name(argument.arg) for argument in (*plain, *node.kwonlyargs)]
            yield from zip(names, defaults, strict=True)


def _constants(
    target: Any, value: Any, around: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the constants that a target gets, with its name and those of outer mappings."""
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for element, item in zip(target.elts, value.elts, strict=False):
            yield from _constants(element, item)
    names = (*around, *_name_of(target))
    if isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values, strict=True):
            yield from _constants(key, item, names)
    elif isinstance(value, ast.List | ast.Tuple | ast.Set | ast.BoolOp | ast.IfExp):
        for child in ast.iter_child_nodes(value):
            yield from _constants(None, child, names)
    elif isinstance(value, ast.Constant):
        yield names, value.value


def _name_of(target: Any) -> tuple[str, ...]:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str() as name):
            return (name,)
        case ast.Subscript():
            return (*_name_of(target.value), *_name_of(target.slice))
    return ()


def _is_named_secret(names: tuple[str, ...], value: str) -> bool:
    """Return True if a text is a secret by name; a short name needs a text that looks like one."""
    if is_secret_name(value) and value.isupper():  # the name of a variable
        return False
    for name in filter(is_secret_name, names):
        if is_password_name(name) and len(value) > len("EMPTY"):  # which servers without a key take
            return True
        if (_TOKEN if len(words_of(name)) > 1 else _TOKEN_WITH_DIGIT).fullmatch(value):
            return True
    return False
