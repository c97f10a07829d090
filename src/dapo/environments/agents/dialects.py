"""The dialects of the endpoint: OpenAI's chat, completions and responses, and Anthropic's messages.

Each reads a client's JSON into an `AgentRequest`, and writes answers in the form that its SDK reads,
whole or as the events of a stream. Sources: the API references of OpenAI and Anthropic, and vLLM's
names for token ids (`prompt_token_ids`, `token_ids`).
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dapo.core.text import quoted
from dapo.environments.agents.messages import AgentRequest, comparable, text_of
from dapo.environments.agents.session import AgentAnswer, AgentError
from dapo.environments.agents.streaming import (
    ChatEvents,
    CompletionEvents,
    Events,
    MessageEvents,
    ResponseEvents,
)

MAX_SAMPLES = 64
"""The most answers of one request."""
_MAX_STOPS = 16


class Dialect(Protocol):
    """Reads requests and writes answers of one API."""

    path: str
    """The path behind `/v1/`."""

    def read(self, body: Mapping[str, Any]) -> AgentRequest:
        """Return the request. Raises AgentError or ValueError."""

    def write(self, body: Mapping[str, Any], answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        """Return the whole answer as JSON values."""

    def stream(self, body: Mapping[str, Any]) -> Events:
        """Return the writer of a request's events."""

    def error(self, error: AgentError) -> dict[str, Any]:
        """Return an error as JSON values."""


@dataclass(frozen=True)
class _Fields:
    """A client's JSON object, whose fields are read with their type."""

    body: Mapping[str, Any]

    def optional(self, name: str, *types: type) -> Any:
        """Return a field, or None. Raises ValueError if it has another type."""
        value = self.body.get(name)
        if value is None:
            return None
        # True is an int
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"{name} is {type(value).__name__}, expected {expected}")
        return value

    def required(self, name: str, *types: type) -> Any:
        value = self.optional(name, *types)
        if value is None:
            raise ValueError(f"{name} is missing")
        return value

    def count(self, *names: str, at_least: int = 1, at_most: int = 2**31) -> int | None:
        """Return the first of the fields that is set."""
        for name in names:
            value = self.optional(name, int)
            if value is not None:
                if not at_least <= value <= at_most:
                    raise ValueError(f"{name} is {value}, expected {at_least} to {at_most}")
                return int(value)
        return None

    def number(self, name: str) -> float | None:
        value = self.optional(name, int, float)
        return None if value is None else float(value)

    def stops(self, name: str) -> tuple[str, ...]:
        value = self.optional(name, str, list)
        stops = [value] if isinstance(value, str) else list(value or ())
        if len(stops) > _MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"{name} is to be a text or at most {_MAX_STOPS} texts")
        return tuple(stop for stop in stops if stop)

    def foreign(self, read: Collection[str], neutral: Mapping[str, Any]) -> list[str]:
        """Return the names of the fields that are set, and not read here: nothing is dropped.

        Args:
            read: The fields that are read, and those that do not concern the answer.
            neutral: The value of each further field with which nothing changes.
        """
        names = []
        for name, value in self.body.items():
            neutral_value = neutral.get(name)
            # what is on without being asked for is switched off by False
            is_switched_off = neutral_value is True and value is False
            is_neutral = value in (None, False, 0, "", [], {}, neutral_value)
            if name not in read and (is_switched_off or not is_neutral):
                names.append(name)
        return names

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise ValueError, with the reason, if one of these fields is set."""
        for name, reason in reasons.items():
            if self.body.get(name) not in (None, False, 0, "", [], {}):
                raise ValueError(f"{name} is set, and {reason}")

    def check_stream(self) -> None:
        """Raise ValueError if the options of a stream have another type."""
        self.optional("stream", bool)
        self.optional("stream_options", dict)


_SAMPLING = ("model", "stream", "stream_options", "temperature", "top_p")
_ABOUT_THE_CLIENT = (
    "metadata",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that do not concern the answer."""
