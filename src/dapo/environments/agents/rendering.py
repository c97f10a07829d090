"""Turns an agent's messages into tokens, and the policy's tokens into its messages."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dapo.core.errors import DataError
from dapo.data.prompts import PromptEncoder
from dapo.environments.agents.calls import Call
from dapo.environments.agents.messages import AgentRequest, depth_of, to_json
from dapo.environments.agents.session import MAX_DEPTH, AgentError
from dapo.environments.calls import CallForm, ToolCall, WrongCall, call_text
from dapo.environments.rendering import TurnRenderer, without_surrogates
from dapo.types import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo.config import DataConfig

_MAX_TOOL_SETS = 32
"""The most sets of tools whose renderer is kept."""


class AgentRenderer:
    """Renders an agent's chats with the model's template, for whatever tools it brings."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: "DataConfig",
        history: Literal["exact", "append"],
    ) -> None:
        """Prepare the rendering without tools.

        Args:
            tokenizer: The model's tokenizer.
            config: The section `data`; the agent's messages get no instruction and no system text.
            history: `environment.history`.

        Raises:
            DataError: The chat template cannot be continued, or rewrites earlier turns.
        """
        self._tokenizer = tokenizer
        self._config = config.model_copy(update={"instruction": "", "system": None})
        self._history = history
        self._by_tools: OrderedDict[str, TurnRenderer] = OrderedDict()
        self._token_texts: dict[int, str] = {}
        self._texts = PromptEncoder(
            tokenizer,
            self._config.model_copy(update={"chat_template": "off", "chat_template_kwargs": {}}),
        )
        self.plain = self.of(())

    def of(self, tools: Sequence[Mapping[str, Any]]) -> TurnRenderer:
        """Return the renderer for these tools. Raises AgentError if the template cannot use them."""
        key = to_json(tools)
        if key in self._by_tools:
            self._by_tools.move_to_end(key)
            return self._by_tools[key]
        roles = ["user", "tool"] if tools else ["user"]
        schemas = [dict(tool) for tool in tools]
        renderer = TurnRenderer(
            self._tokenizer, self._config, tools=schemas, history=self._history, roles=roles
        )
        self._by_tools[key] = renderer
        if len(self._by_tools) > _MAX_TOOL_SETS:
            self._by_tools.popitem(last=False)
        return renderer

    def new_ids(self, request: AgentRequest, parent: Call | None) -> tuple[int, ...] | None:
        """Return the tokens of a request behind those of `parent`, or of the whole request.

        None: what follows `parent` cannot be rendered behind it, such as an assistant's message.

        Raises:
            AgentError: The template rejects the request.
        """
        renderer = self._renderer(request)
        if request.prompt is not None:
            return self._text_ids(renderer, request.prompt, parent)
        if parent is None:
            return self._chat_ids(renderer, request)
        new = [_plain(message) for message in request.messages[parent.num_messages :]]
        end_id = parent.token_ids[-1] if parent.token_ids else None
        try:
            return renderer.following(new, ended=parent.is_ended, end_id=end_id)
        except DataError:
            return None

    def answer(
        self, request: AgentRequest, token_ids: Sequence[int], name: str
    ) -> tuple[str, Message]:
        """Return the text of a turn, and the assistant's message that an agent receives.

        Args:
            request: What the agent asked for.
            token_ids: The turn's tokens.
            name: Makes the ids of tool calls differ from those of other answers.
        """
        text = self._renderer(request).text(token_ids)
        return text, self.message(request, text, name)

    def message(self, request: AgentRequest, text: str, name: str) -> Message:
        """Return the assistant's message for the text of a turn.

        A call of an unknown tool, or with arguments that do not fit, reaches the agent as it was
        written: agents answer it. A turn with a call that is not JSON is text. Halves of characters,
        which no answer can be encoded with, are replaced.

        Args:
            request: What the agent asked for.
            text: The text, up to a text that ends the answer.
            name: Makes the ids of tool calls differ from those of other answers.
        """
        renderer = self._renderer(request)
        calls: list[ToolCall] = []
        start = 0
        if renderer.calls is not None and request.tool_choice != "none":
            read, start = renderer.calls.read_with_start(text)
            calls = _written(read)
        if not calls:
            return {"role": "assistant", "content": text}
        tool_calls = [
            {
                "id": f"call_{name}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls)
        ]
        content = text[:start].strip()
        return {"role": "assistant", "content": content, "tool_calls": tool_calls}

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        for token_id in token_ids:
            if token_id not in self._token_texts:
                self._token_texts[token_id] = self.plain.prompts.decode_prompt([token_id])
        return [self._token_texts[token_id] for token_id in token_ids]

    def cut(
        self, request: AgentRequest, token_ids: Sequence[int]
    ) -> tuple[Sequence[int], str | None]:
        """Return the tokens up to the first stop text, and the text before it; None: there is none.

        The token with the end of the stop text is the last one: the policy sampled it.
        """
        if not request.stop:
            return token_ids, None
        decode = self._renderer(request).text
        text = decode(token_ids)
        places = [text.find(stop) for stop in request.stop if stop in text]
        if not places:
            return token_ids, None
        low = 1
        high = len(token_ids)
        while low < high:  # the shortest beginning that has a stop text
            middle = (low + high) // 2
            beginning = decode(token_ids[:middle])
            if any(stop in beginning for stop in request.stop):
                high = middle
            else:
                low = middle + 1
        return token_ids[:low], text[: min(places)]

    def _renderer(self, request: AgentRequest) -> TurnRenderer:
        try:
            return self.of(request.tools)
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise AgentError(400, f"tools: {error}") from None

    def _chat_ids(self, renderer: TurnRenderer, request: AgentRequest) -> tuple[int, ...]:
        errors = []
        for prompt in _forms(renderer, request.messages):
            try:
                return renderer.prompts.encode_once(Problem("", prompt, ""))
            except (DataError, TypeError) as error:
                errors.append(str(error).removeprefix("problem : "))
        raise AgentError(400, f"messages: {errors[0]}")

    def _text_ids(self, renderer: TurnRenderer, text: str, parent: Call | None) -> tuple[int, ...]:
        if parent is not None:
            return renderer.prompts.encode_rendered(text[len(parent.whole_text) :])
        if not text:
            raise AgentError(400, "prompt: expected a text, got an empty one")
        return self._texts.encode_once(Problem("", text, ""))


def _written(calls: Sequence[ToolCall | WrongCall]) -> list[ToolCall]:
    """Return the calls of a turn for its agent; none if one of them cannot be read."""
    written = [call if isinstance(call, ToolCall) else call.written for call in calls]
    readable = [
        _encodable(call)
        for call in written
        if call is not None and depth_of(call.arguments) <= MAX_DEPTH
    ]
    return readable if len(readable) == len(calls) else []


def _encodable(call: ToolCall) -> ToolCall:
    r"""Return a call without halves of characters, which JSON writes as `\ud83d`."""
    arguments = json.loads(without_surrogates(json.dumps(call.arguments, ensure_ascii=False)))
    return ToolCall(without_surrogates(call.name), arguments)


def _forms(renderer: TurnRenderer, messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yield a chat in the forms in which templates may read it, until one accepts it."""
    if not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        yield [dict(message) for message in messages]
        return
    call_form = "hermes" if renderer.calls is None else renderer.calls.form
    # templates read the arguments of a call as a mapping, or as JSON text
    forms = [
        [dict(message) for message in messages],
        [with_json_arguments(message) for message in messages],
        [_with_calls_as_text(message, call_form) for message in messages],
    ]
    yield from filter(renderer.shows_tools, forms)
    joined: list[dict[str, Any]] = []
    for message in forms[-1]:
        role = "user" if message["role"] == "tool" else message["role"]
        if role == "user" and joined and joined[-1]["role"] == "user":
            joined[-1]["content"] += f"\n{message['content']}"
        else:
            joined.append({"role": role, "content": message["content"]})
    yield joined


def _with_calls_as_text(message: Message, form: CallForm) -> dict[str, Any]:
    """Return a message with its tool calls as the policy writes them, for templates without them."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    texts += [
        call_text(ToolCall(call["function"]["name"], call["function"]["arguments"]), form)
        for call in calls
    ]
    return {"role": message["role"], "content": "\n".join(texts)}


def _plain(message: Message) -> Message:
    """Return what an observation's message has: role, content and the name of a tool."""
    return {key: message[key] for key in ("role", "content", "name") if key in message}


def with_json_arguments(message: Message) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [
        {
            **call,
            "function": {**call["function"], "arguments": to_json(call["function"]["arguments"])},
        }
        for call in calls
    ]
    return {**message, "tool_calls": written}
