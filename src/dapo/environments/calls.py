"""Tool calls: schemas of Python functions, and the calls in the text of an assistant's turn.

Two forms are read. Hermes: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, several in a turn.
Llama 3: the turn is `{"name": "add", "parameters": {"a": 1}}`, with `<|python_tag|>` before it or without.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dapo.core.errors import DataError
from dapo.core.text import quoted, shorten

CallForm: TypeAlias = Literal["hermes", "llama"]
PYTHON_TAG = "<|python_tag|>"
CALL_MARKS = (PYTHON_TAG, "<tool_call>", "</tool_call>")
"""Texts around a call that are special tokens in some vocabularies."""
EXAMPLES: Mapping[CallForm, str] = {
    "hermes": '<tool_call>\n{"name": NAME, "arguments": {ARGUMENT: VALUE}}\n</tool_call>',
    "llama": '{"name": NAME, "parameters": {ARGUMENT: VALUE}}',
}
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LLAMA = re.compile(r'\{\s*"(?:name|type)"\s*:')
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


@dataclass(frozen=True)
class ToolCall:
    """A call of a known tool with arguments that fit its schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class WrongCall:
    """A call that cannot be made; `error` is the text that answers it."""

    error: str
    name: str | None = None
    """The name of the tool, if the call names one that exists."""


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function or method, from its signature and its docstring with a section `Args:`.

    Raises DataError if a parameter has no type or no description, or takes any number of arguments.
    """
    from transformers.utils import chat_template_utils as transformers

    name = getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters
    for each in parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise DataError(f"tool {name}: parameter {each} has no name that a call can give; use named parameters")
    try:
        schema: dict[str, Any] = transformers.get_json_schema(function)
    except (
        transformers.DocstringParsingException,
        transformers.TypeHintParsingException,
        NameError,
        ValueError,
    ) as error:
        reason = " ".join(map(str, error.args))
        example = 'a docstring with a line "NAME: what it is" for each parameter under "Args:"'
        raise DataError(f"tool {name}: {reason}; a tool needs types in its signature, and {example}") from None
    for key, value in schema["function"]["parameters"]["properties"].items():
        default = parameters[key].default
        if isinstance(default, str | int | float | bool):
            value["default"] = default
    return schema


def tool_text(schemas: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """The description of tools for a model whose chat template has none."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
    return "\n".join(["You can call these tools:", *lines, "To call a tool, write:", EXAMPLES[form]])


class CallReader:
    """Reads the tool calls of a turn, and checks them against the tools' schemas."""

    def __init__(self, form: CallForm, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.form = form
        self._parameters = {each["function"]["name"]: each["function"]["parameters"] for each in schemas}

    def read(self, text: str) -> list[ToolCall | WrongCall]:
        """The calls in the text of a turn, in order; none in its private reasoning. Raises nothing."""
        text = text.rpartition("</think>")[2]
        bodies = _HERMES.findall(text) if self.form == "hermes" else _llama_bodies(text.strip())
        return [call for body in bodies for call in self._calls(body)]

    def _calls(self, body: str) -> list[ToolCall | WrongCall]:
        try:
            value = _parsed(body.strip())
            calls = value if isinstance(value, list) else [value]
            return [self._checked(call) for call in calls]
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            return [
                WrongCall(f"Error: the call is not valid JSON: {shorten(reason, 200)}; write {EXAMPLES[self.form]}")
            ]

    def _checked(self, call: object) -> ToolCall | WrongCall:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str):
            return WrongCall(f"Error: expected {EXAMPLES[self.form]}, got {quoted(call)}")
        if name not in self._parameters:
            return WrongCall(f"Error: there is no tool {quoted(name)}; the tools are: {', '.join(self._parameters)}")
        arguments = call.get("arguments", call.get("parameters", {}))
        arguments = _parsed(arguments) if isinstance(arguments, str) else arguments
        arguments = {} if arguments is None else arguments
        problem = _misfit(arguments, self._parameters[name])
        return WrongCall(f"Error: {name}: {problem}", name) if problem else ToolCall(name, arguments)


def _llama_bodies(text: str) -> list[str]:
    """The JSON texts of a turn in the form of Llama 3; none in a turn that is no call."""
    tagged = text.startswith(PYTHON_TAG)
    text = text.removeprefix(PYTHON_TAG).lstrip()
    bodies: list[str] = []
    while text and (_LLAMA.match(text) or (tagged and not bodies)):
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return [*bodies, text]
        bodies.append(text[:end])
        text = text[end:].lstrip("; \n\t\r,")
    return bodies


def _parsed(text: str) -> Any:
    def refused(constant: str) -> Any:
        raise ValueError(f"{constant} is no number of JSON")

    return json.loads(text, parse_constant=refused)


def _misfit(arguments: object, schema: Mapping[str, Any]) -> str | None:
    """The reason for which arguments do not fit a tool's parameters; None if they fit."""
    known = schema.get("properties", {})
    if not isinstance(arguments, dict):
        return f"expected an object of arguments, got {quoted(arguments)}"
    if missing := [key for key in schema.get("required", []) if key not in arguments]:
        return f"missing: {', '.join(missing)}"
    for key, value in arguments.items():
        if key not in known:
            return f"there is no argument {quoted(key)}; the arguments are: {', '.join(known)}"
        if not _fits(value, known[key]):
            return f"{key} must fit the schema {json.dumps(known[key], ensure_ascii=False)}, got {quoted(value)}"
    return None


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value has the type that a JSON schema gives, and each entry of a list."""
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    whole = isinstance(value, float) and value.is_integer() and "integer" in kinds
    as_number = isinstance(value, bool) and "boolean" not in kinds
    fits = not as_number and (whole or any(isinstance(value, _TYPES.get(kind, object)) for kind in kinds))
    fits = fits and ("enum" not in schema or value in schema["enum"])
    entries = value if isinstance(value, list) else []
    return (value is None and "nullable" in schema) or (
        fits and all(_fits(x, schema.get("items", {})) for x in entries)
    )
