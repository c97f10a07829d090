"""Convert rows of any source to problems: the column layouts of TRL, verl and GSM8K."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from dapo.config.data_spec import ANY_COLUMNS, Columns
from dapo.core.errors import DataError
from dapo.core.text import one_line, shorten
from dapo.core.typed_values import as_text, is_kept, standard_value, with_texts
from dapo.types import Message, Problem, Prompt, content_text

PROMPT_COLUMNS = ("prompt", "question", "problem", "query")
ANSWER_COLUMNS = (
    "reward_model.ground_truth",
    "answer",
    "final_answer",
    "expected_answer",
    "solution",
    "ground_truth",
    "target",
)
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
TEMPLATE_KWARGS = "chat_template_kwargs"
"""The column with a problem's variables for the chat template, as TRL has it."""
TEMPLATE_COLUMNS = ("tools", TEMPLATE_KWARGS)
SOURCE_COLUMNS = ("data_source", "source")
# pandas writes a frame's index as a column of this name; it would make copies of a problem differ
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
_MISSING = object()
_SORTED_JSON = json.JSONEncoder(sort_keys=True)  # json.dumps would make one for each row
_ROLES_OF_SHAREGPT = {"human": "user", "gpt": "assistant"}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def problem_from_row(
    row: Mapping[str, Any] | DataError,
    *,
    where: str,
    source: str,
    columns: Columns = ANY_COLUMNS,
    require_answer: bool = True,
) -> Problem:
    """Convert one row to a problem.

    A nested column is named with a dot (`reward_model.ground_truth`). An answer in GSM8K's format
    becomes the number after `####`, and the worked solution `fields["solution"]`. All columns
    become `fields`, so that a reward finds each under its own name with its own value; only a
    `prompt` that was read as the prompt, and an `answer` that is the problem's answer letter by
    letter, are not stored twice.

    Args:
        row: the row, or the error of reading it, which is raised.
        where: its location, for error messages.
        source: the problem's source, unless a column `data_source` or `source` names it.
        columns: the columns of prompt and answer; None: those with the usual names.
        require_answer: whether a row needs a reference answer as text or number; if not, `answer`
            may be "".

    Raises:
        DataError: the row cannot be a problem.
    """
    if isinstance(row, DataError):
        raise row
    prompt_column = _column(row, columns.prompt, PROMPT_COLUMNS, what="prompt", where=where)
    assert prompt_column is not None
    answer_column = _column(
        row, columns.answer, ANSWER_COLUMNS, what="answer", where=where, required=require_answer
    )
    prompt = as_prompt(
        _lookup(row, prompt_column),
        f"{where}: {prompt_column}",
        # by their names these columns hold whole conversations
        may_begin_answer=prompt_column not in CONVERSATION_COLUMNS,
    )
    reference: object = None
    if answer_column is not None:
        reference = _lookup(row, answer_column)
    try:
        text = _answer(reference, f"{where}: {answer_column}")
    except DataError:
        if require_answer:
            raise
        text = ""
        answer_column = None
    text = columns.cleaned(text)
    if require_answer:
        require_filled(
            text, f"{where}: {answer_column}", "the pattern of remove deletes all of it: narrow it"
        )
    answer = _after_mark(text)
    stored_columns = set[str]()  # columns that the problem holds beside its fields
    if prompt_column == "prompt":
        stored_columns.add("prompt")
    if answer_column == "answer" and data_value(reference, f"{where}: answer") == answer:
        stored_columns.add("answer")
    fields = _fields_of(row, where, without=stored_columns)
    if prompt_column in fields:
        fields[prompt_column] = prompt  # one object, not two
    # the worked solution of GSM8K, unless a column of that name has one
    if answer != text:
        fields.setdefault("solution", text)
    key = problem_id(prompt, answer, fields.get("tools"))
    return Problem(key, prompt, answer, _source_in(fields) or source, fields)


def _fields_of(row: Mapping[str, Any], where: str, *, without: Collection[str]) -> dict[str, Any]:
    """Return the columns of a row by name, without those that the problem holds elsewhere."""
    fields = {}
    for name, value in row.items():
        if name not in without and not _PANDAS_INDEX.fullmatch(str(name)):
            fields[_name(name, where)] = data_value(value, f"{where}: {name}")
    fields |= tool_schemas(row, where)
    # the id and the chat template take JSON alone
    for name in TEMPLATE_COLUMNS:
        if name in fields:
            fields[name] = with_texts(fields[name])
    return fields


