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
_WORDS_FOR_NULL = ("none", "null", "~")
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


def find_turn_end(
    tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate | None = None
) -> TurnEnd:
    """Find the end of an assistant's turn by rendering one with the chat template.

    `template` is that of the tokenizer, with the variables that it may need; None: without any.
    """
    if template is None:
        template = ChatTemplate(tokenizer, time=datetime.now(), variables={})
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = template.render(template.in_its_forms(messages), header=False)
    except ValueError:
        rendered = ""
    text = ""
    if _ANSWER in rendered:
        text = rendered.rpartition(_ANSWER)[2]
    added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for i, token_id in enumerate(ids):
        if token_id not in added:
            continue
        # some tokenizers have blank tokens among the added ones
        token = str(tokenizer.decode([token_id], skip_special_tokens=False))
        if token.strip():
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
        """Find the special tokens of a tokenizer.

        Special tokens for unknown text and around a model's private reasoning end nothing.

        Args:
            tokenizer: the tokenizer.
            turn_end: a token that ends the text, special or not.
            part_of_text: names of special tokens that end nothing.
        """
        special = set(tokenizer.all_special_ids)
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                special.add(token_id)
        ends = set()
        for token_id in special:
            name = str(tokenizer.convert_ids_to_tokens(token_id))
            if not _ENDS_NOTHING.search(name) and name not in part_of_text:
                ends.add(token_id)
        if turn_end is not None:
            ends.add(turn_end)
        # the last entry is for all larger ids
        self._is_end = np.zeros(max(ends, default=0) + 2, np.bool_)
        self._is_end[list(ends)] = True

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids before the first that ends the text; all of them if none does."""
        indices = np.minimum(np.asarray(ids, np.int64), len(self._is_end) - 1)
        is_end = self._is_end[indices]
        if not is_end.any():
            return ids
        return ids[: int(is_end.argmax())]


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
        continues_answers: bool = True,
    ) -> None:
        """Prepare the encoding; nothing is rendered yet.

        Args:
            tokenizer: the model's tokenizer.
            config: the section `data`.
            tools: schemas of tools that the chat template must take.
            continues_answers: whether the model continues an assistant's message at the end of a
                prompt; otherwise it begins another turn.

        Raises:
            DataError: an option needs a chat template and there is none.
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
        self.turn_end: TurnEnd | None = None
        """The end of an assistant's turn in the template; None without a template."""
        end_token = None
        if self.uses_template:
            self.turn_end = find_turn_end(tokenizer, self.template)
            end_token = self.turn_end.token_id
        self._text_end = TextEnd(tokenizer, end_token)
        self._tokenizer = tokenizer
        self.config = config
        """The section `data`, with the instruction that tools add."""
        self._has_tools = bool(tools)
        self._continues_answers = continues_answers
        self._lengths: dict[Hashable, int] = {}
        self._bounds: dict[Hashable, int] = {}  # of prompts whose length has not been needed
        self._bound = TokenBound.of(tokenizer, add_special_tokens=not self.uses_template)
        self._cached_ids: dict[Hashable, Sequence[int]] = {}
        self._responses = ByteDecoder.of(tokenizer, skip_special_tokens=True)
        self._prompts = ByteDecoder.of(tokenizer, skip_special_tokens=False)
        self._lock = threading.Lock()  # fast tokenizers raise an error when two threads call them

    def encode_once(self, problem: Problem) -> tuple[int, ...]:
        """Return the prompt's ids as `encode` does, and keep nothing of them."""
        text = self.render(problem)
        with self._lock:
            return tuple(self._tokenized([text])[0])

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """Return the prompt's ids in full; without a template the tokenizer adds special tokens.

        Ids are cached: rendering and encoding take about a millisecond, and a run encodes each
        problem repeatedly.
        """
        key = _key(problem)
        if key in self._cached_ids:
            return tuple(self._cached_ids[key])
        ids = self.encode_once(problem)
        # `length` is also asked of prompts that are not cached
        self._lengths[key] = len(ids)
        if len(self._cached_ids) < MAX_CACHED_PROMPTS:
            # four bytes for each id, where a tuple takes at least eight
            self._cached_ids[key] = array("i", ids)
        return ids

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text from `decode_prompt`, which has its special tokens."""
        with self._lock:
            encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return tuple(encoded["input_ids"])

    def length(self, problem: Problem) -> int:
        """Return the number of tokens of the prompt, cached."""
        key = _key(problem)
        if key in self._lengths:
            return self._lengths[key]
        return len(self.encode(problem))

    def measure(
        self,
        problems: Sequence[Problem],
        *,
        above: int = -1,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Return the number of tokens of the longest prompt if it is `above`, else 0.

        Args:
            problems: the problems, whose prompts are all rendered.
            above: a number of tokens; a prompt whose bytes show that it has no more is not encoded.
            on_progress: called with the numbers of prompts that are measured and to measure.
        """
        unmeasured = {}
        for problem in problems:
            key = _key(problem)
            if key not in self._lengths and self._may_exceed(key, above):
                unmeasured[key] = problem
        keys = list(unmeasured)
        for start in range(0, len(keys), _BATCH):
            texts = {}
            for key in keys[start : start + _BATCH]:
                text = self.render(unmeasured[key])
                if self._bound is not None:
                    self._bounds[key] = self._bound(text)
                if self._may_exceed(key, above):
                    texts[key] = text
            if texts:
                with self._lock:
                    rows = self._tokenized(list(texts.values()))
                for key, row in zip(texts, rows, strict=True):
                    self._lengths[key] = len(row)
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
        adapted = self.template.in_its_forms(messages)
        return self.template.render(adapted, header=header, **variables)

    @property
    def time_read(self) -> datetime | None:
        """The local time that the chat template reads as now; None if it reads none."""
        reads_clock = self.template is not None and self.template.reads_clock
        return self.config.template_time if reads_clock else None

    def notes(self, problems: Sequence[Problem]) -> list[str]:
        """Return what may surprise in the template: it reads the date, or ignores columns."""
        columns = _columns_of(problems)
        if self.template is None:
            reason = "no chat template is used"
            return [f"{name} is not shown to the model: {reason}" for name in columns]
        notes = []
        system = self.config.system
        if system is not None and system.casefold() in _WORDS_FOR_NULL:
            notes.append(f"the system message is the text {system!r}; data.system=null sets none")
        variables = self.template.variables_read
        time = self.time_read
        if time is not None:
            notes.append(
                f"the chat template reads the clock, which shows {time.isoformat(' ')} in all prompts"
                " (in a run the time of its first start)"
            )
        unread_variables = sorted(self.config.chat_template_kwargs.keys() - variables)
        if unread_variables:
            notes.append(
                f"the chat template does not read {', '.join(unread_variables)}"
                " (data.chat_template_kwargs)"
            )
        if TOOLS in columns and "tools" not in variables:
            notes.append(
                "the chat template does not read tools: the column tools is not shown to the model"
            )
        elif TOOLS in columns and self._has_tools:
            notes.append("the column tools is not shown to the model: the environment has tools")
        texts = {problem.prompt for problem in problems if isinstance(problem.prompt, str)}
        num_rendered = sum(self.template.rendered_prompt(text) is not None for text in texts)
        if num_rendered:
            notes.append(
                f"{num_rendered} prompts are rendered with the chat template already, and are used"
                " as they are"
            )
        num_begun = sum(problem.begun_answer is not None for problem in problems)
        if num_begun and self._continues_answers:
            notes.append(
                f"{num_begun} prompts end with the beginning of the answer, which the model"
                " continues; a response is what follows it"
            )
        unread_keys = self._unread_keys(problems, self.template)
        if unread_keys:
            notes.append(
                f"the chat template does not read {', '.join(unread_keys)} of messages: the model"
                " does not see it"
            )
        return notes

    def _unread_keys(self, problems: Sequence[Problem], template: ChatTemplate) -> list[str]:
        """Return the message keys that the template ignores, by one problem per set of keys."""
        examples: dict[frozenset[str], Sequence[Message]] = {}
        for problem in problems:
            if not isinstance(problem.prompt, str):
                keys = frozenset(key for message in problem.prompt for key in message)
                examples.setdefault(keys, problem.prompt)
        unread: set[str] = set()
        for prompt in examples.values():
            unread.update(template.unread_keys(prompt))
        return sorted(unread)

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
        if begin is None:
            return rows
        # the tokenizer adds the begin token also to a text that begins with it
        return [row[1:] if list(row[:2]) == [begin, begin] else row for row in rows]

    def _templated(self, problem: Problem, template: ChatTemplate) -> str:
        rendered = self._rendered_already(problem, template)
        if rendered is not None:
            return rendered
        messages = chat_messages(
            problem, instruction=self.config.instruction, system=self.config.system
        )
        roles = ", ".join(message["role"] for message in messages)
        try:
            # before rendering: marks in the text would be taken for those of turns
            template.require_unrendered(messages)
            adapted = template.in_its_forms(messages)
            is_open = self._continues_answers and problem.begun_answer is not None
            text = template.render(adapted, is_open=is_open, **template_columns(problem))
            self._require_no_none(adapted, text, template)
        except ValueError as error:
            reason = f"the model's chat template rejects messages of {roles}: {error}"
            raise DataError(f"problem {problem.id}: {reason}") from None
        except DataError as error:
            raise DataError(f"problem {problem.id}: {error}") from None
        return text

    def _rendered_already(self, problem: Problem, template: ChatTemplate) -> str | None:
        """Return the prompt of a problem whose text is a whole prompt in the template, or None."""
        if not isinstance(problem.prompt, str):
            return None
        rendered = template.rendered_prompt(problem.prompt)
        if rendered is None:
            return None
        additions = {
            "data.instruction": self.config.instruction,
            "data.system": self.config.system,
            "data.chat_template_kwargs": self.config.chat_template_kwargs,
            "the columns for the template": template_columns(problem),
        }
        names = [name for name, value in additions.items() if value]
        if names:
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
        filled = []
        has_gap = False
        for message in messages:
            if message.get("content") is None:
                has_gap = True
                filled.append({**message, "content": ""})
            else:
                filled.append(dict(message))
        # a text of the messages may itself hold the word
        if has_gap and text.count("None") > template.render(filled).count("None"):
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
    """Return what the columns of a problem give to the chat template: `tools`, and variables."""
    tools = problem.fields.get(TOOLS)
    variables = problem.fields.get(TEMPLATE_KWARGS)
    columns = {}
    if isinstance(variables, Mapping):
        columns = dict(variables)
    if _are_schemas(tools):
        columns[TOOLS] = tools
    return columns


