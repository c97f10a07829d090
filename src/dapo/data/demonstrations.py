"""Reads demonstrations: prompts with the responses that supervised steps imitate (`schedule:
supervised`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from dapo.config.data_spec import Columns, Source
from dapo.core.errors import DataError
from dapo.core.text import plural
from dapo.data.problems import load_problems
from dapo.data.question_parts import SYSTEM_COLUMNS, describe_unshown_parts, unshown_parts
from dapo.data.sources.rows import (
    CONVERSATION_COLUMNS,
    PROMPT_COLUMNS,
    TEMPLATE_KWARGS,
    as_message,
    as_prompt,
    column_names,
    column_value,
    json_value,
    number_text,
    parsed_messages,
    problem_id,
    require_column,
    require_filled,
    shown,
    tool_schemas,
    usual_column,
    with_standard_keys,
)
from dapo.types import Message, Problem, Prompt, content_text

RESPONSE_COLUMNS = ("response", "completion", "output")
THOUGHT_COLUMN = "reasoning_content"
"""The column with the thought before a response, by its name in messages."""
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
LABEL = "label"
ALPACA = "instruction"
"""The column of the question in Alpaca's form."""
_ALPACA_PARTS = ("input", "context")
"""The columns with the rest of the question in Alpaca's form, the second as Dolly has it."""
TURNS = "turns"
"""The field of a demonstration with several turns: the messages behind its prompt."""


def turns_of(demonstration: Problem) -> Sequence[Message]:
    """Return the messages behind the prompt, of which the assistant's are imitated."""
    turns: Sequence[Message] | None = demonstration.fields.get(TURNS)
    return turns or ({"role": "assistant", "content": demonstration.answer},)


def load_demonstrations(source: Source) -> tuple[list[Problem], list[str]]:
    """Return all demonstrations of a data source, and warnings about what is not read of it.

    Raises DataError as `load_problems` does.
    """
    unread = Counter[str]()
    warnings: list[str] = []
    demonstrations = load_problems(
        source, convert=partial(demonstration_from_row, unread=unread), warnings=warnings
    )
    warnings += describe_unshown_parts(unread, len(demonstrations))
    return demonstrations, [f"data.demonstrations: {line}" for line in warnings]


def demonstration_from_row(
    row: Mapping[str, Any] | DataError,
    *,
    where: str,
    source: str,
    columns: Columns,
    require_answer: bool = True,
    unread: Counter[str] | None = None,
) -> Problem:
    """Convert one row to a problem whose `answer` is the response to imitate. Raises DataError.

    A row has a prompt (a text or messages) and a response (a text or messages), in the columns
    `prompt` and `response` or `completion`, or those that `columns` names; or a whole conversation
    in the column `messages`, or in the one that `columns` names as the prompt. The messages up to
    the first of the assistant are the prompt. A demonstration of several turns has them all in the
    field `turns`, and the last one as its answer; so does one whose turn has further keys, such as
    `tool_calls`. A text in the column `system` or `system_prompt` is the prompt's first message,
    unless it has a system message. Alpaca's `instruction` is a prompt together with `input` or
    Dolly's `context`, and `history` has the turns before a text. Other columns but `tools` and
    `chat_template_kwargs`, which the chat template reads, are left out. A row whose `label` is
    false, as KTO marks unwanted responses, is an error. `unread` counts the columns with a part of
    the question that the prompt does not show.
    """
    if isinstance(row, DataError):
        raise row
    _require_text_alone(row, where)
    _require_wanted(row, where)
    conversation = usual_column(_filled(row), CONVERSATION_COLUMNS)
    response = _response_column(row, columns, where)
    if response is not None:
        prompt, turns = _columns_of(row, response, columns, where)
        if conversation is not None and not (columns.prompt or columns.answer):
            _require_no_more_turns(row[conversation], prompt, turns, f"{where}: {conversation}")
    elif conversation is not None and columns.prompt is None:
        prompt, turns = _conversation_of(row[conversation], f"{where}: {conversation}")
    elif columns.prompt is not None and _are_messages(column_value(row, columns.prompt)):
        messages = column_value(row, columns.prompt)
        prompt, turns = _conversation_of(messages, f"{where}: {columns.prompt}")
    else:
        raise DataError(
            f"{where}: no demonstration; expected the columns prompt and"
            f" {' or '.join(RESPONSE_COLUMNS)}, or {' or '.join(CONVERSATION_COLUMNS)} alone,"
            f" columns here: {column_names(row)}; name yours with {{path: FILE, prompt: COLUMN,"
            " answer: COLUMN}, and one of whole conversations with {path: FILE, prompt: COLUMN}"
        )
    turns = _cleaned(turns, columns, where)
    for name in SYSTEM_COLUMNS:
        prompt = _with_system(prompt, row.get(name), f"{where}: {name}")
    if unread is not None:
        unread.update(unshown_parts(row, prompt))
    while turns[-1]["role"] != "assistant":  # nothing answers the last messages
        turns = turns[:-1]
    answer = content_text(turns[-1])
    fields = tool_schemas(row, where)
    variables = row.get(TEMPLATE_KWARGS)
    if isinstance(variables, Mapping):
        fields[TEMPLATE_KWARGS] = json_value(variables, f"{where}: {TEMPLATE_KWARGS}")
    if len(turns) == 1 and turns[0].keys() == {"role", "content"}:
        return Problem(
            problem_id(prompt, answer, fields.get("tools")), prompt, answer, source, fields
        )
    key = problem_id(prompt, repr(turns), fields.get("tools"))
    return Problem(key, prompt, answer, source, {**fields, TURNS: turns})


def _columns_of(
    row: Mapping[str, Any], response: str, columns: Columns, where: str
) -> tuple[Prompt, list[Message]]:
    """Return the prompt and the turns of a row with a column `response`."""
    name = _prompt_column(row, response, columns, where)
    if name == ALPACA:
        prompt = _alpaca_prompt(row, where)
    else:
        prompt = as_prompt(column_value(row, name), f"{where}: {name}", may_begin_answer=False)
    prompt = _with_history(prompt, row.get("history"), f"{where}: history")
    turns = _turns(column_value(row, response), f"{where}: {response}")
    return prompt, _with_thought(turns, row.get(THOUGHT_COLUMN))


def _with_thought(turns: list[Message], thought: object) -> list[Message]:
    """Return a response of one turn with the thought of a column, unless the turn has a thought."""
    if not isinstance(thought, str) or not thought.strip() or len(turns) != 1:
        return turns
    (turn,) = turns
    if turn.get(THOUGHT_COLUMN) or thought.strip() in content_text(turn):
        return turns
    return [{**turn, THOUGHT_COLUMN: thought}]


def _require_no_more_turns(
    conversation: object, prompt: Prompt, turns: Sequence[Message], where: str
) -> None:
    """Raise DataError if a conversation has more answers than the columns of the same row."""
    in_columns = list(turns)
    if not isinstance(prompt, str):
        in_columns += prompt
    messages = parsed_messages(conversation, where)
    if not isinstance(messages, list | tuple):
        return
    num_more = _num_answers(map(with_standard_keys, messages)) - _num_answers(in_columns)
    if num_more > 0:
        raise DataError(
            f"{where} has {plural(num_more, 'answer')} more than the columns of the prompt and the"
            " response; drop these columns to imitate the conversation, or name them with {path:"
            " FILE, prompt: COLUMN, answer: COLUMN}"
        )


def _num_answers(messages: Iterable[object]) -> int:
    """Return the number of messages of the assistant."""
    return sum(
        isinstance(message, Mapping) and message.get("role") == "assistant" for message in messages
    )


def _prompt_column(row: Mapping[str, Any], response: str, columns: Columns, where: str) -> str:
    """Return the column of the prompt beside a column `response`. Raises DataError."""
    if columns.prompt is not None:
        require_column(row, columns.prompt, what="prompt", where=where)
        return columns.prompt
    names = (*PROMPT_COLUMNS, ALPACA)
    filled = [name for name in names if row.get(name) is not None]
    if not filled:
        filled = [name for name in (usual_column(_filled(row), names),) if name is not None]
    # the prompt of a row may hold the instruction with the response, or need it before the question
    if ALPACA in filled:
        if any(row[name] != row[ALPACA] for name in filled):
            raise DataError(
                f"{where}: {' and '.join(filled)} differ, and each may be the prompt; name the one"
                " that is with {path: FILE, prompt: COLUMN}"
            )
        return ALPACA
    if filled:
        return filled[0]
    raise DataError(
        f"{where}: no prompt beside {response}; expected a column {' or '.join(names)}, columns"
        f" here: {column_names(row)}; name yours with {{path: FILE, prompt: COLUMN}}"
    )


def _response_column(row: Mapping[str, Any], columns: Columns, where: str) -> str | None:
    """Return the column of the response; None if a row has none of those with the usual names.

    Raises DataError if it lacks the one that the user has named.
    """
    if columns.answer is not None:
        require_column(row, columns.answer, what="answer", where=where)
        return columns.answer
    return usual_column(_filled(row), RESPONSE_COLUMNS)


def _filled(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns that have a value in a row."""
    return {name: value for name, value in row.items() if value is not None}


def _cleaned(turns: Sequence[Message], columns: Columns, where: str) -> list[Message]:
    """Return the turns, the assistant's without what `remove` matches. Raises DataError."""
    if columns.remove is None:
        return list(turns)
    cleaned_turns: list[Message] = []
    for turn in turns:
        content = turn.get("content")
        if turn["role"] != "assistant" or content is None:
            cleaned_turns.append(turn)
            continue
        cleaned_content: str | list[dict[str, Any]]
        if isinstance(content, str):
            cleaned_content = columns.cleaned(content)
        else:
            cleaned_content = [{**part, "text": columns.cleaned(part["text"])} for part in content]
        cleaned_turn: Message = {**turn, "content": cleaned_content}
        if not turn.get("tool_calls"):
            require_filled(
                content_text(cleaned_turn),
                f"{where}: a response",
                "the pattern of remove deletes all of it: narrow it",
            )
        cleaned_turns.append(cleaned_turn)
    return cleaned_turns


def _conversation_of(value: object, where: str) -> tuple[Prompt, list[Message]]:
    """Return the messages before the assistant's first one, and the rest."""
    messages = _messages(value, where)
    first = next(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"),
        len(messages),
    )
    if first == 0:
        raise DataError(
            f"{where} starts with an assistant message; a demonstration has a prompt and a response"
        )
    if first == len(messages):
        raise DataError(
            f"{where} has no assistant message; a demonstration has a prompt and a response"
        )
    turns = messages[first:]
    _require_turns(turns, where)
    return messages[:first], turns


def _with_system(prompt: Prompt, value: object, where: str) -> Prompt:
    """Return the prompt with the text of the column `system` as its first message.

    A prompt that has a system message keeps its own.
    """
    if not isinstance(value, str) or not value.strip():
        return prompt
    messages: list[Message] = []
    if isinstance(prompt, str):
        messages.append(as_message({"role": "user", "content": prompt}, where))
    else:
        messages += prompt
    if any(message["role"] == "system" for message in messages):
        return prompt
    return [as_message({"role": "system", "content": value}, where), *messages]


def _require_text_alone(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row with images, videos or recordings, which no model here gets."""
    for name in _MEDIA:
        value = row.get(name)
        # a text is perhaps the name of a container's image
        if value is None or isinstance(value, str | bool | int | float):
            continue
        if isinstance(value, Mapping | list | tuple) and not value:
            continue
        raise DataError(
            f"{where}: the column {name} holds {type(value).__name__}, as images and recordings"
            " are held; models get text only: leave the row out, or drop the column where its"
            " question needs none"
        )


def _require_wanted(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row whose response is marked as unwanted, as KTO's rows mark it."""
    # a class number or a text in this column says nothing about the response
    if row.get(LABEL) is False:
        raise DataError(
            f"{where}: {LABEL} is false, as KTO marks an unwanted response, and demonstrations are"
            f" imitated: leave the row out, or drop the column {LABEL} where it means something"
            " else"
        )


def _alpaca_prompt(row: Mapping[str, Any], where: str) -> Prompt:
    """Return the question of a row of Alpaca's form, whose parts stand on lines of their own."""
    question = column_value(row, ALPACA)
    if not isinstance(question, str):
        return as_prompt(question, f"{where}: {ALPACA}")
    lines = [question]
    for name in _ALPACA_PARTS:
        value = row.get(name)
        # a CSV column of numbers alone holds numbers
        text = number_text(value) or value or ""
        if not isinstance(text, str):
            raise DataError(
                f"{where}: {name} goes on with the {ALPACA}, so it must be a text, got"
                f" {shown(value)}; write it as text, or drop the column"
            )
        if text.strip():
            lines.append(text)
    return as_prompt("\n".join(lines), f"{where}: {ALPACA}")


def _with_history(prompt: Prompt, history: object, where: str) -> Prompt:
    """Return the prompt behind earlier questions and answers in pairs, which become messages.

    Raises DataError. A prompt of messages has its own history.
    """
    if not history or not isinstance(prompt, str):
        return prompt
    if not isinstance(history, list | tuple):
        raise DataError(f"{where} must be a list of pairs, got {shown(history)}")
    messages: list[Message] = []
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(
                f"{where} must hold pairs of a question and an answer, got {shown(pair)}"
            )
        for role, content in zip(("user", "assistant"), pair, strict=True):
            messages.append(as_message({"role": role, "content": content}, where))
    return [*messages, as_message({"role": "user", "content": prompt}, where)]


def _turns(value: object, where: str) -> list[Message]:
    """Return the messages of a response that is a text or a list of messages, also as JSON text."""
    require_filled(value, where, "a demonstration needs a response: fill it in or drop the row")
    # a CSV column of numbers alone holds numbers
    value = number_text(value) or parsed_messages(value, where)
    if not isinstance(value, str):
        turns = _messages(value, where)
        if all(message["role"] != "assistant" for message in turns):
            raise DataError(f"{where} has no assistant message, which is the response to imitate")
        _require_turns(turns, where)
        return turns
    return [as_message({"role": "assistant", "content": value}, where)]


def _require_turns(messages: Sequence[Message], where: str) -> None:
    """Raise DataError if turns do not begin with the assistant's, or two of these are in a row."""
    roles = [message["role"] for message in messages]
    if roles[0] != "assistant":
        raise DataError(
            f"{where}: the first message has the role {roles[0]}; a response starts with the"
            " assistant's, and earlier messages belong in the prompt (a column of whole"
            " conversations is named as prompt, without an answer)"
        )
    if ("assistant", "assistant") in pairwise(roles):
        raise DataError(f"{where}: two assistant messages follow each other; join them")


def _are_messages(value: object) -> bool:
    """Return True for a list of messages, also as JSON text."""
    return isinstance(parsed_messages(value, ""), list | tuple)


def _messages(value: object, where: str) -> list[Message]:
    """Messages in which each of the assistant has a text."""
    value = parsed_messages(value, where)
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"{where} must be a list of messages, got {shown(value)}")
    messages = [
        as_message(message, f"{where}, message {number}")
        for number, message in enumerate(value, start=1)
    ]
    for number, message in enumerate(messages, start=1):
        says_nothing = not content_text(message).strip() and not message.get("tool_calls")
        if message["role"] == "assistant" and says_nothing:
            raise DataError(
                f"{where}, message {number}: the assistant's content is empty; write a call into"
                " the content, in the form that the model uses"
            )
        if message["role"] == "assistant" and _is_not_imitated(value[number - 1]):
            raise DataError(
                f"{where}, message {number}: weight 0 or train false says that this turn is not"
                " imitated, but all turns of the assistant are; end the conversation before it, or"
                " remove the key to imitate it"
            )
    return messages


def _is_not_imitated(message: Mapping[str, Any]) -> bool:
    """Return True for a turn that OpenAI's `weight`, or Axolotl's `train`, leaves out."""
    return message.get("weight") == 0 or message.get("train") is False