_TEXT_FIELDS = (
    *_SAMPLING,
    *_ABOUT_THE_CLIENT,
    "chat_template_kwargs",  # the session reads both
    "enable_thinking",
    "echo",
    "logprobs",
    "max_tokens",
    "n",
    "prompt",
    "return_token_ids",
    "seed",
    "stop",
)
_CHAT_FIELDS = (
    *_TEXT_FIELDS,
    "max_completion_tokens",
    "messages",
    "parallel_tool_calls",
    "prediction",
    "response_format",
    "tool_choice",
    "tools",
)
_RESPONSE_FIELDS = (
    *_SAMPLING,
    *_ABOUT_THE_CLIENT,
    "chat_template_kwargs",
    "enable_thinking",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "truncation",
)
_MESSAGE_FIELDS = (
    *_SAMPLING,
    *_ABOUT_THE_CLIENT,
    "betas",
    "cache_control",
    "chat_template_kwargs",
    "diagnostics",
    "enable_thinking",
    "inference_geo",
    "max_tokens",
    "messages",
    "stop_sequences",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)
_NEUTRAL: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "include_reasoning": True,
    "length_penalty": 1,
    "modalities": ["text"],
    "reasoning_effort": "none",
    "repetition_penalty": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "top_k": -1,
    "verbosity": "medium",
}
"""The values of further fields, of OpenAI's API and of vLLM's, with which nothing changes."""
_UNKNOWN: Mapping[str, str] = {
    "functions": "it is the old form of tools; use tools",
    "function_call": "it is the old form of tool_choice; use tool_choice",
    "audio": "answers are text",
    "web_search_options": "the endpoint searches nothing; give the policy a tool",
    "top_logprobs": "only the log-probability of the sampled token is known; set logprobs alone",
    "prompt_logprobs": "only the log-probabilities of sampled tokens are known",
    "continue_final_message": "an answer is a whole turn; use /v1/completions to continue a text",
    "stop_token_ids": "a turn ends with the model's own tokens; use stop",
}
"""Fields that an answer would have to follow, and does not."""


