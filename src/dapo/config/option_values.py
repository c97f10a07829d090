r"""Reads and writes `option=value`: the type of the option decides, never the value alone.

- Text: everything behind the first `=`, letter by letter.
- Text or something else (`str | None`, a data source): `null` is none, `{...}` a mapping and
  `[...]` a list, where the type has them; everything else is the text. A backslash in front makes
  it the text: `\null`.
- A list of texts: a YAML list whose items are texts, `[a, 5, no]`, or a single text. Each is taken
  letter by letter, also `${x}`.
- Unknown, as the options of a verifier or an environment: a number, `true`, `null`, a text in
  quotes, `{...}` and `[...]` as in YAML; everything else is the text.
- Anything else: YAML.
"""

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

import yaml

from dapo.config.option_fields import known_about
from dapo.config.options import Config
from dapo.config.section import Section
from dapo.core.errors import ConfigError

# sections that may be written as the value of one option
SHORT_FORMS = {
    "model": "name",
    "data": "train",
    "reward": "verifier",
    "loss": "function",
    "environment": "name",
}
ReadYaml: TypeAlias = Callable[[str], Any]
_TYPES_OF_SCHEMAS: Mapping[str, Any] = {"string": str, "array": list, "null": type(None)}


def read_value(name: str, value: str, read_yaml: ReadYaml) -> Any:
    """Read the value of an option from its text.

    Args:
        name: the dotted name of the option.
        value: the text.
        read_yaml: reads YAML, and raises an error for what is not YAML.
    """
    kinds = _kinds_of(name)
    if Any in kinds:
        return _read_free(value, read_yaml)
    if _TextList in kinds:
        if value == "null" and type(None) in kinds:
            return None
        # one text stands for a list of it
        if not value.lstrip().startswith("["):
            return escape_references(value)
        return _read_texts(value, read_yaml)
    if str in kinds:
        return _read_text(value, kinds, read_yaml)
    return read_yaml(value)


def _read_text(value: str, kinds: frozenset[Any], read_yaml: ReadYaml) -> Any:
    """Read the value of an option that may be a text.

    Only a data source, or a section, may refer to `${NAME}`.
    """
    body = value.lstrip("\\")
    if _is_no_text(body, kinds):
        if value == body:
            return read_yaml(body)
        value = value[1:]
    return value if _has_mappings(kinds) else escape_references(value)


def write_value(name: str, value: Any, read_yaml: ReadYaml) -> str:
    """Write a value so that `read_value` reads it back.

    Raises ConfigError for a value that must be text and is not.
    """
    if isinstance(value, str):
        for candidate in (value, plain_references(value), f"\\{value}"):
            try:
                back = read_value(name, candidate, read_yaml)
            except (ConfigError, yaml.YAMLError):
                continue
            if isinstance(back, str) and back == value:
                return candidate
    elif not (value is None or _kinds_of(name) - {str, type(None)}):
        raise ConfigError(f"option {name}: input should be a text, got {value!r}")
    elif isinstance(value, list | tuple) and _TextList in _kinds_of(name):
        # `read_value` escapes each text
        value = [plain_references(item) if isinstance(item, str) else item for item in value]
    return json.dumps(value, ensure_ascii=False, default=_function_path)