def _source_in(fields: Mapping[str, Any]) -> str | None:
    """Return the source that a column of the row names; None without one."""
    for name in SOURCE_COLUMNS:
        value = fields.get(name)
        if value and isinstance(value, str):
            return value
    return None


def other_fields(problem: Problem) -> dict[str, Any]:
    """Return the fields of a problem, without a column `answer` if `problem.answer` is its text.

    What describes a problem by its answer and these does not depend on the type in which the data
    holds the answer.
    """
    fields = dict(problem.fields)
    if is_source_of(problem.answer, fields.get("answer")):
        del fields["answer"]
    return fields


def is_source_of(answer: str, value: object) -> bool:
    """Return True if an answer was read from this value, and differs from it in type or text."""
    if value is None or value == answer:
        return False
    try:
        return _after_mark(_answer(value, "answer")) == answer
    except DataError:  # a list, a mapping or a boolean: no reference
        return False


def problem_id(prompt: Prompt, answer: str, tools: object = None) -> str:
    """Return a hash of the content as 16 hexadecimal digits, which is equal for copies."""
    content: list[Any] = [prompt, answer]
    if not isinstance(prompt, str):
        content[0] = [dict(message) for message in prompt]
    # left out without tools: the ids of runs from before there were any stay the same
    if tools is not None:
        content.append(tools)
    text = _SORTED_JSON.encode(content)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def prompted_problem(prompt: Prompt, columns: Mapping[str, Any] | None = None) -> Problem:
    """Return a problem that only asks; its id, the key of its random numbers, is that of its text."""
    return Problem(problem_id(prompt, ""), prompt, "", "generate", columns or {})


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt, without system messages, on one line with whitespace collapsed."""
    if not isinstance(prompt, str):
        texts = [content_text(message) for message in prompt if message["role"] != "system"]
        prompt = " ".join(texts)
    return one_line(prompt)


def json_value(value: object, where: str) -> Any:
    """Convert a value to JSON: times and decimals to texts, NaN to None.

    Raises:
        DataError: the value holds bytes or objects.
    """
    return with_texts(data_value(value, where))


def data_value(value: object, where: str) -> Any:
    """Convert a value to JSON values and those that `dapo.core.typed_values` keeps; NaN to None.

    Raises DataError for bytes and objects. `changed_type` names what changes its type.
    """
    value = standard_value(value)
    if isinstance(value, str):
        return _encodable(value, where)
    if value is None or isinstance(value, bool | int) or is_kept(value):
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return data_value(_python_value(value), where)
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        entries = value.items()
        return {_name(key, where): data_value(item, f"{where}.{key}") for key, item in entries}
    if isinstance(value, list | tuple):
        return [data_value(item, where) for item in value]
    if isinstance(value, datetime | date | time | timedelta | Decimal | UUID):
        return as_text(value)
    raise DataError(
        f"{where} holds a value of type {type(value).__name__}; only strings, numbers, times,"
        " lists and mappings are read: drop this column or write it as a string"
    )


def changed_type(value: object) -> str | None:
    """Return the type of the value that `data_value` makes a text; None if there is none."""
    value = standard_value(value)
    if value is None or isinstance(value, str | bool | int | float) or is_kept(value):
        return None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                return f"key of type {type(key).__name__}"
        return _first(changed_type, value.values())
    if isinstance(value, list | tuple):
        return _first(changed_type, value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        python_value = _python_value(value)
        if isinstance(python_value, str):
            return type(value).__name__
        return changed_type(python_value)
    return type(value).__name__


def unlike_json(value: object) -> str | None:
    """Return the type of a value that `json_value` makes a text; None if there is none."""
    value = standard_value(value)
    if is_kept(value):
        return "infinite number" if isinstance(value, float) else type(value).__name__
    if isinstance(value, Mapping):
        return _first(unlike_json, value.values()) or changed_type(value)
    if isinstance(value, list | tuple):
        return _first(unlike_json, value)
    return changed_type(value)


def lost_type(name: str, value: object, columns: Columns = ANY_COLUMNS) -> str | None:
    """Return the type of a column's value that functions get as text; None if there is none.

    Messages, and what the chat template reads, are JSON.
    """
    is_prompt = name in (columns.prompt, *PROMPT_COLUMNS, *CONVERSATION_COLUMNS)
    if is_prompt or name in TEMPLATE_COLUMNS:
        return unlike_json(value)
    return changed_type(value)


def _first(kind_of: Callable[[object], str | None], values: Iterable[object]) -> str | None:
    """Return the first kind that the function finds among values."""
    for value in values:
        kind = kind_of(value)
        if kind is not None:
            return kind
    return None


def _python_value(value: Any) -> Any:
    """Return a value of NumPy as Python's; a time below a microsecond as text."""
    if type(value).__name__ in ("datetime64", "timedelta64"):
        return str(value)
    if value.dtype.kind in "mM":  # whose tolist() may be bare integers
        return list(value)
    return value.tolist()


