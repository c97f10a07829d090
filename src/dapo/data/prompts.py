"""Encode problems as prompts: instruction, system message, chat template, tokenizer."""

import re
import threading
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dapo.core.errors import DataError
from dapo.data.byte_level import ByteDecoder, TokenBound
from dapo.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo.config import DataConfig

_QUESTION, _ANSWER = "question", "answer of the assistant"
_ENDS_NOTHING = re.compile(r"(?<![a-z])unk|think|reason", re.IGNORECASE)
"""Special tokens that do not end a text: the token for unknown text, and the marks around private reasoning."""


@dataclass(frozen=True)
class TurnEnd:
    """The text that a chat template puts after an assistant's turn."""

    text: str
    token_id: int | None  # the first special or added token of the text; None without one
    text_before: str = ""  # the template's text before that token, which is part of the response


def find_turn_end(tokenizer: "PreTrainedTokenizerBase") -> TurnEnd:
    """Find the end of an assistant's turn by rendering one with the tokenizer's chat template."""
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError):
        rendered = ""
    text = rendered.rpartition(_ANSWER)[2] if _ANSWER in rendered else ""
    added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for i, token_id in enumerate(ids):
        # some tokenizers have blank tokens among the added ones
        if token_id in added and str(tokenizer.decode([token_id], skip_special_tokens=False)).strip():
            return TurnEnd(text, token_id, str(tokenizer.decode(ids[:i])).strip())
    return TurnEnd(text, None)


class TextEnd:
    """Cuts token ids off at the end of their text: the first special token."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", turn_end: int | None, *, part_of_text: Collection[str] = ()
    ) -> None:
        """A special token ends the text; so does `turn_end`, special or not.

        Special tokens for unknown text, around a model's private reasoning, or in `part_of_text` end nothing.
        """
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in special | set(tokenizer.all_special_ids)}
        ends = {i for i, name in names.items() if not (_ENDS_NOTHING.search(name) or name in part_of_text)}
        ends |= set() if turn_end is None else {turn_end}
        self._is_end = np.zeros(max(ends, default=0) + 2, np.bool_)  # the last entry is for all larger ids
        self._is_end[list(ends)] = True

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids before the first that ends the text; all of them if none does."""
        ended = self._is_end[np.minimum(np.asarray(ids, np.int64), len(self._is_end) - 1)]
        return ids[: int(ended.argmax())] if ended.any() else ids


_BATCH = 1024
MAX_CACHED_PROMPTS = 2**17  # the number of prompts whose token ids are cached, about one kilobyte each