def escape_references(text: str) -> str:
    """Escape `${x}`, so that a configuration reads it literally."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


def plain_references(text: str) -> str:
    """Undo `escape_references`."""
    return re.sub(r"(\\*)\\\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", text)


def _function_path(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}:{value.__name__}"
    return str(value)


class _TextList:
    """The kind of an option that is a list of texts."""


@cache
def _kinds_of(name: str) -> frozenset[Any]:
    """Return the types of an option's value: `str`, `dict`, sections; `Any` if unknown."""
    annotations: list[Any] = [Config]
    also: list[Mapping[str, Any]] = []
    for part in name.split("."):
        inner: list[Any] = []
        also = []
        for kind in _branches(annotations):
            if isinstance(kind, type) and issubclass(kind, Section):
                if part in kind.model_fields:
                    field = kind.model_fields[part]
                    inner.append(field.annotation)
                    also += known_about(field).get("also", ())
            elif get_origin(kind) is dict:
                inner.append(get_args(kind)[1])
            elif kind is Any:
                inner.append(Any)
        if not inner:
            return frozenset({Any})
        annotations = inner
    kinds = {_simple_kind(kind) for kind in _branches(annotations)}
    for schema in also:
        # values that a validator converts
        if schema.get("type") in _TYPES_OF_SCHEMAS:
            kinds.add(_TYPES_OF_SCHEMAS[schema["type"]])
    if name in SHORT_FORMS:
        kinds |= {str, dict, type(None)}
    return frozenset(kinds)


def _branches(annotations: Iterable[Any]) -> list[Any]:
    """List the alternatives of types: members of unions, without `Annotated` metadata."""
    branches: list[Any] = []
    for annotation in annotations:
        origin = get_origin(annotation)
        if origin is Annotated:
            branches += _branches([get_args(annotation)[0]])
        elif origin in (Union, types.UnionType):
            branches += _branches(get_args(annotation))
        else:
            branches.append(annotation)
    return branches


def _simple_kind(kind: Any) -> Any:
    origin = get_origin(kind)
    if origin in (list, tuple):
        items = [item for item in get_args(kind) if item is not Ellipsis]
        return _TextList if _branches(items) == [str] else list
    return origin or kind


def _is_no_text(value: str, kinds: frozenset[Any]) -> bool:
    """Return True if the value of an option that allows text is of another type."""
    begin = value.lstrip()[:1]
    if begin == "{":
        return _has_mappings(kinds)
    if begin == "[":
        return list in kinds or _TextList in kinds
    return value == "null" and type(None) in kinds


def _has_mappings(kinds: frozenset[Any]) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, dict | Section) for kind in kinds)


def _read_free(value: str, read_yaml: ReadYaml) -> Any:
    """Read a value of unknown type."""
    if value.lstrip()[:1] in ("{", "["):
        _require_no_comment(value)
        return read_yaml(value)
    quoted_text = _quoted_text(value)
    if quoted_text is not None:
        return quoted_text
    try:
        parsed = read_yaml(value)
    except (ConfigError, yaml.YAMLError):
        return value
    # YAML reads 1:30 as 90, and `5 # or 6` as 5
    is_plain = ":" not in value and "#" not in value
    if is_plain and isinstance(parsed, int | float | None):
        return parsed
    return value


def _quoted_text(value: str) -> str | None:
    """Return the text of a value that is one text in quotes; None for any other value."""
    if value.strip()[:1] not in ('"', "'"):
        return None
    try:
        node = yaml.compose(value, yaml.SafeLoader)
        _require_no_comment(value)
    except (yaml.YAMLError, ConfigError):
        return None
    if isinstance(node, yaml.ScalarNode) and node.style in ('"', "'"):
        return str(node.value)
    return None


def _read_texts(value: str, read_yaml: ReadYaml) -> Any:
    """Read a list whose items are texts, also where YAML would read them as numbers or booleans."""
    # raises for what is not YAML, or nested too deeply; `${` of a text is no reference to be parsed
    read_yaml(value.replace("$", "_"))
    _require_no_comment(value)
    items = yaml.load(value, yaml.BaseLoader)  # makes only texts, lists and mappings
    return [escape_references(item) if isinstance(item, str) else item for item in items]


def _require_no_comment(value: str) -> None:
    """Raise ConfigError where YAML would leave a part of a value out, as a comment."""
    end = 0
    for token in yaml.scan(value, yaml.SafeLoader):
        if "#" in value[end : token.start_mark.index]:
            raise ConfigError("`#` begins a comment here; put texts with a `#` in quotes")
        end = max(end, token.end_mark.index)
    if "#" in value[end:]:
        raise ConfigError("`#` begins a comment here; put texts with a `#` in quotes")
