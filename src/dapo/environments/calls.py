"""Tool calls: schemas of Python functions, and the calls in the text of an assistant's turn.

Two forms are read. Hermes: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, several
in a turn. Llama 3: the turn is `{"name": "add", "parameters": {"a": 1}}`, or has such calls behind
`<|python_tag|>`. In both the keys stand in any order, and the arguments are under `arguments` or
`parameters`, also as JSON text.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dapo.core.errors import DataError
from dapo.core.text import quoted, shorten
from dapo.environments.thoughts import closing_mark, ends_in_thought, thought_marks

CallForm: TypeAlias = Literal["hermes", "llama"]
PYTHON_TAG = "<|python_tag|>"
CALL_MARKS = (PYTHON_TAG, "<tool_call>", "</tool_call>")
"""Texts around a call that are special tokens in some vocabularies."""
EXAMPLES: Mapping[CallForm, str] = {
    "hermes": '<tool_call>\n{"name": NAME, "arguments": {ARGUMENT: VALUE}}\n</tool_call>',
    "llama": '{"name": NAME, "parameters": {ARGUMENT: VALUE}}',
}
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_TAG = re.compile(r"</?tool_call>")
_BROKEN_CALL = re.compile(r"""\[?\s*\{\s*['"](?:name|type|function|parameters|arguments)['"]\s*:""")
"""The beginning of a call in the form of Llama 3 whose JSON is not valid."""
_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"[;,\s]*")
_ARGUMENTS = ("arguments", "parameters")
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
    written: ToolCall | None = field(default=None, compare=False)
    """The call as it was written, if it is JSON with a name and an object of arguments."""


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its signature and its docstring's section `Args:`.

    Raises DataError if a parameter has no type or no description, or takes any number of arguments.
    """
    from transformers.utils import chat_template_utils as transformers

    name = getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise DataError(
                f"tool {name}: parameter {parameter} has no name that a call can give; use named"
                " parameters"
            )
    try:
        schema: dict[str, Any] = transformers.get_json_schema(function)
    except (
        transformers.DocstringParsingException,
        transformers.TypeHintParsingException,
        NameError,
        AttributeError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(map(str, error.args)).rstrip("!.")
        example = 'a docstring with a line "NAME: what it is" for each parameter under "Args:"'
        raise DataError(
            f"tool {name}: {reason}; a tool needs types in its signature, and {example}"
        ) from None
    for key, value in schema["function"]["parameters"]["properties"].items():
        default = parameters[key].default
        if isinstance(default, str | int | float | bool):
            value["default"] = default
    return schema


def tool_text(schemas: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """Return the description of tools for a model whose chat template has none."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
    return "\n".join(
        ["You can call these tools:", *lines, "To call a tool, write:", EXAMPLES[form]]
    )


def call_text(call: ToolCall, form: CallForm) -> str:
    """Return a call as `CallReader` reads it."""
    if form == "llama":
        return json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
    value = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{value}\n</tool_call>"


class CallReader:
    """Reads the tool calls of a turn, and checks them against the tools' schemas."""

    def __init__(
        self, form: CallForm, schemas: Sequence[Mapping[str, Any]], *, begun: str = ""
    ) -> None:
        """Take `begun`, the beginning of each turn in the prompt: a thought's mark, or nothing."""
        self.form = form
        self._begins_in_thought = ends_in_thought(begun)
        self._parameters = {
            schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas
        }

    def read(self, text: str) -> list[ToolCall | WrongCall]:
        """Return the calls in the text of a turn, in order, without those in private reasoning.

        Raises nothing. A thought that is cut off hides all that follows; text before a mark that
        only closes one was a thought.
        """
        calls, _ = self.read_with_start(text)
        return calls

    def read_with_start(self, text: str) -> tuple[list[ToolCall | WrongCall], int]:
        """Return the calls of `read`, and the position at which the first one begins."""
        start = 0
        if self._begins_in_thought:
            mark = closing_mark(text, 0)
            if mark is None:
                return [], 0
            start = mark.end
        if self.form == "hermes":
            return self._read_tags(text, start)
        return self._read_turn(text, start)

    def _read_tags(self, text: str, start: int) -> tuple[list[ToolCall | WrongCall], int]:
        """Return the calls of a text in tags, and the position of the first tag.

        A JSON value may hold any mark: it is passed over as a whole.
        """
        calls: list[ToolCall | WrongCall] = []
        first = start
        position = start
        while (tag := text.find(_OPEN, position)) >= 0:
            mark = next(thought_marks(text, position, tag), None)
            if mark is None:
                if not calls:
                    first = tag
                tag_calls, position = self._read_tag(text, tag + len(_OPEN))
                calls += tag_calls
            elif not mark.opens:
                calls = []
                position = mark.end
            else:
                closing = closing_mark(text, mark.end)
                if closing is None:
                    return calls, first
                position = closing.end
        in_thought = False
        for mark in thought_marks(text, position):
            if not mark.opens and not in_thought:
                calls = []
            in_thought = mark.opens
        return calls, first

    def _read_tag(self, text: str, start: int) -> tuple[list[ToolCall | WrongCall], int]:
        """Return the calls behind an opening tag, and the position behind them."""
        values, end, error = _json_values(text, start)
        tag = _TAG.search(text, end)
        closes = tag is not None and tag.group() == _CLOSE
        until = len(text) if tag is None else tag.start()
        behind = text[end:until].strip()
        if error is None and not values:
            error = "there is no JSON between the tags"
        if error is None and closes and behind:
            error = f"{quoted(behind)} stands behind it"
        position = tag.end() if tag is not None and closes else until
        if error is not None:
            return [self._invalid(error)], position
        return [call for value in values for call in self._calls(value)], position

    def _read_turn(self, text: str, start: int) -> tuple[list[ToolCall | WrongCall], int]:
        """Return the calls of a text in the form of Llama 3, and the position of the first one.

        A turn that begins with other text and has no tag has none.
        """
        position = start
        while True:
            calls, first, position = self._read_beginning(text, position)
            marks = list(thought_marks(text, position))
            if not marks:
                return calls, first
            if marks[0].opens and calls:
                return calls, first
            closing = closing_mark(text, marks[0].start)
            if closing is None:
                return [], 0
            position = closing.end

    def _read_beginning(self, text: str, start: int) -> tuple[list[ToolCall | WrongCall], int, int]:
        """Return the calls with which a text begins, or those behind its tag, and their range."""
        tag = text.find(PYTHON_TAG, start)
        values, end, error = _json_values(text, start)
        begins = bool(values) and all(self._is_call(value) for value in _entries(values))
        if not begins and error is not None:
            begins = _BROKEN_CALL.match(text, _blank_end(text, start)) is not None
        first = start
        is_tagged = tag >= 0 and not begins and next(thought_marks(text, start, tag), None) is None
        if is_tagged:
            values, end, error = _json_values(text, tag + len(PYTHON_TAG))
            first = tag
        elif not begins:
            leading = []
            for value in values:  # a call, then JSON that is none
                if not self._is_call(value):
                    break
                leading.append(value)
            if not leading:
                return [], start, start
            values = leading
            error = None
        calls = [call for value in values for call in self._calls(value)]
        if error is not None and (not values or _BROKEN_CALL.match(text, end)):
            return [*calls, self._invalid(error)], first, len(text)
        return calls, first, end

    def _is_call(self, value: object) -> bool:
        """Return True if a JSON value without a tag is meant as a call, not as an answer."""
        if not isinstance(value, dict):
            return False
        inner = value.get("function")
        if isinstance(inner, dict):
            return "name" in inner
        if value.get("type") == "function":
            return True
        name = value.get("name")
        return isinstance(name, str) and (
            name in self._parameters or any(key in value for key in _ARGUMENTS)
        )

    def _calls(self, value: object) -> list[ToolCall | WrongCall]:
        try:
            return [self._checked(call) for call in _entries([value])]
        except (ValueError, RecursionError) as error:
            return [self._invalid(_reason(error))]

    def _invalid(self, reason: str) -> WrongCall:
        return WrongCall(
            f"Error: the call is not valid JSON: {shorten(reason, 200)}; write"
            f" {EXAMPLES[self.form]}"
        )

    def _checked(self, call: object) -> ToolCall | WrongCall:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]  # the form of a message's tool_calls
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str):
            return WrongCall(f"Error: expected {EXAMPLES[self.form]}, got {quoted(call)}")
        arguments: Any = next((call[key] for key in _ARGUMENTS if call.get(key) is not None), {})
        if name in self._parameters and isinstance(arguments, str):
            arguments = _parsed(arguments)
        if arguments is None:
            arguments = {}
        written = ToolCall(name, arguments) if isinstance(arguments, dict) else None
        if name not in self._parameters:
            tools = ", ".join(self._parameters)
            error = f"Error: there is no tool {quoted(name)}; the tools are: {tools}"
            return WrongCall(error, written=written)
        problem = _misfit(arguments, self._parameters[name])
        if problem:
            return WrongCall(f"Error: {name}: {problem}", name, written)
        properties = self._parameters[name].get("properties") or {}
        fitting = {key: _as_integers(item, properties[key]) for key, item in arguments.items()}
        return ToolCall(name, fitting)