def chat_request(problem: Problem, *, config: "DataConfig") -> dict[str, Any]:
    """Return the part of a chat completion's request that makes a server render the same prompt.

    `messages`, where they are set `tools` and `chat_template_kwargs`, and the fields that make it
    continue the beginning of an answer.
    """
    columns = template_columns(problem)
    tools = columns.pop(TOOLS, None)
    variables = {**config.chat_template_kwargs, **columns}
    request: dict[str, Any] = {
        "messages": chat_messages(problem, instruction=config.instruction, system=config.system)
    }
    if problem.begun_answer is not None:
        # fields of vLLM and SGLang
        request |= {"add_generation_prompt": False, "continue_final_message": True}
    if tools:
        request[TOOLS] = tools
    if variables:
        request[TEMPLATE_KWARGS] = variables
    return request


def _are_schemas(tools: Any) -> bool:
    if not isinstance(tools, list) or not tools:
        return False
    return all(isinstance(tool, Mapping) for tool in tools)


def _columns_of(problems: Sequence[Problem]) -> list[str]:
    """Return the columns for the chat template that some problem has."""
    has_tools = any(TOOLS in template_columns(problem) for problem in problems)
    return [TOOLS] if has_tools else []


def _key(problem: Problem) -> Hashable:
    """Return what the prompt of a problem follows from, for caches."""
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
        messages = [dict(message) for message in prompt]
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
    user_indices = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not user_indices:
        reason = "data.instruction is appended to the last user message, but the prompt has none"
        raise DataError(f"problem {problem.id}: {reason}")
    last = user_indices[-1]
    content: Any = messages[last].get("content")
    if isinstance(content, list | tuple):
        content = [*content, {"type": "text", "text": f"\n{instruction}"}]
    else:
        content = f"{content or ''}\n{instruction}"
    messages[last] = {**messages[last], "content": content}
    return messages


class Encoder(Protocol):
    """Encodes problems as token ids, and decodes token ids to text."""

    def encode(self, problem: Problem) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_prompt(self, ids: Sequence[int]) -> str: ...
