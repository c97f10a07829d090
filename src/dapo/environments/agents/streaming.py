"""Answers as server-sent events: whole ones, and those that grow while they are sampled."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from dapo.environments.agents.messages import AgentRequest
from dapo.environments.agents.session import AgentAnswer, AgentError, Pending

_DONE = "data: [DONE]\n\n"


class Events(Protocol):
    """Writes the events of one answered request in one dialect: begin, any number of adds, end."""

    def begin(self, empty: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events before the first text; `empty` is the answer as JSON without text."""

    def add(self, index: int, text: str) -> Iterator[str]:
        """Yield further text of one of the answers."""

    def end(self, whole: Mapping[str, Any], rest: Sequence[str]) -> Iterator[str]:
        """Yield the rest of each text, and the end; `whole` is the whole answer as JSON."""


class AnswerWriter(Protocol):
    """The part of a dialect that writes answers."""

    def write(self, body: Mapping[str, Any], answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        """Return the whole answer as JSON values."""

    def stream(self, body: Mapping[str, Any]) -> Events:
        """Return the writer of a request's events."""

    def error(self, error: AgentError) -> dict[str, Any]:
        """Return an error as JSON values."""


class GrowingPending(Pending):
    """A request whose answers can be read while they are sampled."""

    def __init__(self, request: AgentRequest, name: str) -> None:
        """Wait for the first token, in the running event loop; `name` is the id of the answers."""
        super().__init__(request)
        self.name = name
        self.begun = asyncio.Event()
        """Set with the first tokens, or with an error."""
        self.prompt_ids: Sequence[int] = ()
        self.is_watched = False
        """Whether a client reads the answers while they are sampled; only then are they shown."""
        self._read: Callable[[Sequence[int]], str] | None = None
        self._ids: Sequence[Sequence[int]] = ()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.answers.add_done_callback(lambda _: self._wake())

    # --- the engine's thread

    def grow(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        read: Callable[[Sequence[int]], str],
    ) -> None:
        """Take the tokens so far of each answer; `read` returns the text that no longer changes."""
        self.prompt_ids = prompt_ids
        self._read = read
        self._ids = token_ids
        self._wake()

    def _wake(self) -> None:
        """Wake who waits for tokens, in the event loop of the server."""
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._mark)

    # --- the server's thread

    def _mark(self) -> None:
        self.begun.set()
        self._changed.set()

    async def texts(self) -> AsyncIterator[list[str]]:
        """Yield the texts so far until the answers are there: the newest, if there are several."""
        while not self.answers.done():
            await self._changed.wait()
            self._changed.clear()
            if self._read is not None and not self.answers.done():
                yield [self._read(ids) for ids in self._ids]


def replayed(
    dialect: AnswerWriter, body: Mapping[str, Any], answers: Sequence[AgentAnswer]
) -> Iterator[str]:
    """Yield the events of whole answers; `body` is the request."""
    events = dialect.stream(body)
    empty_answers = [_without_text(answer) for answer in answers]
    yield from events.begin(dialect.write(body, empty_answers))
    texts = [_content(answer) for answer in answers]
    yield from events.end(dialect.write(body, answers), texts)


async def grown(
    dialect: AnswerWriter, body: Mapping[str, Any], pending: GrowingPending
) -> AsyncIterator[str]:
    """Yield the events of answers as they are sampled. Whoever leaves early cancels the request.

    Args:
        dialect: writes the events.
        body: the request as JSON values.
        pending: the same request, as the engine answers it.
    """
    events = dialect.stream(body)
    samples = pending.request.samples
    sent = [""] * samples
    empty = AgentAnswer(pending.name, "", _NO_MESSAGE, "stop", pending.prompt_ids)
    try:
        for event in events.begin(dialect.write(body, [empty] * samples)):
            yield event
        async for texts in pending.texts():
            for index, text in enumerate(texts):
                # what is sent cannot be taken back: a text that does not continue it waits
                if not text.startswith(sent[index]):
                    continue
                addition = text.removeprefix(sent[index])
                if not addition:
                    continue
                for event in events.add(index, addition):
                    yield event
                sent[index] = text
        answers = pending.answers.result()
    except AgentError as error:
        yield _event(dialect.error(error), name="error")
        return
    finally:
        pending.answers.cancel()
    rest = []
    for answer, sent_text in zip(answers, sent, strict=True):
        rest.append(_content(answer).removeprefix(sent_text))
    for event in events.end(dialect.write(body, answers), rest):
        yield event


