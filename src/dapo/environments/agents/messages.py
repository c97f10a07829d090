"""What an agent asks for, in the form that all dialects of the endpoint share."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from dapo.environments.rendering import without_surrogates
from dapo.types import Message


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent for one or more answers of the policy.

    Example: `AgentRequest(messages=({"role": "user", "content": "2 + 3 ="},))`.
    """

    messages: tuple[Message, ...] = ()
    """The chat, in the form of `comparable`; empty with `prompt`."""
    prompt: str | None = None
    """The text to continue, without a chat template; None: `messages` are the prompt."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the answer may call."""
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or the name of a tool."""
    max_tokens: int | None = None
    """Largest number of tokens of an answer; None: what is left of the episode."""
    samples: int = 1
    """The number of answers (`n`)."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, which does not contain them."""
    seed: int | None = None
    """Makes a deliberate second sample of equal messages differ from the first."""
    temperature: float | None = None
    top_p: float | None = None
    foreign: tuple[str, ...] = ()
    """Further fields that would make the answer's distribution another than the policy's."""
    is_retry: bool = field(default=False, compare=False)
    """Whether the client says that it repeats a request which it sent before."""
    idempotency_key: str | None = field(default=None, compare=False)
    """The client's own name of the request: a repetition has the same one, another has another."""
    model: str | None = field(default=None, compare=False)
    """The model that the client names; an agent's is the policy, whatever the name."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Variables of the chat template, which a served model reads."""

    @cached_property
    def key(self) -> str:
        """A digest of everything that an answer depends on: equal requests have equal keys."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def text(self) -> str:
        """The request as JSON, by which concurrent requests are ordered."""
        values = {
            "messages": self.messages,
            "prompt": self.prompt,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "max_tokens": self.max_tokens,
            "samples": self.samples,
            "stop": self.stop,
            "seed": self.seed,
        }
        return to_json(values)

    def without_messages(self) -> "AgentRequest":
        """Return the request without what a call stores beside it."""
        return replace(self, messages=(), prompt=None, template_kwargs={}, idempotency_key=None)

    def options_json(self) -> dict[str, Any]:
        """Return the options of the request as JSON values, without those that have the default."""
        values: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _OPTIONS and value != item.default:
                values[item.name] = value
        return values

    @classmethod
    def of_options(cls, values: Mapping[str, Any]) -> "AgentRequest":
        """Return the request whose `options_json` these are."""
        return cls(**{name: _as_tuple(value) for name, value in values.items()})


_OPTIONS = ("tools", "tool_choice", "max_tokens", "samples", "stop", "seed")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def to_json(value: Any) -> str:
    """Return JSON with sorted keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def depth_of(value: Any) -> int:
    """Return how deep lists and mappings of JSON values are nested: 0 for a number or a text."""
    depth = 0
    level = [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        level = inner
        depth += 1
    return depth - 1


def comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat template reads of a message.

    Clients send an answer back with further keys, with null for absent ones, or with its text as a
    list of parts: none of this makes it another message. The arguments of tool calls are parsed,
    because clients write JSON with other white space.
    """
    result: dict[str, Any] = {
        "role": str(message.get("role")),
        "content": text_of(message.get("content")),
    }
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and "<think>" not in result["content"]:
        # clients that read a thought out of an answer send it back beside the text
        result["content"] = f"<think>\n{thought}\n</think>\n\n{result['content']}"
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or result["role"] != "assistant":
            raise ValueError("tool_calls is to be a list in an assistant's message")
        result["tool_calls"] = [_comparable_call(call) for call in calls]
    if result["role"] == "tool" and message.get("tool_call_id") is not None:
        result["tool_call_id"] = str(message["tool_call_id"])
    if message.get("name"):
        result["name"] = str(message["name"])
    return result


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, parts of text, or null.

    Halves of characters, which no tokenizer encodes, are replaced.

    Raises ValueError for a part that is not text, such as a picture.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return without_surrogates(content)
    if not isinstance(content, Sequence):
        raise ValueError(f"content is {type(content).__name__}, expected a text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, Mapping) and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"content has a part of type {kind!r}; only text can be read")
    return without_surrogates("\n".join(texts))


def same_text(message: Mapping[str, Any]) -> str:
    """Return what a message says as JSON: messages that say the same have equal ones.

    Of an answer, neither white space around it and its thought, nor attributes of the thought's
    tag, nor the ids of its tool calls count, and 2.0 is the argument 2: clients change these. A
    tool's answer follows its call, whatever id names that.
    """
    if message["role"] == "tool":
        return to_json({name: value for name, value in message.items() if name != "tool_call_id"})
    if message["role"] != "assistant":
        return to_json(message)
    content = _THOUGHT_TAG.sub(r"<\1think>", message["content"]).strip()
    return to_json(["assistant", content, _calls_of(message)])


_THOUGHT_TAG = re.compile(r"\s*<(/?)think(?:\s[^<>]*)?>\s*")


def _calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], _with_integers(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


def _with_integers(value: Any) -> Any:
    """Return JSON values with whole numbers as integers, as JavaScript writes them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_integers(item) for item in value]
    return value


def _comparable_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no function with a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":  # clients write a call without arguments so, too
        arguments = {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # the model's own text, which is no JSON
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