def _entries(values: Sequence[object]) -> list[object]:
    """Return the values, with the entries of lists in the place of the lists."""
    entries: list[object] = []
    for value in values:
        if isinstance(value, list):
            entries += value
        else:
            entries.append(value)
    return entries


def _json_values(text: str, start: int) -> tuple[list[Any], int, str | None]:
    """Return the JSON values from a position on, their end, and an error if the next is broken."""
    values: list[Any] = []
    end = start
    while True:
        begin = _blank_end(text, end)
        if values:
            separator = _BETWEEN.match(text, end)
            begin = end if separator is None else separator.end()
        if begin == len(text) or (values and text[begin] not in "{["):
            return values, end, None
        if not values and text.startswith(_CLOSE, begin):
            return values, begin, None
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            return values, begin, _reason(error)
        values.append(value)


def _blank_end(text: str, start: int) -> int:
    """Return the position of the first character from `start` on that is not white space."""
    blank = _BLANK.match(text, start)
    return start if blank is None else blank.end()


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused)


def _parsed(text: str) -> Any:
    return json.loads(text, parse_constant=_refused)


def _misfit(arguments: object, schema: Mapping[str, Any]) -> str | None:
    """Return the reason why arguments do not fit a tool's parameters; None if they fit.

    Schemas come from clients in any language: what is null or of another type there asks nothing.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    required = schema.get("required")
    if not isinstance(required, list | tuple):
        required = ()
    if not isinstance(arguments, dict):
        return f"expected an object of arguments, got {quoted(arguments)}"
    absent = [key for key in required if isinstance(key, str) and key not in arguments]
    if absent:
        return f"missing: {', '.join(absent)}"
    for key, value in arguments.items():
        if key not in properties:
            return f"there is no argument {quoted(key)}; the arguments are: {', '.join(properties)}"
        if not _fits(value, properties[key]):
            return (
                f"{key} must fit the schema {json.dumps(properties[key], ensure_ascii=False)}, got"
                f" {quoted(value)}"
            )
    return None


def _as_integers(value: Any, schema: object) -> Any:
    """Return a value that fits a schema, with 2.0 as 2 where only an integer is asked for."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_as_integers(entry, schema.get("items")) for entry in value]
    named = schema.get("type")
    kinds = named if isinstance(named, list | tuple) else [named]
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        return int(value)
    return value


def _fits(value: object, schema: object) -> bool:
    """Return True if a value and each entry of a list have the type of a JSON schema.

    Any value fits a schema that is no object, such as `true`.
    """
    if not isinstance(schema, Mapping):
        return True
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    kinds = list(_TYPES)
    if isinstance(named, list | tuple):
        kinds = [kind for kind in named if isinstance(kind, str)]
    is_integer = isinstance(value, float) and value.is_integer() and "integer" in kinds
    if value is None and "nullable" in schema:
        return True
    if isinstance(value, bool) and "boolean" not in kinds:  # a bool is an int in Python
        return False
    if not is_integer and not any(isinstance(value, _TYPES.get(kind, object)) for kind in kinds):
        return False
    choices = schema.get("enum")
    if isinstance(choices, list | tuple) and value not in choices:
        return False
    entries = value if isinstance(value, list) else []
    return all(_fits(entry, schema.get("items")) for entry in entries)
