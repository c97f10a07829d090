"""The calls of an agent's episode in a table of responses, each with its tokens. Imports no torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo.types import Episode

Row = Mapping[str, Any]


def calls_of(row: Row, episode: Episode) -> list[dict[str, Any]]:
    """Return the calls of a response's episode in the order in which they were served.

    Numbers of calls and turns begin with 1, those of branches too; 0 is the first conversation.
    """
    tokens = dict(_tokens_by_call(row, episode))
    return [_call(record, tokens[record["number"]]) for record in episode.calls]


def conversations_of(row: Row) -> list[dict[str, Any]]:
    """Return the tokens of a response and of its branches, as `prompt_ids`, `token_ids`, `logprobs`."""
    stored: dict[str, Any] = {"prompt_ids": None, "branches": []}
    if row.get("branches") is not None:
        stored = json.loads(row["branches"])
    first = {
        "prompt_ids": stored["prompt_ids"],
        "token_ids": list(row["response_ids"]),
        "logprobs": list(row["engine_logprobs"]) or None,
    }
    return [first, *stored["branches"]]


def _call(record: Mapping[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as it is shown, from its stored record and its tokens."""
    messages = [{"role": "text", "text": record["prompt"]}]
    if record["prompt"] is None:
        messages = [
            {"role": str(message.get("role")), "text": _text(message)}
            for message in record["messages"]
        ]
    parent = record["parent"]
    masked = None
    if not record["trains"]:
        masked = "no reward refers to it" if record["is_read"] else "the agent did not read it"
    return {
        "number": record["number"] + 1,
        "parent": None if parent is None else parent + 1,
        "branch": record["conversation"],
        "turn": record["turn"] + 1,
        "reason": record["branch_reason"],
        "messages": messages,
        "text": record["text"],
        "tool_calls": _tool_calls(record["answer"]),
        "options": _options(record["options"]),
        "sampled_tokens": record["tokens"],
        "observed_tokens": record["new_tokens"],
        "finish": record["finish"],
        "retries": record["retries"],
        "masked": masked,
        **tokens,
    }


def _tokens_by_call(row: Row, episode: Episode) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each call and its tokens.

    A conversation is stored in one part, or in two if its last calls do not train: a part holds the
    tokens of its calls, and between two of them those that the policy read.
    """
    parts = iter(conversations_of(row))
    for records in _parts_of(episode):
        part = next(parts)
        ids = part["token_ids"]
        logprobs = part["logprobs"]
        end = 0  # of the tokens of the call before
        for record in records:
            num_new_tokens = record["new_tokens"]
            if record is records[0]:
                prompt_ids = part["prompt_ids"] or []
                context = prompt_ids[-num_new_tokens:]
                start = 0
            else:
                start = end + num_new_tokens
                context = ids[end:start]
            end = start + record["tokens"]
            tokens = {
                "context_ids": list(context),
                "token_ids": list(ids[start:end]),
                "logprobs": None if logprobs is None else list(logprobs[start:end]),
            }
            yield record["number"], tokens


def _parts_of(episode: Episode) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the calls of each stored part, as `CallTree.generations` writes them."""
    by_conversation: dict[int, list[Mapping[str, Any]]] = {}
    for record in episode.calls:
        by_conversation.setdefault(record["conversation"], []).append(record)
    for number in sorted(by_conversation):
        records = by_conversation[number]
        length = len(records)
        while length and not records[length - 1]["trains"]:
            length -= 1
        for part in (records[:length], records[length:]):
            if part:
                yield part


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request, with the names of its tools in place of their schemas."""
    shown = dict(options)
    if "tools" in shown:
        functions = [tool.get("function", tool) for tool in shown["tools"]]
        shown["tools"] = [str(function.get("name")) for function in functions]
    return shown


def _text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its tool calls."""
    parts = [message.get("content"), *_tool_calls(message)]
    return "\n".join(part for part in parts if part)


def _tool_calls(message: Mapping[str, Any]) -> list[str]:
    """Return the tool calls of a message as `name(argument=value)`."""
    texts = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        texts.append(f"{function['name']}({_arguments(function['arguments'])})")
    return texts


def _arguments(arguments: Any) -> str:
    """Return the arguments of a tool call, which a model may have written as any value."""
    if not isinstance(arguments, Mapping):
        return str(arguments)
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
