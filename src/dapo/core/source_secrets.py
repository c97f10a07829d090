"""Recognizes secrets in Python source that is to be written into a file: by name, by form, and by
the environment.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dapo.core.environment import worker_environment
from dapo.core.secrets import has_secret_form, is_password_name, is_secret_name, words_of

# shorter values of variables are not compared, because code holds such texts by chance
_MIN_SECRET_CHARS = 6  # of a variable with a secret's name
_MIN_CHARS = 8  # of another that a constant equals
_MIN_CHARS_WITHIN = 16  # of another that a constant holds as a part
_TOKEN = re.compile(r"(?=.*[A-Z\d])[\w.+/=~-]{8,}")
_TOKEN_WITH_DIGIT = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=~-]{8,}")


def find_in_source(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the secrets in source, each with the reason.

    >>> list(find_in_source("HEADERS = {'X-Api-Key': '4f9a02c77d'}"))
    [('X-Api-Key', 'looks like a secret')]

    Raises:
        SyntaxError: the text is not Python source.
    """
    variables = _secret_variables()
    for names, value in _named_constants(text):
        if isinstance(value, bool) or not isinstance(value, str | bytes | int | float):
            continue
        plain = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        name = names[-1] if names else "a constant"
        variable = _variable_of(plain, variables)
        if variable is not None:
            yield name, f"holds the value of the environment variable {variable}"
            continue
        looks_secret = has_secret_form(plain)
        # a number of that name is rather a limit or a count
        if isinstance(value, str | bytes):
            looks_secret = looks_secret or _is_named_secret(names, plain)
        if looks_secret:
            yield name, "looks like a secret"
    comments = re.findall(r"#\s*([^\n]*)", text)
    if any(has_secret_form(comment) for comment in comments):
        yield "a comment", "holds what looks like a secret"


def _secret_variables() -> dict[str, str]:
    """Return the environment variables that may be secret: workers do not get them."""
    public = worker_environment()
    return {name: value for name, value in os.environ.items() if value and name not in public}


def _named_constants(text: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the constants of source with their names: all that are assigned, then all."""
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        for target, value in _assignments(node):
            yield from _constants(target, value)
    for node in nodes:
        if isinstance(node, ast.Constant):
            yield (), node.value


def _variable_of(constant: str, variables: Mapping[str, str]) -> str | None:
    """Return the name of the first variable whose value a constant is or holds."""
    for name, value in variables.items():
        if value in constant and _is_copy(constant, name, value):
            return name
    return None


def _is_copy(constant: str, name: str, value: str) -> bool:
    """Return True if the value of a variable is in a constant not by chance."""
    if is_secret_name(name) and len(value) >= _MIN_SECRET_CHARS:
        return True
    min_chars = _MIN_CHARS if value == constant else _MIN_CHARS_WITHIN
    # the path of a file is no secret, and code often holds one
    return len(value) >= min_chars and not os.path.exists(value)


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
            positional = [*node.posonlyargs, *node.args]
            # ast lists the defaults of the last positional ones alone, and None for keywords
            num_required = len(positional) - len(node.defaults)
            defaults = [None] * num_required + node.defaults + node.kw_defaults
            for argument, default in zip(positional + node.kwonlyargs, defaults, strict=True):
                yield ast.Name(argument.arg), default


def _constants(
    target: Any, value: Any, around: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the constants that a target gets, with their names.

    Args:
        target: the node that gets the value; None: a part of a value, without a name of its own.
        value: the node of the value.
        around: the names of outer mappings.
    """
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
    for name in names:
        if not is_secret_name(name):
            continue
        # EMPTY is the key that servers without a key take
        if is_password_name(name) and len(value) > len("EMPTY"):
            return True
        # `api_key` says more than `key`, which also names columns and dictionaries
        form = _TOKEN if len(words_of(name)) > 1 else _TOKEN_WITH_DIGIT
        if form.fullmatch(value):
            return True
    return False