_NO_MESSAGE = {"role": "assistant", "content": ""}


def _without_text(answer: AgentAnswer) -> AgentAnswer:
    """Return what is known of an answer before its first token."""
    return AgentAnswer(answer.id, "", _NO_MESSAGE, answer.finish_reason, answer.prompt_ids)


def _content(answer: AgentAnswer) -> str:
    """Return the text of an answer; empty if it only calls tools."""
    return str(answer.message["content"] or "")


def _asks_for_usage(body: Mapping[str, Any]) -> bool:
    """Return True if a request asks for a last chunk with the number of tokens."""
    options = body.get("stream_options") or {}
    return bool(options.get("include_usage"))


class ChatEvents:
    """The chunks of a chat completion."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._with_usage = _asks_for_usage(body)
        self._head: dict[str, Any] = {}
        """What every chunk begins with."""

    def begin(self, empty: Mapping[str, Any]) -> Iterator[str]:
        self._head = {name: empty[name] for name in ("id", "object", "created", "model")}
        self._head["object"] = "chat.completion.chunk"
        for choice in empty["choices"]:
            yield self._chunk(choice["index"], {"role": "assistant", "content": ""})

    def add(self, index: int, text: str) -> Iterator[str]:
        yield self._chunk(index, {"content": text})

    def end(self, whole: Mapping[str, Any], rest: Sequence[str]) -> Iterator[str]:
        for choice, text in zip(whole["choices"], rest, strict=True):
            index = choice["index"]
            if text:
                yield from self.add(index, text)
            calls = choice["message"].get("tool_calls") or ()
            if calls:
                numbered_calls = [{**call, "index": number} for number, call in enumerate(calls)]
                yield self._chunk(index, {"tool_calls": numbered_calls})
            yield self._last_chunk(choice, whole["prompt_token_ids"])
        if self._with_usage:
            yield _event({**self._head, "choices": [], "usage": whole["usage"]})
        yield _DONE

    def _last_chunk(self, choice: Mapping[str, Any], prompt_ids: Sequence[int]) -> str:
        """Return the chunk that ends a choice: how it finished, and the tokens of all of it."""
        ending = {
            "index": choice["index"],
            "delta": {},
            "finish_reason": choice["finish_reason"],
            "logprobs": choice["logprobs"],
            "token_ids": choice["token_ids"],
        }
        return _event({**self._head, "choices": [ending], "prompt_token_ids": prompt_ids})

    def _chunk(self, index: int, delta: Mapping[str, Any]) -> str:
        """Return a chunk with a part of a choice's message."""
        choice = {"index": index, "delta": delta, "finish_reason": None}
        return _event({**self._head, "choices": [choice]})


