"""Encode problems as prompts: instruction, system message, chat template, tokenizer."""

import json
import re
import threading
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dapo.core.errors import DataError
from dapo.data.byte_level import ByteDecoder, TokenBound
from dapo.data.chat_template import ChatTemplate
from dapo.data.sources.rows import TEMPLATE_KWARGS
from dapo.types import Message, Problem, Prompt, content_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo.config import DataConfig

_QUESTION = "question"
_ANSWER = "answer of the assistant"
_ENDS_NOTHING = re.compile(r"(?<![a-z])unk|think|reason", re.IGNORECASE)
"""Special tokens that do not end a text: the token for unknown text, and the marks around private
reasoning.
"""


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
        if (
            token_id in added
            and str(tokenizer.decode([token_id], skip_special_tokens=False)).strip()
        ):
            return TurnEnd(text, token_id, str(tokenizer.decode(ids[:i])).strip())
    return TurnEnd(text, None)


class TextEnd:
    """Cuts token ids off at the end of their text: the first special token."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        turn_end: int | None,
        *,
        part_of_text: Collection[str] = (),
    ) -> None:
        """A special token ends the text; so does `turn_end`, special or not.

        Special tokens for unknown text, around a model's private reasoning, or in `part_of_text`
        end nothing.
        """
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {
            i: str(tokenizer.convert_ids_to_tokens(i))
            for i in special | set(tokenizer.all_special_ids)
        }
        ends = {
            i
            for i, name in names.items()
            if not (_ENDS_NOTHING.search(name) or name in part_of_text)
        }
        ends |= set() if turn_end is None else {turn_end}
        # the last entry is for all larger ids
        self._is_end = np.zeros(max(ends, default=0) + 2, np.bool_)
        self._is_end[list(ends)] = True

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids before the first that ends the text; all of them if none does."""
        ended = self._is_end[np.minimum(np.asarray(ids, np.int64), len(self._is_end) - 1)]
        return ids[: int(ended.argmax())] if ended.any() else ids


_BATCH = 1024
# the number of prompts whose token ids are cached, about one kilobyte each
MAX_CACHED_PROMPTS = 2**17


class PromptEncoder:
    """Encodes problems as token ids.

    With a chat template, a text becomes a user message, `data.instruction` is appended to the last
    user message on a new line, and `data.system` becomes the first message unless the problem has a
    system message. Without a template, the prompt is the text and the instruction; messages are
    joined by blank lines, without their roles.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: "DataConfig",
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Take the section `data`, and schemas `tools` that the chat template must take.

        Raises DataError if an option needs a chat template and there is none.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.chat_template == "on" and not has_template:
            raise DataError(
                "data.chat_template=on, but the model's tokenizer has no chat template; use auto"
                " or off"
            )
        self.uses_template = has_template and config.chat_template != "off"
        why = "the model's tokenizer has no chat template"
        if has_template:
            why = "data.chat_template=off"
        if config.system is not None and not self.uses_template:
            raise DataError(
                f"data.system is set, but {why}; leave it out, or put it into data.instruction"
            )
        if config.chat_template_kwargs and not self.uses_template:
            raise DataError(f"data.chat_template_kwargs is set, but {why}; leave it out")
        time = config.template_time
        variables = config.chat_template_kwargs
        self.template: ChatTemplate | None = None
        """The chat template; None without one."""
        if self.uses_template:
            self.template = ChatTemplate(tokenizer, time=time, variables=variables, tools=tools)
        self.turn_end: TurnEnd | None = find_turn_end(tokenizer) if self.uses_template else None
        """The end of an assistant's turn in the template; None without a template."""
        self._text_end = TextEnd(
            tokenizer, None if self.turn_end is None else self.turn_end.token_id
        )
        self._tokenizer = tokenizer
        self.config = config
        """The section `data`, with the instruction that tools add."""
        self._has_tools = bool(tools)
        self._lengths: dict[Hashable, int] = {}
        self._bounds: dict[Hashable, int] = {}  # of prompts whose length has not been needed
        self._bound = TokenBound.of(tokenizer, add_special_tokens=not self.uses_template)
        self._cached_ids: dict[Hashable, Sequence[int]] = {}
        self._responses = ByteDecoder.of(tokenizer, skip_special_tokens=True)
        self._prompts = ByteDecoder.of(tokenizer, skip_special_tokens=False)
        self._lock = threading.Lock()  # fast tokenizers raise an error when two threads call them

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """Return the prompt's ids in full; without a template the tokenizer adds special tokens.

        Ids are cached: rendering and encoding take about a millisecond, and a run encodes each
        problem repeatedly.
        """
        key = _key(problem)
        if key in self._cached_ids:
            return tuple(self._cached_ids[key])
        text = self.render(problem)
        with self._lock:
            ids = tuple(self._tokenized([text])[0])
        self._lengths[key] = len(ids)
        if len(self._cached_ids) < MAX_CACHED_PROMPTS:
            self._cached_ids[key] = array("i", ids)
        return ids

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text from `decode_prompt`, which has its special tokens."""
        with self._lock:
            return tuple(
                self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            )

    def length(self, problem: Problem) -> int:
        """Return the number of tokens of the prompt, cached."""
        key = _key(problem)
        return self._lengths[key] if key in self._lengths else len(self.encode(problem))

    def measure(
        self,
        problems: Sequence[Problem],
        *,
        above: int = -1,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Return the number of tokens of the longest prompt if it is `above`, else 0.

        Every prompt is rendered, but one whose bytes show that it is not longer than `above` is not
        encoded.
        """
        waiting = {_key(problem): problem for problem in problems}
        waiting = {
            key: p
            for key, p in waiting.items()
            if key not in self._lengths and self._may_exceed(key, above)
        }
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
        longest = max((self._lengths.get(_key(problem), 0) for problem in problems), default=0)
        return longest if longest > above else 0

    def render(self, problem: Problem) -> str:
        """Return the prompt as text, with the template's special tokens.

        Raises DataError if it cannot be rendered.
        """
        if self.template is not None:
            return self._templated(problem, self.template)
        prompt = with_instruction(problem, self.config.instruction)
        if isinstance(prompt, str):
            return prompt
        if any(message["role"] == "assistant" for message in prompt):
            raise DataError(
                f"problem {problem.id}: a conversation with assistant messages cannot be rendered"
                " without a chat template; use data.chat_template=on with a model that has one"
            )
        return "\n\n".join(content_text(message) for message in prompt)

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], *, header: bool = True, **variables: Any
    ) -> str:
        """Return the text of chat messages, and the `header` of the assistant's next turn.

        Raises ValueError with the template's reason if it rejects them.
        """
        assert self.template is not None
        return self.template.render(messages, header=header, **variables)

    @property
    def time_read(self) -> datetime | None:
        """The local time that the chat template reads as now; None if it reads none."""
        reads_clock = self.template is not None and self.template.reads_clock
        return self.config.template_time if reads_clock else None

    def notes(self, problems: Sequence[Problem]) -> list[str]:
        """Return what may surprise in the template: it reads the date, or ignores columns."""
        if self.template is None:
            return [
                f"{name} is not shown to the model: no chat template is used"
                for name in _columns_of(problems)
            ]
        notes = []
        variables = self.template.variables_read
        if (time := self.time_read) is not None:
            notes.append(
                f"the chat template reads the clock, which shows {time.isoformat(' ')} in all prompts"
                " (in a run the time of its first start)"
            )
        if unread := sorted(self.config.chat_template_kwargs.keys() - variables):
            notes.append(
                f"the chat template does not read {', '.join(unread)} (data.chat_template_kwargs)"
            )
        columns = _columns_of(problems)
        if TOOLS in columns and "tools" not in variables:
            notes.append(
                "the chat template does not read tools: the column tools is not shown to the model"
            )
        elif TOOLS in columns and self._has_tools:
            notes.append("the column tools is not shown to the model: the environment has tools")
        texts = {problem.prompt for problem in problems if isinstance(problem.prompt, str)}
        if rendered := sum(self.template.rendered_prompt(text) is not None for text in texts):
            notes.append(
                f"{rendered} prompts are rendered with the chat template already, and are used as"
                " they are"
            )
        if unread := self._unread_keys(problems, self.template):
            notes.append(
                f"the chat template does not read {', '.join(unread)} of messages: the model does"
                " not see it"
            )
        return notes

    def _unread_keys(self, problems: Sequence[Problem], template: ChatTemplate) -> list[str]:
        """Return the message keys that the template ignores, by one problem per set of keys."""
        examples: dict[frozenset[str], Problem] = {}
        for problem in problems:
            if not isinstance(problem.prompt, str):
                examples.setdefault(
                    frozenset(key for message in problem.prompt for key in message), problem
                )
        prompts = [
            problem.prompt for problem in examples.values() if not isinstance(problem.prompt, str)
        ]
        return sorted({key for prompt in prompts for key in template.unread_keys(prompt)})

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response up to the first special token, where the answer ends."""
        ids = self._text_end.cut(ids)
        if self._responses is None:
            return self._text(ids, skip_special_tokens=True)
        return self._responses.decode(ids)

    def decode_prompt(self, ids: Sequence[int]) -> str:
        if self._prompts is None:
            return self._text(ids, skip_special_tokens=False)
        return self._prompts.decode(ids)

    def split_by_length(
        self, problems: Sequence[Problem], *, on_progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[Problem], int]:
        """Return the problems within `data.max_prompt_tokens`, in order, and the number of others.

        Raises DataError if all are longer.
        """
        limit = self.config.max_prompt_tokens
        longest = self.measure(problems, above=limit, on_progress=on_progress)
        if longest:
            short_enough = [p for p in problems if self._lengths.get(_key(p), 0) <= limit]
        else:
            short_enough = list(problems)
        if problems and not short_enough:
            raise DataError(
                f"all {len(problems)} prompts are longer than data.max_prompt_tokens={limit}; "
                f"the shortest has {min(map(self.length, problems))} tokens"
            )
        return short_enough, len(problems) - len(short_enough)

    def _may_exceed(self, key: Hashable, length: int) -> bool:
        return self._bounds.get(key, length + 1) > length

    def _tokenized(self, texts: Sequence[str]) -> list[Sequence[int]]:
        # a template contains the special tokens; lengths are checked here, and need no warning
        options = {"add_special_tokens": not self.uses_template, "verbose": False}
        rows = self._tokenizer(list(texts), **options)["input_ids"]
        begin = self._tokenizer.bos_token_id
        # the tokenizer adds the begin token also to a text that begins with it
        return [
            row[1:] if begin is not None and list(row[:2]) == [begin, begin] else row
            for row in rows
        ]

    def _templated(self, problem: Problem, template: ChatTemplate) -> str:
        rendered = self._rendered_already(problem, template)
        if rendered is not None:
            return rendered
        messages = chat_messages(
            problem, instruction=self.config.instruction, system=self.config.system
        )
        roles = ", ".join(message["role"] for message in messages)
        try:
            template.require_unrendered(messages)
            adapted = template.in_its_forms(messages)
            text = template.render(adapted, **template_columns(problem))
            self._require_no_none(adapted, text, template)
        except ValueError as error:
            reason = f"the model's chat template rejects messages of {roles}: {error}"
            raise DataError(f"problem {problem.id}: {reason}") from None
        except DataError as error:
            raise DataError(f"problem {problem.id}: {error}") from None
        return text

    def _rendered_already(self, problem: Problem, template: ChatTemplate) -> str | None:
        """Return the prompt of a problem whose text is a whole prompt in the template, or None."""
        rendered = (
            template.rendered_prompt(problem.prompt) if isinstance(problem.prompt, str) else None
        )
        added = {
            "data.instruction": self.config.instruction,
            "data.system": self.config.system,
            "data.chat_template_kwargs": self.config.chat_template_kwargs,
            "the columns for the template": template_columns(problem),
        }
        names = [name for name, value in added.items() if value]
        if rendered is not None and names:
            raise DataError(
                f"problem {problem.id}: its text is a prompt in the chat template already, so"
                f" {' and '.join(names)} would have no effect: leave it out, or give messages with"
                " role and content"
            )
        return rendered

    def _require_no_none(
        self, messages: Sequence[Message], text: str, template: ChatTemplate
    ) -> None:
        """Raise DataError if the template writes the word None where a message has no content."""
        if all(message.get("content") is not None for message in messages):
            return
        filled = [
            message if message.get("content") is not None else {**message, "content": ""}
            for message in messages
        ]
        if text.count("None") > template.render(filled).count("None"):
            raise DataError(
                "the model's chat template writes None for a message without content; "
                'give it an empty one, "content": ""'
            )

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with self._lock:
            options = {
                "skip_special_tokens": skip_special_tokens,
                "clean_up_tokenization_spaces": False,
            }
            return str(self._tokenizer.decode(list(ids), **options))


TOOLS = "tools"
"""The column with the schemas of a problem's tools, which the chat template gets."""