class PromptEncoder:
    """Encodes problems as token ids.

    With a chat template, a text becomes a user message, `data.instruction` is appended to the last user message on a
    new line, and `data.system` becomes the first message unless the problem has a system message. Without a template,
    the prompt is the text and the instruction; messages are joined by blank lines, without their roles.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", config: "DataConfig", *, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        """`config` is the section `data`; the chat template gets the schemas `tools`, and must take them.

        Raises DataError if an option needs a chat template and there is none.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.chat_template == "on" and not has_template:
            raise DataError("data.chat_template=on, but the model's tokenizer has no chat template; use auto or off")
        self.uses_template = has_template and config.chat_template != "off"
        if config.system is not None and not self.uses_template:
            why = "data.chat_template=off" if has_template else "the model's tokenizer has no chat template"
            raise DataError(f"data.system is set, but {why}; leave it out, or put it into data.instruction")
        self.turn_end: TurnEnd | None = find_turn_end(tokenizer) if self.uses_template else None
        """The end of an assistant's turn in the template; None without a template."""
        self._text_end = TextEnd(tokenizer, None if self.turn_end is None else self.turn_end.token_id)
        self._tokenizer = tokenizer
        self._config = config
        self._tools = list(tools) or None
        self._lengths: dict[Hashable, int] = {}
        self._bounds: dict[Hashable, int] = {}  # of prompts whose length has not been needed
        self._bound = TokenBound.of(tokenizer, add_special_tokens=not self.uses_template)
        self._cached_ids: dict[Hashable, Sequence[int]] = {}
        self._responses = ByteDecoder.of(tokenizer, skip_special_tokens=True)
        self._prompts = ByteDecoder.of(tokenizer, skip_special_tokens=False)
        self._lock = threading.Lock()  # fast tokenizers raise an error when two threads call them

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """The token ids of the prompt, not truncated; without a template, with the tokenizer's own special tokens.

        Ids are cached: rendering and encoding take about a millisecond, and a run encodes each problem repeatedly.
        """
        key = _key(problem.prompt)
        if key in self._cached_ids:
            return tuple(self._cached_ids[key])
        text = self.render(problem)
        with self._lock:
            ids = tuple(self._tokenized(text))
        self._lengths[key] = len(ids)
        if len(self._cached_ids) < MAX_CACHED_PROMPTS:
            self._cached_ids[key] = array("i", ids)
        return ids

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """The token ids of a prompt's text as `decode_prompt` gives it, with its special tokens."""
        with self._lock:
            return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def length(self, problem: Problem) -> int:
        """The number of tokens of the prompt, cached."""
        key = _key(problem.prompt)
        return self._lengths[key] if key in self._lengths else len(self.encode(problem))

    def measure(
        self, problems: Sequence[Problem], *, above: int = -1, on_progress: Callable[[int, int], None] | None = None
    ) -> int:
        """The number of tokens of the longest prompt if it has more than `above`, else 0; encodes in batches.

        Every prompt is rendered, but one whose bytes show that it is not longer than `above` is not encoded.
        """
        waiting = {_key(problem.prompt): problem for problem in problems}
        waiting = {key: p for key, p in waiting.items() if key not in self._lengths and self._may_exceed(key, above)}
        keys = list(waiting)
        for start in range(0, len(keys), _BATCH):
            texts = {key: self.render(waiting[key]) for key in keys[start : start + _BATCH]}
            if self._bound is not None:
                self._bounds |= {key: self._bound(text) for key, text in texts.items()}
            texts = {key: text for key, text in texts.items() if self._may_exceed(key, above)}
            if texts:
                with self._lock:
                    tokenized = self._tokenized(list(texts.values()))
                self._lengths |= dict(zip(texts, map(len, tokenized), strict=True))
            if on_progress is not None:
                on_progress(min(start + _BATCH, len(keys)), len(keys))
        longest = max((self._lengths.get(_key(problem.prompt), 0) for problem in problems), default=0)
        return longest if longest > above else 0

    def render(self, problem: Problem) -> str:
        """The prompt as text, with the template's special tokens. Raises DataError if it cannot be rendered."""
        if self.uses_template:
            return self._templated(problem)
        prompt = with_instruction(problem, self._config.instruction)
        if isinstance(prompt, str):
            return prompt
        if any(message["role"] == "assistant" for message in prompt):
            raise DataError(
                f"problem {problem.id}: a conversation with assistant messages cannot be rendered without a chat "
                "template; use data.chat_template=on with a model that has one"
            )
        return "\n\n".join(message["content"] for message in prompt)

    def render_messages(self, messages: Sequence[Mapping[str, Any]], *, header: bool = True, **variables: Any) -> str:
        """The text of chat messages, and the `header` of the assistant's next turn; raises the template's errors."""
        options = {"tools": self._tools, "add_generation_prompt": header, "tokenize": False, **variables}
        return str(self._tokenizer.apply_chat_template([dict(message) for message in messages], **options))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response up to the first special token: what follows it is not part of the answer."""
        ids = self._text_end.cut(ids)
        return self._text(ids, skip_special_tokens=True) if self._responses is None else self._responses.decode(ids)

    def decode_prompt(self, ids: Sequence[int]) -> str:
        return self._text(ids, skip_special_tokens=False) if self._prompts is None else self._prompts.decode(ids)

    def split_by_length(
        self, problems: Sequence[Problem], *, on_progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[Problem], int]:
        """The problems of at most `data.max_prompt_tokens` tokens, in order, and the number of longer ones.

        Raises DataError if all are longer.
        """
        limit = self._config.max_prompt_tokens
        longest = self.measure(problems, above=limit, on_progress=on_progress)
        kept = [p for p in problems if self._lengths.get(_key(p.prompt), 0) <= limit] if longest else list(problems)
        if problems and not kept:
            raise DataError(
                f"all {len(problems)} prompts are longer than data.max_prompt_tokens={limit}; "
                f"the shortest has {min(map(self.length, problems))} tokens"
            )
        return kept, len(problems) - len(kept)

    def _may_exceed(self, key: Hashable, length: int) -> bool:
        return self._bounds.get(key, length + 1) > length

    def _tokenized(self, text: str | list[str]) -> Any:
        # a template contains the special tokens; lengths are checked here, and need no warning
        return self._tokenizer(text, add_special_tokens=not self.uses_template, verbose=False)["input_ids"]

    def _templated(self, problem: Problem) -> str:
        from jinja2 import TemplateError

        messages = chat_messages(problem, instruction=self._config.instruction, system=self._config.system)
        try:
            return self.render_messages(messages)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = f"the model's chat template rejects messages of {roles}: {error}"
            raise DataError(f"problem {problem.id}: {reason}") from None

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with self._lock:
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
            return str(self._tokenizer.decode(list(ids), **options))


def _key(prompt: Prompt) -> Hashable:
    return prompt if isinstance(prompt, str) else tuple(tuple(sorted(message.items())) for message in prompt)


def chat_messages(problem: Problem, *, instruction: str = "", system: str | None = None) -> list[dict[str, str]]:
    """The problem as chat messages, with `system` as the first unless the problem has a system message."""
    prompt = with_instruction(problem, instruction)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def with_instruction(problem: Problem, instruction: str) -> Prompt:
    """The prompt with `instruction` appended on a new line to the text or to the last user message."""
    if not instruction:
        return problem.prompt
    if isinstance(problem.prompt, str):
        return f"{problem.prompt}\n{instruction}"
    messages = list(problem.prompt)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        reason = "data.instruction is appended to the last user message, and there is none"
        raise DataError(f"problem {problem.id}: {reason}")
    messages[last] = {**messages[last], "content": f"{messages[last]['content']}\n{instruction}"}
    return messages


class Encoder(Protocol):
    """Encodes problems as token ids, and decodes token ids to text."""

    def encode(self, problem: Problem) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_prompt(self, ids: Sequence[int]) -> str: ...
