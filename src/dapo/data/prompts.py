"""Problems to token ids: instruction, system message, chat template."""

import threading
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from dapo.core.errors import DataError
from dapo.core.packed import compact
from dapo.data.byte_decoder import ByteDecoder
from dapo.types import Message, Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CACHED_PROMPTS = 2**17
"""Prompts whose ids are kept, about a kilobyte each."""


class PromptEncoder:
    """What the model sees of a problem.

    With a chat template, a text becomes a user message; `instruction` follows the last user message on a line of its
    own; `system` stands in front where the problem brings no system message. Without one, the text and the
    instruction are the prompt, and messages are joined by blank lines, their roles left out.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        instruction: str = "",
        system: str | None = None,
        chat_template: Literal["auto", "on", "off"] = "auto",
        max_prompt_tokens: int = 2048,
    ) -> None:
        """`chat_template`: `auto` uses the tokenizer's if it has one. Raises DataError for what cannot apply."""
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat_template == "on" and not has_template:
            raise DataError("data.chat_template=on, but the model's tokenizer has no chat template; use auto or off")
        self.uses_template = has_template and chat_template != "off"
        if system is not None and not self.uses_template:
            why = "data.chat_template=off" if has_template else "the model's tokenizer has no chat template"
            raise DataError(f"data.system is set, but {why}; leave it out, or say it in data.instruction")
        self._tokenizer = tokenizer
        self._instruction = instruction
        self._system = system
        self.max_prompt_tokens = max_prompt_tokens
        self._lengths: dict[Hashable, int] = {}
        self._cached_ids: dict[Hashable, Sequence[int]] = {}
        self._responses = ByteDecoder.of(tokenizer, skip_special_tokens=True)
        self._prompts = ByteDecoder.of(tokenizer, skip_special_tokens=False)
        self._lock = threading.Lock()  # fast tokenizers refuse a second caller in the middle of a call

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """Token ids, never cut. Without a template the tokenizer adds the special tokens it begins a text with.

        They are remembered: rendering and encoding take a millisecond, and the problems of a run come again.
        """
        key = _key(problem.prompt)
        if key in self._cached_ids:
            return tuple(self._cached_ids[key])
        text = self.render(problem)
        with self._lock:
            # a template writes the special tokens itself
            ids = tuple(self._tokenizer(text, add_special_tokens=not self.uses_template)["input_ids"])
        self._lengths[key] = len(ids)
        if len(self._cached_ids) < MAX_CACHED_PROMPTS:
            self._cached_ids[key] = compact(ids)
        return ids

    def length(self, problem: Problem) -> int:
        """Tokens of the prompt; remembered, since a large data set takes a while."""
        key = _key(problem.prompt)
        return self._lengths[key] if key in self._lengths else len(self.encode(problem))

    def render(self, problem: Problem) -> str:
        """The prompt as text; with a template, its special tokens included. Raises DataError for what cannot apply."""
        if self.uses_template:
            messages = chat_messages(problem, instruction=self._instruction, system=self._system)
            return self._templated(messages, problem)
        prompt = with_instruction(problem, self._instruction)
        return prompt if isinstance(prompt, str) else _joined(prompt, problem)

    def decode(self, ids: Sequence[int]) -> str:
        """A response as text: special tokens left out, spaces as they are."""
        return self._text(ids, skip_special_tokens=True) if self._responses is None else self._responses.decode(ids)

    def decode_prompt(self, ids: Sequence[int]) -> str:
        """A prompt as text, special tokens included."""
        return self._text(ids, skip_special_tokens=False) if self._prompts is None else self._prompts.decode(ids)

    def split_by_length(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]:
        """Problems of at most `max_prompt_tokens`, in order, and how many were longer. Raises DataError if all were."""
        kept = [problem for problem in problems if self.length(problem) <= self.max_prompt_tokens]
        if problems and not kept:
            raise DataError(
                f"all {len(problems)} prompts are longer than data.max_prompt_tokens={self.max_prompt_tokens}; "
                f"the shortest has {min(map(self.length, problems))} tokens"
            )
        return kept, len(problems) - len(kept)

    def _templated(self, messages: list[dict[str, str]], problem: Problem) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"problem {problem.id}: the model's chat template refuses messages of {roles}: {error}"
            ) from None
        assert isinstance(text, str)
        return text

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with self._lock:
            text = self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        assert isinstance(text, str)
        return text


def _key(prompt: Prompt) -> Hashable:
    return prompt if isinstance(prompt, str) else tuple(tuple(sorted(message.items())) for message in prompt)


def chat_messages(problem: Problem, *, instruction: str = "", system: str | None = None) -> list[dict[str, str]]:
    """The problem as a chat: a text becomes a user message; `system` in front where the problem brings none."""
    prompt = with_instruction(problem, instruction)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def with_instruction(problem: Problem, instruction: str) -> Prompt:
    """The prompt with `instruction` on a line of its own behind the text, or behind the last user message."""
    if not instruction:
        return problem.prompt
    if isinstance(problem.prompt, str):
        return f"{problem.prompt}\n{instruction}"
    messages = list(problem.prompt)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError(f"problem {problem.id}: data.instruction follows the last user message, and there is none")
    messages[last] = {**messages[last], "content": f"{messages[last]['content']}\n{instruction}"}
    return messages


def _joined(messages: Sequence[Message], problem: Problem) -> str:
    if any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"problem {problem.id}: a conversation with assistant messages cannot be told without a chat template; "
            "use data.chat_template=on with a model that has one"
        )
    return "\n\n".join(message["content"] for message in messages)


class Encoder(Protocol):
    """Problems to prompt ids, response ids to text."""

    def encode(self, problem: Problem) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_prompt(self, ids: Sequence[int]) -> str: ...