def describe_texts(kinds: Mapping[str, str]) -> str:
    """Return a warning about columns, each with the type of its values that became texts."""
    columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    return f"this type is not kept, so functions get it as text in the column {columns}"


def _column(
    row: Mapping[str, Any],
    column: str | None,
    candidates: Sequence[str],
    *,
    what: str,
    where: str,
    required: bool = True,
) -> str | None:
    """Return the column that a row has of those that may hold prompt or answer.

    Args:
        row: the row.
        column: the column that the user has named; None: one of the candidates.
        candidates: the usual names, the first one wins.
        what: what the column holds, for the error.
        where: the row's location, for the error.
        required: whether a row without a candidate is an error.

    Raises:
        DataError: the row has no such column.
    """
    if column:
        require_column(row, column, what=what, where=where)
        return column
    name = usual_column(row, candidates)
    if name is not None:
        return name
    if not required:
        return None
    name = usual_column(row, CONVERSATION_COLUMNS)
    if what == "prompt" and name is not None:
        if _ends_before_answer(row[name]):
            return name
        raise DataError(
            f"{where}: the column {name} holds finished conversations, which preset=sft"
            " imitates as data.demonstrations; here a row needs a prompt (the messages before the"
            " reply, or the question) and a reference answer"
        )
    raise DataError(
        f"{where}: no {what}; expected a column {', '.join(candidates[:-1])} or {candidates[-1]},"
        f" columns here: {column_names(row)}; name yours with {{path: FILE, {what}: COLUMN}}"
    )


def usual_column(row: Mapping[str, Any], candidates: Sequence[str]) -> str | None:
    """Return the first of the candidates that a row has, as the row writes it; None without one.

    A name in other letters, such as `Question`, counts if no candidate is there letter by letter.
    """
    for name in candidates:
        if _lookup(row, name) is not _MISSING:
            return name
    written: dict[str, str] = {}
    for name in map(str, row):
        written.setdefault(name.casefold(), name)
    return next((written[name] for name in candidates if name in written), None)


def require_column(row: Mapping[str, Any], column: str, *, what: str, where: str) -> None:
    """Raise DataError if a row lacks the column that the user has named as `what`."""
    if _lookup(row, column) is _MISSING:
        raise DataError(
            f"{where}: no column {column}, which is named as {what}; columns here:"
            f" {column_names(row)}"
        )