def template_columns(problem: Problem) -> dict[str, Any]:
    """What the columns of a problem give to the chat template: `tools`, and variables."""
    tools = problem.fields.get(TOOLS)
    variables = problem.fields.get(TEMPLATE_KWARGS)
    columns = dict(variables) if isinstance(variables, Mapping) else {}
    if _are_schemas(tools):
        columns[TOOLS] = tools
    return columns


def chat_request(problem: Problem, *, config: "DataConfig") -> dict[str, Any]:
    """Return the part of a chat completion's request that makes a server render the same prompt.

    `messages`, and where they are set `tools` and `chat_template_kwargs`.
    """
    columns = template_columns(problem)
    tools = columns.pop(TOOLS, None)
    variables = {**config.chat_template_kwargs, **columns}
    request: dict[str, Any] = {
        "messages": chat_messages(problem, instruction=config.instruction, system=config.system)
    }
    if tools:
        request[TOOLS] = tools
    if variables:
        request[TEMPLATE_KWARGS] = variables
    return request


def _are_schemas(tools: Any) -> bool:
    return (
        isinstance(tools, list) and bool(tools) and all(isinstance(tool, Mapping) for tool in tools)
    )


def _columns_of(problems: Sequence[Problem]) -> list[str]:
    """Return the columns for the chat template that some problem has."""
    return sorted({name for problem in problems for name in template_columns(problem)} & {TOOLS})


def _key(problem: Problem) -> Hashable:
    """What the prompt of a problem follows from."""
    columns = template_columns(problem)
    if isinstance(problem.prompt, str) and not columns:
        return problem.prompt
    prompt: str | list[dict[str, Any]]
    if isinstance(problem.prompt, str):
        prompt = problem.prompt
    else:
        prompt = [dict(message) for message in problem.prompt]
    return json.dumps([prompt, columns], sort_keys=True), "messages"


def chat_messages(
    problem: Problem, *, instruction: str = "", system: str | None = None
) -> list[dict[str, Any]]:
    """Return the problem as chat messages, with `system` first unless it has a system message."""
    prompt = with_instruction(problem, instruction)
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [dict(m) for m in prompt]
    if system is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def with_instruction(problem: Problem, instruction: str) -> Prompt:
    """Return the prompt with `instruction` on a new line of the text or the last user message."""
    if not instruction:
        return problem.prompt
    if isinstance(problem.prompt, str):
        return f"{problem.prompt}\n{instruction}"
    messages: list[Message] = list(problem.prompt)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        reason = "data.instruction is appended to the last user message, but the prompt has none"
        raise DataError(f"problem {problem.id}: {reason}")
    content = messages[last].get("content")
    if isinstance(content, list | tuple):
        messages[last] = {
            **messages[last],
            "content": [*content, {"type": "text", "text": f"\n{instruction}"}],
        }
    else:
        messages[last] = {**messages[last], "content": f"{content or ''}\n{instruction}"}
    return messages


class Encoder(Protocol):
    """Encodes problems as token ids, and decodes token ids to text."""

    def encode(self, problem: Problem) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_prompt(self, ids: Sequence[int]) -> str: ...