class Chat:
    """`POST /v1/chat/completions`."""

    path = "chat/completions"

    def read(self, body: Mapping[str, Any]) -> AgentRequest:
        fields = _Fields(body)
        fields.check_stream()
        fields.refuse(_UNKNOWN)
        messages = fields.required("messages", list)
        foreign = fields.foreign(_CHAT_FIELDS, _NEUTRAL)
        if body.get("parallel_tool_calls") is False:
            foreign.append("parallel_tool_calls")
        response_format = fields.optional("response_format", dict)
        if response_format is not None and response_format.get("type", "text") != "text":
            foreign.append("response_format")
        choice = _tool_choice(body.get("tool_choice"))
        if choice not in ("auto", "none"):
            foreign.append("tool_choice")
        return AgentRequest(
            messages=_messages(messages),
            tools=_tools(fields.optional("tools", list) or []),
            tool_choice=choice,
            max_tokens=fields.count("max_completion_tokens", "max_tokens"),
            samples=fields.count("n", at_most=MAX_SAMPLES) or 1,
            stop=fields.stops("stop"),
            seed=fields.optional("seed", int),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            foreign=tuple(foreign),
        )

    def write(self, body: Mapping[str, Any], answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            message = _chat_message(answer)
            choice = {
                "index": index,
                "message": message,
                "finish_reason": answer.finish_reason,
                "logprobs": _chat_logprobs(answer) if body.get("logprobs") else None,
                "token_ids": list(answer.token_ids),
            }
            choices.append(choice)
        return {
            **_head(body, answers, "chat.completion"),
            "choices": choices,
            "usage": _usage(answers),
            "prompt_token_ids": list(answers[0].prompt_ids),
        }

    def stream(self, body: Mapping[str, Any]) -> Events:
        return ChatEvents(body)

    def error(self, error: AgentError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


class Completions(Chat):
    """`POST /v1/completions`: the continuation of a text, without a chat template."""

    path = "completions"

    def read(self, body: Mapping[str, Any]) -> AgentRequest:
        fields = _Fields(body)
        fields.check_stream()
        fields.refuse({**_UNKNOWN, "suffix": "a text is continued at its end alone"})
        num_logprobs = fields.count("logprobs", at_least=0, at_most=1)
        if num_logprobs is not None and body.get("echo"):
            raise ValueError(
                "echo and logprobs are set, and a prompt's tokens have no logprobs here"
            )
        prompt = fields.required("prompt", str, list)
        if isinstance(prompt, list):
            if len(prompt) != 1 or not isinstance(prompt[0], str):
                raise ValueError("prompt is a list, expected one text; send a request for each")
            prompt = prompt[0]
        return AgentRequest(
            prompt=text_of(prompt),
            max_tokens=fields.count("max_tokens"),
            samples=fields.count("n", at_most=MAX_SAMPLES) or 1,
            stop=fields.stops("stop"),
            seed=fields.optional("seed", int),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            foreign=tuple(fields.foreign(_TEXT_FIELDS, _NEUTRAL)),
        )

    def write(self, body: Mapping[str, Any], answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            echo = text_of(body.get("prompt")) if body.get("echo") else ""
            logprobs = _text_logprobs(answer) if body.get("logprobs") is not None else None
            choice = {
                "index": index,
                "text": echo + answer.text,
                "finish_reason": answer.finish_reason,
                "logprobs": logprobs,
                "token_ids": list(answer.token_ids),
                "prompt_token_ids": list(answer.prompt_ids),
            }
            choices.append(choice)
        return {
            **_head(body, answers, "text_completion"),
            "choices": choices,
            "usage": _usage(answers),
        }

    def stream(self, body: Mapping[str, Any]) -> Events:
        return CompletionEvents(body)


_STORED: Mapping[str, str] = {
    "previous_response_id": "no response is stored here; send the whole input",
    "conversation": "no conversation is stored here; send the whole input",
    "prompt": "no prompt is stored here; send its text as instructions or input",
    "background": "no response is stored here; wait for the answer",
    "top_logprobs": _UNKNOWN["top_logprobs"].replace("set logprobs alone", "include them alone"),
}
"""Fields of responses that refer to what OpenAI stores."""


class Responses(Chat):
    """`POST /v1/responses`: the input is a text or a list of items; nothing is stored here."""

    path = "responses"

    def read(self, body: Mapping[str, Any]) -> AgentRequest:
        fields = _Fields(body)
        fields.check_stream()
        fields.refuse(_STORED)
        messages = []
        instructions = fields.optional("instructions", str)
        if instructions:
            messages.append({"role": "system", "content": instructions})
        messages += _items(fields.required("input", str, list))
        text = fields.optional("text", dict) or {}
        text_format = _Fields(text).optional("format", dict) or {}
        reasoning = fields.optional("reasoning", dict) or {}
        choice = _tool_choice(body.get("tool_choice"))
        foreign = fields.foreign(_RESPONSE_FIELDS, _NEUTRAL)
        if body.get("parallel_tool_calls") is False:
            foreign.append("parallel_tool_calls")
        if text_format.get("type", "text") != "text":
            foreign.append("text.format")
        if text.get("verbosity") not in (None, _NEUTRAL["verbosity"]):
            foreign.append("text.verbosity")
        if reasoning.get("effort") not in (None, "none"):
            foreign.append("reasoning.effort")
        if choice not in ("auto", "none"):
            foreign.append("tool_choice")
        tools = [
            {"type": "function", "function": tool} if _type_of(tool) == "function" else tool
            for tool in fields.optional("tools", list) or []
        ]
        return AgentRequest(
            messages=_messages(messages),
            tools=_tools(tools),
            tool_choice=choice,
            max_tokens=fields.count("max_output_tokens"),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            foreign=tuple(foreign),
        )

    def write(self, body: Mapping[str, Any], answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        answer = answers[0]
        usage = _usage(answers)
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": answer.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": str(body.get("model") or ""),
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "output": _output(answer, with_logprobs=_wants_logprobs(body)),
            "parallel_tool_calls": True,
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "prompt_token_ids": list(answer.prompt_ids),
            "token_ids": list(answer.token_ids),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def stream(self, body: Mapping[str, Any]) -> Events:
        return ResponseEvents(body)


_ELSEWHERE: Mapping[str, str] = {
    "container": "the endpoint runs no tools; give the policy yours",
    "mcp_servers": "the endpoint runs no tools; give the policy those of the server",
    "context_management": "the endpoint keeps all messages; send those that the policy is to read",
}
"""Fields of Anthropic's API for what its servers do."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's name for each reason why an answer ends."""


class Messages(Chat):
    """`POST /v1/messages`: Anthropic's API."""

    path = "messages"

    def read(self, body: Mapping[str, Any]) -> AgentRequest:
        fields = _Fields(body)
        fields.check_stream()
        if body.get("thread"):
            # its SDK sends the whole conversation then, without a thread
            raise AgentError(
                400,
                "thread is set, and no conversation is stored here; send all messages",
                "thread_unsupported_request",
            )
        fields.refuse(_ELSEWHERE)
        messages: list[dict[str, Any]] = []
        system = fields.optional("system", str, list)
        if system:
            messages.append({"role": "system", "content": text_of(system)})
        for number, message in enumerate(fields.required("messages", list)):
            messages += _from_anthropic(number, message)
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("the last message is the assistant's, and an answer is a whole turn")
        tool_choice = fields.optional("tool_choice", dict) or {}
        choice = tool_choice.get("type", "auto")
        foreign = fields.foreign(_MESSAGE_FIELDS, _NEUTRAL)
        thinking = fields.optional("thinking", dict) or {}
        if thinking.get("type", "disabled") != "disabled":
            foreign.append("thinking")
        if choice not in ("auto", "none"):
            foreign.append("tool_choice")
        if tool_choice.get("disable_parallel_tool_use"):
            foreign.append("disable_parallel_tool_use")
        tools = [_tool_of_anthropic(tool) for tool in fields.optional("tools", list) or []]
        return AgentRequest(
            messages=_messages(messages),
            tools=_tools(tools),
            tool_choice=choice,
            max_tokens=fields.count("max_tokens"),
            stop=fields.stops("stop_sequences"),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            foreign=tuple(foreign),
        )

    def write(self, body: Mapping[str, Any], answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        answer = answers[0]
        usage = _usage(answers)
        reason = _STOP_REASONS[answer.finish_reason]
        stop = None
        if answer.stop is not None and answer.finish_reason == "stop":
            reason = "stop_sequence"
            stop = answer.stop
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model") or ""),
            "content": _blocks(answer),
            "stop_reason": reason,
            "stop_sequence": stop,
            "prompt_token_ids": list(answer.prompt_ids),
            "token_ids": list(answer.token_ids),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
            },
        }

    def stream(self, body: Mapping[str, Any]) -> Events:
        return MessageEvents(body)

    def error(self, error: AgentError) -> dict[str, Any]:
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
        kind = kinds.get(error.status, "api_error")
        details = {"error_code": error.code}
        return {"type": "error", "error": {"type": kind, "message": str(error), "details": details}}


DIALECTS: Sequence[Dialect] = (Chat(), Completions(), Responses(), Messages())


# --- reading


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _messages(values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    if not values:
        raise ValueError("messages is empty")
    messages = []
    for number, message in enumerate(values):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise ValueError(f"messages[{number}] has no role")
        if role not in _ROLES:
            raise ValueError(
                f"messages[{number}] has the role {quoted(role)}, expected one of"
                f" {', '.join(_ROLES)}"
            )
        try:
            messages.append(comparable(message))
        except ValueError as error:
            raise ValueError(f"messages[{number}]: {error}") from None
    return tuple(
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    )


def _tools(values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    tools = []
    for number, tool in enumerate(values):
        kind = _type_of(tool)
        if kind != "function":
            raise ValueError(
                f"tools[{number}] is of type {quoted(kind)}, which the endpoint does not run;"
                " expected a function"
            )
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{number}] is not a function with a name")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise ValueError(f"tools[{number}]: parameters is not a JSON schema")
        tools.append(
            {
                "type": "function",
                "function": {
                    "name": function["name"],
                    "description": str(function.get("description") or ""),
                    "parameters": parameters,
                },
            }
        )
    return tuple(tools)


def _type_of(value: Any) -> str:
    """Return the type of a tool: a function if it says none."""
    if not isinstance(value, Mapping):
        return type(value).__name__
    return str(value.get("type") or "function")


def _tool_of_anthropic(tool: Any) -> Any:
    """Return a tool of Anthropic's API as one of OpenAI's; one that its servers know stays."""
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        return tool
    return {
        "type": "function",
        "function": {
            "name": tool.get("name"),
            "description": tool.get("description", ""),
            "parameters": tool.get("input_schema", {}),
        },
    }


def _tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else value.get("name")
        return str(name or value.get("type") or "auto")
    raise ValueError(f"tool_choice is {type(value).__name__}, expected a text or a tool")


def _items(value: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of a Responses input."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise ValueError(f"input[{number}] is {type(item).__name__}, expected an item")
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            is_begun = bool(messages) and messages[-1]["role"] == "assistant"
            if is_begun:  # one turn's text and calls are items of their own
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else text_of(output)
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            )
        elif kind != "reasoning":
            raise ValueError(f"input[{number}] has the type {kind!r}, which cannot be read")
    return messages


def _from_anthropic(number: int, message: Any) -> list[dict[str, Any]]:
    """Return an Anthropic message as chat messages: tool results are messages of their own."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{number}] is {type(message).__name__}, expected an object")
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": message.get("role"), "content": content}]
    if not isinstance(content, list):
        raise ValueError(
            f"messages[{number}]: content is {type(content).__name__}, expected a text or a list of"
            " blocks"
        )
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": text_of(block.get("content")),
                }
            )
        elif kind not in ("thinking", "redacted_thinking"):
            raise ValueError(
                f"messages[{number}] has a block of type {kind!r}; only text can be read"
            )
    if texts or calls or not results:
        own: dict[str, Any] = {"role": message.get("role"), "content": "\n".join(texts)}
        if calls:
            own["tool_calls"] = calls
        results.append(own)
    return results


# --- writing


def _head(body: Mapping[str, Any], answers: Sequence[AgentAnswer], kind: str) -> dict[str, Any]:
    return {
        "id": answers[0].id,
        "object": kind,
        "created": int(time.time()),
        "model": str(body.get("model") or ""),
    }


def _chat_message(answer: AgentAnswer) -> dict[str, Any]:
    """Return the assistant's message with the arguments of calls as JSON text."""
    message = dict(answer.message)
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in calls
        ]
        message["content"] = message["content"] or None
    return message


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    return "message.output_text.logprobs" in (body.get("include") or ())


def _output(answer: AgentAnswer, *, with_logprobs: bool) -> list[dict[str, Any]]:
    """Return the items of a Responses output."""
    items: list[dict[str, Any]] = []
    message = _chat_message(answer)
    if message["content"] or not message.get("tool_calls"):
        part: dict[str, Any] = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
        }
        if with_logprobs:
            part["logprobs"] = _chat_logprobs(answer)["content"]
        items.append(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    calls = [
        {
            "id": f"fc_{call['id']}",
            "type": "function_call",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for call in message.get("tool_calls") or ()
    ]
    return [*items, *calls]


def _blocks(answer: AgentAnswer) -> list[dict[str, Any]]:
    """Return the content blocks of an Anthropic message."""
    blocks: list[dict[str, Any]] = []
    calls = answer.message.get("tool_calls") or ()
    content = answer.message["content"]
    if content or not calls:
        blocks.append({"type": "text", "text": content})
    for call in calls:
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": function["arguments"],
            }
        )
    return blocks


def _usage(answers: Sequence[AgentAnswer]) -> dict[str, int]:
    prompt = len(answers[0].prompt_ids)
    completion = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _chat_logprobs(answer: AgentAnswer) -> dict[str, Any]:
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(answer: AgentAnswer) -> dict[str, Any]:
    offsets = []
    position = 0
    for token in answer.tokens:
        offsets.append(position)
        position += len(token)
    return {
        "tokens": list(answer.tokens),
        "token_logprobs": list(answer.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }
