"""Columns that many data sets have beside the prompt, with parts of what is asked."""

from collections.abc import Iterator, Mapping
from typing import Any

from dapo.core.text import one_line
from dapo.types import Prompt, content_text

SYSTEM_COLUMNS = ("system", "system_prompt")
"""The columns with the text of a system message that is not among the messages."""
_QUESTION_PARTS = (*SYSTEM_COLUMNS, "context", "passage", "body", "input", "starter_code")
_COMPARED_CHARS = 200


def unshown_parts(row: Mapping[str, Any], prompt: Prompt) -> list[str]:
    """Return the columns of a row with a part of the question that its prompt does not show."""
    parts = {}
    for column, value in row.items():
        if str(column).casefold() not in _QUESTION_PARTS:
            continue
        text = max(_texts_in(value), key=len, default="")
        part = one_line(text[:_COMPARED_CHARS]).casefold()
        if part:
            parts[column] = part
    if not parts:
        return []
    if not isinstance(prompt, str):
        prompt = "\n".join(content_text(message) for message in prompt)
    shown_text = one_line(prompt).casefold()
    return [column for column, part in parts.items() if part not in shown_text]


def describe_unshown_parts(counts: Mapping[str, int], num_rows: int) -> Iterator[str]:
    """Yield a warning for each column, of which so many of the rows have an unshown part."""
    for column, count in counts.items():
        advice = "write it into the prompt where the question needs it"
        if column in SYSTEM_COLUMNS:
            advice = "write it into the prompt as a message with the role system"
        yield (
            f"{count:,} of {num_rows:,} rows have a text in the column {column} that their prompts"
            f" do not show, so the model is asked without it; {advice}"
        )


def _texts_in(value: Any) -> Iterator[str]:
    """Yield a text, or all texts within lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)