class CompletionEvents:
    """The chunks of a text completion."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._with_usage = _asks_for_usage(body)
        self._head: dict[str, Any] = {}
        """What every chunk begins with."""

    def begin(self, empty: Mapping[str, Any]) -> Iterator[str]:
        self._head = {name: empty[name] for name in ("id", "object", "created", "model")}
        for choice in empty["choices"]:
            if choice["text"]:  # the prompt, with `echo`
                yield from self.add(choice["index"], choice["text"])

    def add(self, index: int, text: str) -> Iterator[str]:
        choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        yield _event({**self._head, "choices": [choice]})

    def end(self, whole: Mapping[str, Any], rest: Sequence[str]) -> Iterator[str]:
        for choice, text in zip(whole["choices"], rest, strict=True):
            ending = {**choice, "text": text}
            yield _event({**self._head, "choices": [ending]})
        if self._with_usage:
            yield _event({**self._head, "choices": [], "usage": whole["usage"]})
        yield _DONE


class ResponseEvents:
    """The events of OpenAI's responses."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._number = 0
        self._message: dict[str, Any] = {}
        """The item of the text."""
        self._is_open = False
        """Whether the events have begun that item."""

    def begin(self, empty: Mapping[str, Any]) -> Iterator[str]:
        self._message = empty["output"][0]
        response = {**empty, "status": "in_progress", "output": [], "usage": None}
        response["incomplete_details"] = None
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, index: int, text: str) -> Iterator[str]:
        if not self._is_open:
            self._is_open = True
            yield from self._begin_text()
        place = _place(0, self._message)
        yield self._event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=[], **place
        )

    def end(self, whole: Mapping[str, Any], rest: Sequence[str]) -> Iterator[str]:
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                yield from self._end_text(item, rest[0])
            else:
                yield from self._call(index, item)
            yield self._event("response.output_item.done", output_index=index, item=item)
        kind = "response.completed"
        if whole["status"] == "incomplete":
            kind = "response.incomplete"
        yield self._event(kind, response=whole)

    def _begin_text(self) -> Iterator[str]:
        """Yield the events before the first text of the message."""
        item = {**self._message, "content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = self._message["content"][0]
        place = _place(0, self._message)
        yield self._event("response.content_part.added", content_index=0, part=part, **place)

    def _end_text(self, item: Mapping[str, Any], rest: str) -> Iterator[str]:
        """Yield the rest of the message's text, and the events that end the text."""
        # a message without text has one empty piece of it
        if rest or not self._is_open:
            yield from self.add(0, rest)
        place = _place(0, item)
        part = item["content"][0]
        yield self._event(
            "response.output_text.done", content_index=0, text=part["text"], logprobs=[], **place
        )
        yield self._event("response.content_part.done", content_index=0, part=part, **place)

    def _call(self, index: int, item: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events of a tool call, whose arguments come in one piece."""
        place = _place(index, item)
        arguments = item["arguments"]
        empty_item = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=empty_item)
        yield self._event("response.function_call_arguments.delta", delta=arguments, **place)
        yield self._event(
            "response.function_call_arguments.done",
            arguments=arguments,
            name=item["name"],
            **place,
        )

    def _event(self, kind: str, **values: Any) -> str:
        """Return the next event, with its number."""
        number = self._number
        self._number += 1
        return _event({"type": kind, "sequence_number": number, **values}, name=kind)


def _place(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that tell to which item of the output an event belongs."""
    return {"output_index": index, "item_id": item["id"]}


class MessageEvents:
    """The events of Anthropic's messages."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._is_open = False
        """Whether the events have begun the block of the text."""

    def begin(self, empty: Mapping[str, Any]) -> Iterator[str]:
        message = {**empty, "content": [], "stop_reason": None}
        message["usage"] = {**empty["usage"], "output_tokens": 0}
        yield _typed({"type": "message_start", "message": message})

    def add(self, index: int, text: str) -> Iterator[str]:
        if not self._is_open:
            self._is_open = True
            block = {"type": "text", "text": ""}
            yield _typed({"type": "content_block_start", "index": 0, "content_block": block})
        delta = {"type": "text_delta", "text": text}
        yield _typed({"type": "content_block_delta", "index": 0, "delta": delta})

    def end(self, whole: Mapping[str, Any], rest: Sequence[str]) -> Iterator[str]:
        for index, block in enumerate(whole["content"]):
            if block["type"] != "text":
                yield from self._tool_use(index, block)
            elif rest[0] or not self._is_open:
                yield from self.add(index, rest[0])
            yield _typed({"type": "content_block_stop", "index": index})
        ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield _typed({"type": "message_delta", "delta": ending, "usage": whole["usage"]})
        yield _typed({"type": "message_stop"})

    def _tool_use(self, index: int, block: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events of a tool call but the last, with its arguments in one piece."""
        empty_block = {**block, "input": {}}
        yield _typed({"type": "content_block_start", "index": index, "content_block": empty_block})
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _typed({"type": "content_block_delta", "index": index, "delta": delta})


def _typed(value: Mapping[str, Any]) -> str:
    """Return an event whose name is the type of its value."""
    return _event(value, name=value["type"])


def _event(value: Mapping[str, Any], *, name: str | None = None) -> str:
    """Return a value as one server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    data = json.dumps(value, ensure_ascii=False)
    return f"{head}data: {data}\n\n"