def column_names(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns, for a message."""
    return ", ".join(map(str, row)) or "(none)"


def _lookup(row: Mapping[str, Any], column: str) -> object:
    """Return the value of a column, also of a nested one; _MISSING if the row has none.

    A column with nested ones may be the JSON text of an object.
    """
    if column in row:
        return row[column]
    head, dot, tail = column.partition(".")
    inner = row.get(head)
    if dot and isinstance(inner, str) and inner.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            inner = json.loads(inner)
    if not dot or not isinstance(inner, Mapping):
        return _MISSING
    return _lookup(inner, tail)


def column_value(row: Mapping[str, Any], column: str) -> object:
    """Return the value of a column, also of a nested one (`reward_model.ground_truth`), or None."""
    value = _lookup(row, column)
    return None if value is _MISSING else value


def as_prompt(value: object, where: str, *, may_begin_answer: bool = True) -> Prompt:
    """Return a text or messages as a prompt. A text that is JSON of messages is read as messages.

    Args:
        value: the text, or the messages.
        where: its location, for error messages.
        may_begin_answer: whether the last message may be the assistant's, which the model
            continues.

    Raises:
        DataError: the value cannot be a prompt.
    """
    require_filled(value, where, "expected the question as a string or messages")
    value = parsed_messages(value, where)
    if isinstance(value, str):
        return _encodable(value, where)
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} must be a string or a list of messages, got {shown(value)}")
    messages = []
    for number, item in enumerate(value, start=1):
        messages.append(as_message(item, f"{where}, message {number}"))
    if not any(content_text(message).strip() for message in messages):
        raise DataError(f"{where} is empty; expected at least one message with content")
    if messages[-1]["role"] == "assistant":
        _check_begun_answer(messages, where, may_begin_answer=may_begin_answer)
    return messages


def _check_begun_answer(messages: Sequence[Message], where: str, *, may_begin_answer: bool) -> None:
    """Raise DataError unless the model can continue the assistant's message at the end."""
    last = messages[-1]
    if not may_begin_answer:
        raise DataError(
            f"{where}: the last message is the assistant's, as in a finished conversation; a prompt"
            " here ends before the answer (preset=sft imitates whole conversations)"
        )
    if last.get("tool_calls") or not content_text(last):
        raise DataError(
            f"{where}: the last message is the assistant's, which the model is to continue: it"
            " needs a text, and no tool_calls; or remove it"
        )
    if len(messages) == 1:
        raise DataError(
            f"{where}: the only message is the assistant's; expected a question before it"
        )


def parsed_messages(value: object, where: str) -> object:
    """Return the messages of a text that is JSON of a list of messages; any other value as it is.

    Raises DataError for messages as Python prints them.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text.startswith("["):
        return value
    if text[1:].lstrip().startswith("{'") and "'role':" in text and "'content':" in text:
        raise DataError(
            f"{where} holds messages as Python prints them, which cannot be read; write .jsonl or"
            " .parquet, or messages as JSON"
        )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return value
    # a problem may begin with a bracket: other JSON is its text
    if isinstance(content, list) and content and all(map(_is_message, content)):
        return content
    return value


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    keys = value.keys()
    is_call = "role" in keys and bool(value.get("tool_calls"))
    return is_call or {"role", "content"} <= keys or {"from", "value"} <= keys


def _ends_before_answer(value: object) -> bool:
    """Return True if the value is a conversation whose last message is not the assistant's."""
    messages = parsed_messages(value, "")
    if not isinstance(messages, list | tuple) or not messages:
        return False
    last = messages[-1]
    return _is_message(last) and with_standard_keys(last)["role"] != "assistant"


def with_standard_keys(message: Any) -> Any:
    """Return a message of ShareGPT's form (`from`, `value`) with the keys `role` and `content`."""
    if not isinstance(message, Mapping) or not {"from", "value"} <= message.keys():
        return message
    role = message["from"]
    if isinstance(role, str):
        role = _ROLES_OF_SHAREGPT.get(role, role)
    return {"role": role, "content": message["value"]}


def as_message(value: object, where: str) -> Message:
    """Return the value as a message: `role`, `content`, and other keys for the chat template.

    A key without a value is left out, as tables fill up missing keys; `content` may be null beside
    `tool_calls`. Raises DataError.
    """
    is_sharegpt = isinstance(value, Mapping) and {"from", "value"} <= value.keys()
    value = with_standard_keys(value)
    if not isinstance(value, Mapping) or not _is_message(value):
        if isinstance(value, Mapping):
            keys = f"the keys {', '.join(map(str, value)) or '(none)'}"
        else:
            keys = shown(value)
        raise DataError(f"{where}: expected a mapping with role and content, got {keys}")
    message = {name: item for name, item in json_value(value, where).items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise DataError(f"{where}: role must be a string, got {shown(value['role'])}")
    # a chat template writes an unknown role as it is, and what it says would not be imitated
    if is_sharegpt and role not in _KNOWN_ROLES:
        raise DataError(
            f"{where}: from must be {', '.join(_ROLES_OF_SHAREGPT)} or one of"
            f" {', '.join(_KNOWN_ROLES)}, got {role}; rename it, and write a call of a tool as"
            " tool_calls of an assistant's message with role and content"
        )
    content = _content(message.get("content"), where, may_be_null=bool(message.get("tool_calls")))
    return {**message, "role": role, "content": content}


def _content(value: object, where: str, *, may_be_null: bool) -> str | list[dict[str, Any]] | None:
    """Return a message's content: a text, several parts of text, or None. Raises DataError."""
    if isinstance(value, str) or (value is None and may_be_null):
        return value
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: content must be a string or a list of parts of text, got {shown(value)}"
        )
    parts = [
        _part(part, f"{where}, part {number} of its content")
        for number, part in enumerate(value, start=1)
    ]
    return parts[0]["text"] if len(parts) == 1 else parts


def _part(value: object, where: str) -> dict[str, Any]:
    """Return a part of text. Raises DataError for another kind, such as an image."""
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("text"), str):
        what = shown(value)
        if isinstance(value, Mapping) and value.get("type") is not None:
            what = f"the type {value['type']}"
        raise DataError(
            f"{where}: models get text only; expected the type text with a text, got {what}"
        )
    return {name: item for name, item in value.items() if item is not None}


def with_arrow_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an Arrow row with what the chat template reads as before Arrow merged its keys.

    All mappings of a column get the same keys in Arrow, with null for those that they did not have.
    That concerns messages, schemas of tools, and variables.
    """
    columns = dict(row)
    for name, value in row.items():
        is_list = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
        if is_list and (name == "tools" or _is_message(value[0])):
            columns[name] = [_without_nulls(item) for item in value]
        elif name == TEMPLATE_KWARGS:
            columns[name] = _without_nulls(value)
    return columns


def _without_nulls(value: Any) -> Any:
    """Return the value without keys that are null; a message keeps its content."""
    if isinstance(value, Mapping):
        is_message = _is_message(value)
        items = {}
        for name, item in value.items():
            # a call of a tool may come without content, which templates ask for
            if item is not None or (is_message and name == "content"):
                items[name] = _without_nulls(item)
        return items
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value


def tool_schemas(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the column `tools` alone: schemas for the chat template, from a list or JSON text.

    Each schema of a list may be JSON text, too.

    Raises DataError for schemas as Python prints them.
    """
    tools = _parsed_schemas(row.get("tools"), where)
    if isinstance(tools, list | tuple):
        tools = [_parsed_schemas(tool, where) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return {}
    return {"tools": json_value(tools, f"{where}: tools")}


def _parsed_schemas(value: object, where: str) -> object:
    """Return what a text of JSON holds: a schema, or a list of them; any other value as it is.

    Raises DataError for schemas as Python prints them.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    if value.lstrip().removeprefix("[").lstrip().startswith("{'"):
        raise DataError(
            f"{where}: tools holds schemas as Python prints them, which cannot be read; write"
            " .jsonl or .parquet, or the schemas as JSON"
        )
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def number_text(value: object) -> str | None:
    """Return a number as text; None for any other value.

    3.0 becomes `3`, because gaps turn integers into floats.
    """
    if isinstance(value, float) and math.isfinite(value):
        written = repr(float(value))  # NumPy's would name its type
        # int(6.02e23) has other digits than those that were written
        return str(int(Decimal(written))) if value.is_integer() else written
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return str(value)
    return None


def _answer(value: object, where: str) -> str:
    """Return the answer as a string; a list of one text or number is that text or number."""
    if type(value).__module__ == "numpy":
        value = json_value(value, where)
    if isinstance(value, list | tuple) and len(value) == 1:
        (item,) = value
        if isinstance(item, str | int | float | Decimal) and not isinstance(item, bool):
            value = item
    require_filled(
        value, where, "every problem needs a reference answer: fill it in or drop the row"
    )
    if isinstance(value, str):
        return _encodable(value, where)
    number = number_text(value)
    if number is not None:
        return number
    advice = "write the reference answer as a string"
    if isinstance(value, Mapping):
        advice = (
            "name the part that is the answer with {path: FILE, answer: COLUMN.PART}; parts here:"
            f" {column_names(value)}"
        )
    if isinstance(value, bool):
        advice += " (a CSV column of true and false alone holds none: write yes and no, or .jsonl)"
    raise DataError(f"{where} must be a string or a number, got {shown(value)}; {advice}")


def _after_mark(text: str) -> str:
    """Return the answer behind the mark `####` of GSM8K's last line; without one the text."""
    last_line = text.rstrip().rpartition("\n")[2]
    final = last_line.removeprefix("####").strip()
    if not last_line.startswith("####") or not final:
        return text
    # a comma elsewhere separates coordinates or roots
    if _THOUSANDS.fullmatch(final):
        return final.replace(",", "")
    return final


def require_filled(value: object, where: str, advice: str) -> None:
    """Raise DataError for a value that is null, or a text of white space."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"{where} is null; {advice}")
    if isinstance(value, str) and not value.strip():
        raise DataError(f"{where} is empty; {advice}")


def _name(key: object, where: str) -> str:
    return _encodable(str(key), f"{where}: a column's name")


def _encodable(text: str, where: str) -> str:
    """Return `text`. Raise DataError for half of a surrogate pair, which no file accepts."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start + 1} is half of a surrogate pair"
            f" ({text[error.start]!r}), not text; write the text in UTF-8"
        ) from None
    return text


def shown(value: object) -> str:
    """Return the value with its type, for a message."""
    return f"{type(value).__name__} {shorten(repr(value), 60)}"
