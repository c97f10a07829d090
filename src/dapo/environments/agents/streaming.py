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


class Written(Protocol):
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
    dialect: Written, body: Mapping[str, Any], answers: Sequence[AgentAnswer]
) -> Iterator[str]:
    """Yield the events of whole answers."""
    events = dialect.stream(body)
    yield from events.begin(dialect.write(body, [_without_text(answer) for answer in answers]))
    yield from events.end(dialect.write(body, answers), [_content(answer) for answer in answers])


async def grown(
    dialect: Written, body: Mapping[str, Any], pending: GrowingPending
) -> AsyncIterator[str]:
    """Yield the events of answers as they are sampled. Whoever leaves early cancels the request."""
    events = dialect.stream(body)
    samples = pending.request.samples
    sent = [""] * samples
    empty = AgentAnswer(pending.name, "", _NO_MESSAGE, "stop", pending.prompt_ids)
    try:
        for event in events.begin(dialect.write(body, [empty] * samples)):
            yield event
        async for texts in pending.texts():
            for index, text in enumerate(texts):
                if text != sent[index] and text.startswith(sent[index]):
                    for event in events.add(index, text[len(sent[index]) :]):
                        yield event
                    sent[index] = text
        answers = pending.answers.result()
    except AgentError as error:
        yield _event(dialect.error(error), name="error")
        return
    finally:
        pending.answers.cancel()
    rest = [_content(answer).removeprefix(text) for answer, text in zip(answers, sent, strict=True)]
    for event in events.end(dialect.write(body, answers), rest):
        yield event


_NO_MESSAGE = {"role": "assistant", "content": ""}


def _without_text(answer: AgentAnswer) -> AgentAnswer:
    return AgentAnswer(answer.id, "", _NO_MESSAGE, answer.finish_reason, answer.prompt_ids)


def _content(answer: AgentAnswer) -> str:
    return str(answer.message["content"] or "")


class ChatEvents:
    """The chunks of a chat completion."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._with_usage = (body.get("stream_options") or {}).get("include_usage")
        self._head: dict[str, Any] = {}

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
                numbered = [{**call, "index": number} for number, call in enumerate(calls)]
                yield self._chunk(index, {"tool_calls": numbered})
            last = {
                "index": index,
                "delta": {},
                "finish_reason": choice["finish_reason"],
                "logprobs": choice["logprobs"],
                "token_ids": choice["token_ids"],
            }
            prompt_ids = whole["prompt_token_ids"]
            yield _event({**self._head, "choices": [last], "prompt_token_ids": prompt_ids})
        if self._with_usage:
            yield _event({**self._head, "choices": [], "usage": whole["usage"]})
        yield _DONE

    def _chunk(self, index: int, delta: Mapping[str, Any]) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": None}
        return _event({**self._head, "choices": [choice]})


class CompletionEvents:
    """The chunks of a text completion."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._with_usage = (body.get("stream_options") or {}).get("include_usage")
        self._head: dict[str, Any] = {}

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
            yield _event({**self._head, "choices": [{**choice, "text": text}]})
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

    def begin(self, empty: Mapping[str, Any]) -> Iterator[str]:
        self._message = empty["output"][0]
        begun = {**empty, "status": "in_progress", "output": [], "usage": None}
        begun["incomplete_details"] = None
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def add(self, index: int, text: str) -> Iterator[str]:
        place = self._place(0, self._message)
        if not self._is_open:
            self._is_open = True
            item = {**self._message, "content": [], "status": "in_progress"}
            part = self._message["content"][0]
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", content_index=0, part=part, **place)
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
        ending = "response.completed"
        if whole["status"] == "incomplete":
            ending = "response.incomplete"
        yield self._event(ending, response=whole)

    def _end_text(self, item: Mapping[str, Any], rest: str) -> Iterator[str]:
        if rest or not self._is_open:
            yield from self.add(0, rest)
        place = self._place(0, item)
        part = item["content"][0]
        yield self._event(
            "response.output_text.done", content_index=0, text=part["text"], logprobs=[], **place
        )
        yield self._event("response.content_part.done", content_index=0, part=part, **place)

    def _call(self, index: int, item: Mapping[str, Any]) -> Iterator[str]:
        place = self._place(index, item)
        empty = {**item, "arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        yield self._event("response.output_item.added", output_index=index, item=empty)
        yield self._event("response.function_call_arguments.delta", delta=arguments, **place)
        yield self._event(
            "response.function_call_arguments.done",
            arguments=arguments,
            name=item["name"],
            **place,
        )

    def _place(self, index: int, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"output_index": index, "item_id": item["id"]}

    def _event(self, kind: str, **values: Any) -> str:
        number = self._number
        self._number += 1
        return _event({"type": kind, "sequence_number": number, **values}, name=kind)


class MessageEvents:
    """The events of Anthropic's messages."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._is_open = False

    def begin(self, empty: Mapping[str, Any]) -> Iterator[str]:
        begun = {**empty, "content": [], "stop_reason": None}
        begun["usage"] = {**empty["usage"], "output_tokens": 0}
        yield _typed({"type": "message_start", "message": begun})

    def add(self, index: int, text: str) -> Iterator[str]:
        if not self._is_open:
            self._is_open = True
            block = {"type": "text", "text": ""}
            yield _typed({"type": "content_block_start", "index": 0, "content_block": block})
        delta = {"type": "text_delta", "text": text}
        yield _typed({"type": "content_block_delta", "index": 0, "delta": delta})

    def end(self, whole: Mapping[str, Any], rest: Sequence[str]) -> Iterator[str]:
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                if rest[0] or not self._is_open:
                    yield from self.add(index, rest[0])
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _typed(
                    {"type": "content_block_start", "index": index, "content_block": empty}
                )
                yield _typed({"type": "content_block_delta", "index": index, "delta": delta})
            yield _typed({"type": "content_block_stop", "index": index})
        ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield _typed({"type": "message_delta", "delta": ending, "usage": whole["usage"]})
        yield _typed({"type": "message_stop"})


def _typed(value: Mapping[str, Any]) -> str:
    return _event(value, name=value["type"])


def _event(value: Mapping[str, Any], *, name: str | None = None) -> str:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n"
