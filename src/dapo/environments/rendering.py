"""The tokens between the turns of an episode, which are appended to the sampled ones."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dapo.core.errors import DataError
from dapo.core.ranges import Ranges
from dapo.core.text import quoted
from dapo.data.prompts import PromptEncoder, TextEnd, chat_messages, template_columns
from dapo.environments.calls import CALL_MARKS, EXAMPLES, CallForm, CallReader, ToolCall, tool_text
from dapo.environments.thoughts import THOUGHT_MARKS
from dapo.types import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo.config import DataConfig

Chat: TypeAlias = list[dict[str, Any]]

_START = "\udc00"
_END = "\udc01"
"""Surrogates around the text of an observation in a rendering; no text that is encoded has any."""
_TURN = "\udc02"
"""The text of a turn whose end a rendered conversation shows."""
_CALL = ToolCall("sentinel_tool", {"sentinel": _TURN})
_CALL_PARAMETERS = {
    "type": "object",
    "properties": {"sentinel": {"type": "string"}},
    "required": ["sentinel"],
}
_CALL_SCHEMA = {
    "type": "function",
    "function": {"name": _CALL.name, "parameters": _CALL_PARAMETERS},
}
_THOUGHT = "a thought"
_QUESTION = "a question"
_ANSWER = "an answer"
_TURNS_OF_A_PROOF = 8
"""The turns of the longest conversation that proves that a template keeps earlier turns."""
_MARKS_OF_A_TEMPLATE = 48
"""The most string constants of a template that are tried in a turn."""
_PAIRED_MARKS = 12  # of those constants, also tried in pairs around a thought
_SHOWN_TOKENS = 24
"""The most tokens that are shown of a place where two encodings of one text differ."""
_CHARS_PER_TOKEN = 16
"""A text with more characters per token of its limit is cut first, as encoding it takes seconds."""


@dataclass(frozen=True)
class Difference:
    """How a conversation differs from the template's rendering of its messages."""

    kind: Literal["text", "white space", "tokens"]
    """The first difference is one of text, of white space alone, or of the tokens of equal text."""
    description: str


@dataclass(frozen=True)
class Observed:
    """What stands behind a turn of the policy."""

    ids: tuple[int, ...]
    messages: Sequence[Mapping[str, str]]
    """The observation's messages, with their texts as far as the policy reads them."""


class TurnRenderer:
    r"""Gives the ids behind an assistant's turn: the observation in the chat template, and the next
    turn's header.

    The constructor renders conversations to prove that the template can be continued: it leaves
    earlier turns as sampled, but for white space around them, and what it puts behind a turn does
    not depend on the history. Without a chat template, an observation stands between two newlines.

    Example: with ChatML, `following("8798", ended=True)` are the ids of
    `\n<|im_start|>user\n8798<|im_end|>\n<|im_start|>assistant\n`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: "DataConfig",
        *,
        tools: Sequence[dict[str, Any]] = (),
        history: Literal["exact", "append"] = "exact",
        roles: Sequence[str] | None = None,
    ) -> None:
        """Find the template's end of a turn and form of calls, and prove that it can be continued.

        Args:
            tokenizer: the model's tokenizer.
            config: the section `data`.
            tools: schemas by `calls.tool_schema`; the prompts show them.
            history: `append` accepts a template that rewrites earlier turns, too, and keeps them as
                sampled.
            roles: the roles that observations have; by default `user`, and with tools also `tool`.

        Raises:
            DataError: the template rewrites earlier turns, cannot be continued, or writes calls in
                an unknown form.
        """
        self._tokenizer = tokenizer
        self._config = config
        self.is_exact = history == "exact"
        """Whether a conversation of turns and observations is as the template renders it."""
        self.name = (
            "the chat template of"
            f" {tokenizer.name_or_path.rstrip('/').rpartition('/')[2] or 'the model'}"
        )
        self.prompts = PromptEncoder(tokenizer, config, continues_answers=False)
        """Encodes prompts with the tools: in the template, or at the end of the problem.

        A run has no other encoder.
        """
        self.calls: CallReader | None = None
        """Reads the tool calls of a turn; None without tools."""
        if tools:
            self._add_tools(config, tools)
        end = self.prompts.turn_end
        self._turn_end = TextEnd(
            tokenizer, None if end is None else end.token_id, part_of_text=CALL_MARKS
        )
        self._end = "" if end is None else self._token_text(end.token_id)
        self._before_end = end.text.partition(self._end)[0] if end is not None and self._end else ""
        self._anchor = self._end or self._token_text(tokenizer.eos_token_id)
        self._find_special_texts()
        self.begun = begun_text(self.prompts)
        """The beginning of each turn behind its header in the prompt, such as `<think>`, or ""."""
        if self.calls is not None:
            self.calls = CallReader(self.calls.form, tools, begun=self.begun)
        self.roles = {role: role for role in roles or (["user", "tool"] if tools else ["user"])}
        """The template's role for each role of an observation: `tool` may become `user`."""
        if self.prompts.uses_template:
            if "tool" in self.roles and self._behind([_message("tool")]) is None:
                self.roles["tool"] = "user"
            for role in sorted(set(self.roles.values())):
                behind = self._prove_continuation(role)
                if history == "exact":
                    self._prove_history(role, behind)
        self.overhead = max(len(self.following("x", ended=True, role=role)) for role in self.roles)
        """The number of tokens around the text of one observation."""

    def following(
        self,
        observation: str | Sequence[Message],
        *,
        ended: bool,
        role: str = "user",
        end_id: int | None = None,
        limit: int | None = None,
    ) -> tuple[int, ...]:
        """Return the ids behind a sampled turn, see `observed`."""
        return self.observed(observation, ended=ended, role=role, end_id=end_id, limit=limit).ids

    def observed(
        self,
        observation: str | Sequence[Message],
        *,
        ended: bool,
        role: str = "user",
        end_id: int | None = None,
        limit: int | None = None,
    ) -> Observed:
        """Return the ids behind a sampled turn, and the texts that they show.

        Args:
            observation: messages with `role` and `content`, or the text of one message.
            ended: the turn's last id is its end; otherwise the end comes first.
            role: the role of an observation that is a text.
            end_id: the turn's last id, which is not repeated if the next message begins with it, as
                in GLM's format.
            limit: the most tokens of all texts, which are shortened; the result has at most `limit
                + overhead`.

        Raises:
            DataError: a message has another role or no text, or the template rejects the messages.
        """
        if isinstance(observation, str):
            observation = [{"role": role, "content": observation}]
        count = len(observation)
        if limit is not None and count > limit + self.overhead:  # rendering them takes minutes
            raise DataError(
                f"an observation of {count:,} messages is longer than {limit} tokens; join them"
            )
        messages = [self._checked(message) for message in observation]
        room = limit
        while True:
            excerpts = messages
            if room is not None:
                excerpts = self._shortened(messages, room)
            ids = self._encoded(self._text_behind(excerpts), ended=ended)
            if end_id is not None and ids[:1] == (end_id,):
                ids = ids[1:]
            if limit is None or room is None or len(ids) <= limit + self.overhead:
                return Observed(ids, excerpts)
            if room == 0:
                raise DataError(
                    f"{len(messages)} messages without text are longer than {limit} tokens"
                )
            room = max(0, room - (len(ids) - limit - self.overhead))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a turn up to its end; with tools, special tokens of a call stay."""
        if self.calls is None:
            return self.prompts.decode(ids)
        return self.prompts.decode_prompt(self._turn_end.cut(ids))

    def shows_tools(self, messages: Chat) -> bool:
        """Return True if the template writes all tool calls of the messages, and all results.

        Many templates leave them out without a word.
        """
        words = []
        marked: Chat = []
        for message in messages:
            marked.append(dict(message))
            if message["role"] == "tool":
                words.append(f"result{len(marked)}.")
                marked[-1]["content"] = words[-1]
            words += [call["function"]["name"] for call in message.get("tool_calls", ())]
        text = self._render(marked)
        return text is not None and all(text.count(word) >= words.count(word) for word in words)

    def shortened(self, text: str, limit: int) -> str:
        """Return the text in at most `limit` tokens: both ends, and the size of the cut."""
        text = without_surrogates(text)
        half = limit * _CHARS_PER_TOKEN // 2
        by_tokens = len(text) <= 2 * half
        head = self._plain(text if by_tokens else text[:half])
        if by_tokens and len(head) <= limit:
            return text
        tail = head if by_tokens else self._plain(text[len(text) - half :])
        num_tokens = limit
        while num_tokens > 0:
            # half of a character
            first = self.prompts.decode_prompt(head[: (num_tokens + 1) // 2]).rstrip("\ufffd")
            last = self.prompts.decode_prompt(tail[len(tail) - num_tokens // 2 :]).lstrip("\ufffd")
            count = f"{len(text) - len(first + last):,} characters"
            if by_tokens:
                count = f"{len(head) - num_tokens:,} tokens"
            result = f"{first}\n[... {count} left out ...]\n{last}"
            excess = len(self._plain(result)) - limit
            if excess <= 0:
                return result
            num_tokens -= excess
        starts = (
            self.prompts.decode_prompt(head[:length]).rstrip("\ufffd")
            for length in range(limit, 0, -1)
        )
        return next((start for start in starts if len(self._plain(start)) <= limit), "")

    # --- tools

    def _add_tools(self, config: "DataConfig", tools: Sequence[dict[str, Any]]) -> None:
        """Put the tools into the prompts, and find the form of their calls."""
        plain = self.prompts
        self.prompts = PromptEncoder(self._tokenizer, config, tools=tools, continues_answers=False)
        prompt = self._render(self._history(1)) if plain.uses_template else None
        if prompt is not None and all(tool["function"]["name"] in prompt for tool in tools):
            form = self._call_form(default="hermes" if "<tool_call>" in prompt else None)
        else:
            self.prompts = plain
            form = self._call_form(default="hermes")
            instruction = "\n\n".join(filter(None, [tool_text(tools, form), config.instruction]))
            self.prompts = PromptEncoder(
                self._tokenizer,
                config.model_copy(update={"instruction": instruction}),
                continues_answers=False,
            )
        self.calls = CallReader(form, tools)

    def _call_form(self, *, default: CallForm | None) -> CallForm:
        """Return the form in which the template writes a call, `default` if it writes none.

        Raises DataError.
        """
        prompt = self._render(self._history(1)) or ""
        unread_call = None
        for turn in _calling_messages(1):
            text = self._render([*self._history(1), turn], header=False)
            if text is None:
                continue
            call = text.rpartition(_QUESTION)[2]
            if _CALL.name not in call:
                continue
            if CallReader("hermes", [_CALL_SCHEMA]).read(call) == [_CALL]:
                return "hermes"
            llama = CallReader("llama", [_CALL_SCHEMA])
            if text.startswith(prompt) and llama.read(text[len(prompt) :]) == [_CALL]:
                return "llama"
            unread_call = unread_call or call
        if default is None or unread_call is not None:
            fault = "has tools, and writes no calls"
            if unread_call is not None:
                fault = f"writes tool calls as {quoted(unread_call)}"
            raise DataError(
                f"{self.name} {fault}; calls are read as {' or '.join(EXAMPLES.values())}"
            )
        return default

    # --- the text behind a turn

    def _history(self, questions: int, answer: str = _ANSWER) -> Chat:
        """Return a conversation of this number of questions, all but the last with an answer."""
        turn = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": answer}]
        messages = (turn * questions)[:-1]
        if self._config.system is None:
            return messages
        return [{"role": "system", "content": self._config.system}, *messages]

    def _render(self, messages: Chat, *, header: bool = True, **variables: Any) -> str | None:
        """Return the text of messages; None if the template rejects them."""
        from jinja2 import TemplateError

        if not self.prompts.uses_template:
            return None
        try:
            return self.prompts.render_messages(messages, header=header, **variables)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return None

    def _checked(self, message: Mapping[str, object]) -> dict[str, str]:
        """Return the role in the template, the text and the name of an observation's message.

        Raises DataError.
        """
        role = message.get("role")
        content = message.get("content")
        if role not in self.roles or not isinstance(content, str):
            expected = (
                f"messages with a text as content and one of the roles {', '.join(self.roles)}"
            )
            raise DataError(f"an observation has {expected}; got {quoted(dict(message))}")
        name = re.sub(r"\W", "_", str(message.get("name", "tool")))
        return {"role": self.roles[str(role)], "content": without_surrogates(content), "name": name}

    def _shortened(self, messages: Sequence[Mapping[str, str]], limit: int) -> list[dict[str, str]]:
        """Return the messages with `limit` tokens of text in all; long texts get equal shares."""
        by_index: dict[int, dict[str, str]] = {}
        for i in sorted(range(len(messages)), key=lambda i: len(messages[i]["content"])):
            share = limit // (len(messages) - len(by_index))
            content = self.shortened(messages[i]["content"], share)
            limit -= len(self._plain(content))
            by_index[i] = {**messages[i], "content": content}
        return [by_index[i] for i in range(len(messages))]

    def _text_behind(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text behind a turn, with observations between marks.

        Raises DataError if the template rejects them.
        """
        if not self.prompts.uses_template:
            return "\n" + "\n".join(_marked(message["content"]) for message in messages) + "\n"
        # some templates want roles to alternate
        joined = "\n".join(message["content"] for message in messages)
        for form in (messages, [{"role": "user", "content": joined}]):
            text = self._behind(
                [_message(number=number, **message) for number, message in enumerate(form)]
            )
            if text is not None:
                return text
        roles = [message["role"] for message in messages]
        raise DataError(f"{self.name} rejects an observation of {', '.join(roles)}")

    def _behind(
        self, messages: Chat, *, history: Chat | None = None, content: str = _TURN, **variables: Any
    ) -> str | None:
        """Return the template's text behind a turn; None if it rejects or loses a message."""
        count = sum(_START in message["content"] for message in messages)
        results = sum(message["role"] == "tool" for message in messages)
        calling = _calling_messages(results, content.removesuffix(_TURN))
        for turn in [*calling, {"role": "assistant", "content": content}]:
            text = self._render([*(history or self._history(1)), turn, *messages], **variables)
            if text is None or _TURN not in text or text.count(_START) != count:
                continue
            behind = text.rpartition(_TURN)[2]
            end, separator, following = (
                behind.partition(self._end) if self._end else (behind, "", "")
            )
            if separator and _START not in end:
                return following
            if "tool_calls" not in turn:
                return behind  # nothing ends a turn inside of a conversation
        return None

    # --- the proof

    def _prove_continuation(self, role: str) -> str:
        """Return the text behind a turn, which has the same tokens alone, for all histories.

        Raises DataError if it does not.
        """
        observation = [_message(role)]
        expected = self._behind(observation)
        if expected is None:
            raise DataError(
                f"{self.name} rejects or leaves out a message of role {role} behind a turn"
            )
        texts = {}
        for n in (2, 3):
            text = self._behind(observation, history=self._history(n))
            texts[f"a history of {2 * n - 1} messages"] = text
        for opening, close in THOUGHT_MARKS:
            thought = f"{opening}\n{_THOUGHT}\n{close}\n\n"
            earlier = self._behind(observation, history=self._history(2, f"{thought}{_ANSWER}"))
            texts[f"thoughts in {opening}"] = self._behind(observation, content=f"{thought}{_TURN}")
            texts[f"earlier thoughts in {opening}"] = earlier
        texts["an earlier empty turn"] = self._behind(observation, history=self._history(2, ""))
        for turn in _calling_messages(1):
            history = [
                *self._history(1),
                turn,
                _message("tool"),
                {"role": "assistant", "content": _ANSWER},
                *self._history(1),
            ]
            text = self._render(history)
            if text is not None:
                texts["earlier tool calls"] = (
                    self._behind(observation, history=history) if _TURN in text else None
                )
        for cause, text in texts.items():
            if text is None and cause.startswith("a history"):
                raise DataError(
                    f"{self.name} rejects {cause} behind which a turn and a message of {role} come"
                )
            if text is not None and text != expected:
                differ = f"{quoted(_unmarked(expected))} became {quoted(_unmarked(text))}"
                raise DataError(f"what {self.name} puts behind a turn depends on {cause}: {differ}")
        beginning = f"{self._render(self._history(1))}{_ANSWER}{self._before_end}{self._end}"
        all_ids = self._ids(beginning + _unmarked(expected))
        beginning_ids = self._ids(beginning)
        if self._end and all_ids != beginning_ids + self._encoded(expected, ended=True):
            raise DataError(
                f"the tokens that {self.name} puts behind a turn depend on the text before them"
            )
        return expected

    def _prove_history(self, role: str, behind: str) -> None:
        """Raise DataError unless a conversation is its prompt, turns and the texts behind them."""
        history = self._history(1)
        prompt = self._render(history) or ""
        for removed, messages, sampled in self._samples(role, prompt):
            self._require_kept(history, prompt, role, behind, removed, messages, sampled)

    def require_exact(self, problems: Sequence[Problem]) -> None:
        """Raise DataError if the template changes these problems' prompts or turns behind them.

        The constructor proves this only for prompts of one message, behind the run's system
        message.
        """
        if not self.prompts.uses_template:
            return
        for problem in problems:
            self.require_same_behind(problem)
        for problem in problems if self.is_exact else ():
            history: Chat = list(self._messages(problem))
            prompt = self.prompts.render(problem)
            columns = template_columns(problem)
            for role in sorted(set(self.roles.values())):
                behind = self._behind([_message(role)], history=history, **columns)
                if behind is None:
                    raise DataError(
                        f"{self.name} rejects a turn and a message of {role} behind problem"
                        f" {problem.id}"
                    )
                for removed, messages, sampled in self._samples(role, prompt):
                    if not removed and sampled:
                        self._require_kept(
                            history, prompt, role, behind, removed, messages, sampled, columns
                        )

    def require_same_behind(self, problem: Problem) -> None:
        """Raise DataError if a problem's columns change what the template puts behind a turn."""
        columns = template_columns(problem)
        if not columns:
            return
        history = list(self._messages(problem))
        for role in sorted(set(self.roles.values())):
            expected = self._behind([_message(role)], history=history)
            behind = self._behind([_message(role)], history=history, **columns)
            if behind != expected:
                raise DataError(
                    f"what {self.name} puts behind a turn depends on the columns of problem"
                    f" {problem.id}: {quoted(_unmarked(expected or ''))} became"
                    f" {quoted(_unmarked(behind or ''))}; leave out {' and '.join(columns)}, or set"
                    " data.chat_template_kwargs for all problems"
                )

    def difference(
        self,
        problem: Problem,
        episode: Sequence[Message],
        ids: Sequence[int],
        *,
        turns: Ranges = (),
    ) -> Difference | None:
        """Describe how a conversation differs from the template's rendering; None if it does not.

        The ids are compared. If they differ, texts name the first difference: another text, other
        white space, or the same text in other tokens.

        Args:
            problem: the episode's problem, with the prompt that was encoded.
            episode: the messages behind the prompt, without the last turn.
            ids: the ids of the prompt and of these messages, up to the header of the last turn.
            turns: the ranges in `ids` that the policy has sampled.

        A conversation that the template rejects gives None, and so does a problem whose text is a
        whole prompt already.
        """
        columns = template_columns(problem)
        prompt = self._messages(problem)
        answers = [{**message, "role": self._role(message["role"])} for message in episode]
        if self._render(prompt, **columns) != self.prompts.render(problem):
            return None
        text = self._render([*prompt, *answers], **columns)
        if text is None:
            return None
        rendered_ids = self._ids(text)
        if rendered_ids == tuple(ids):
            return None
        sent = self.prompts.decode_prompt(ids)
        sent_text = _without_blanks(sent)
        rendered_text = _without_blanks(text)
        if sent_text != rendered_text:
            at = _first_difference(sent_text, rendered_text)
            own = _around(text, at)
            here = _around(sent, at)
            return Difference(
                "text", f"{quoted(own)} in its own rendering, and {quoted(here)} here"
            )
        place = _place(turns, _first_difference(ids, rendered_ids))
        if sent != text:
            at = _first_difference(sent, text)
            own = text[max(0, at - 20) : at + 20]
            here = sent[max(0, at - 20) : at + 20]
            return Difference(
                "white space",
                f"{place}: {quoted(own)} in its own rendering, and {quoted(here)} here",
            )
        return Difference("tokens", f"{place}: {self._other_tokens(ids, rendered_ids)}")

    def _other_tokens(self, ids: Sequence[int], rendered_ids: Sequence[int]) -> str:
        """Describe where two encodings of one text first differ."""
        start = _first_difference(ids, rendered_ids)
        end = start + 1
        rendered_end = start + 1
        while True:
            text = self.prompts.decode_prompt(ids[start:end])
            rendered_text = self.prompts.decode_prompt(rendered_ids[start:rendered_end])
            is_whole = text == rendered_text and "\ufffd" not in text
            if is_whole or max(end, rendered_end) - start >= _SHOWN_TOKENS:
                break
            if len(text) < len(rendered_text) and end < len(ids):
                end += 1
            elif rendered_end < len(rendered_ids):
                rendered_end += 1
            elif end < len(ids):
                end += 1
            else:
                break
        own = list(rendered_ids[start:rendered_end])
        here = list(ids[start:end])
        return f"{quoted(text)} is the tokens {own} in its own rendering, and {here} here"

    def _role(self, role: str) -> str:
        return self.roles.get(role, role)

    def _messages(self, problem: Problem) -> Chat:
        """Return the messages of a problem's prompt, with the run's instruction and system text."""
        config = self.prompts.config
        return [
            dict(message)
            for message in chat_messages(
                problem, instruction=config.instruction, system=config.system
            )
        ]

    def _require_kept(
        self,
        history: Chat,
        prompt: str,
        role: str,
        behind: str,
        removed: str,
        messages: Chat,
        sampled: str,
        columns: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Raise DataError unless turns of this text stay as they are in all conversations."""
        words = [*sampled.split(), *self._before_end.split(), self._end]
        turn = r"\s*" + r"\s*".join(map(re.escape, words)) + re.escape(behind)
        is_short = bool(removed)
        for count in (2,) if is_short else (2, _TURNS_OF_A_PROOF):
            texts = [
                self._render([*history, *[message, _message(role)] * count], **columns)
                for message in messages
            ]
            if any(
                text is not None and re.fullmatch(re.escape(prompt) + turn * count, text)
                for text in texts
            ):
                continue
            if removed:
                change = f'removes "{removed}..." from earlier turns'
            else:
                text = _unmarked(texts[0] or "nothing")
                example = f"{quoted(prompt + sampled)} became {quoted(text)}"
                change = f"rewrites earlier turns ({example})"
            advice = "environment.history=append keeps them as sampled"
            raise DataError(f"{self.name} {change}; {advice}")

    def _template_marks(self) -> list[str]:
        """Return the template's string constants that look like marks and may stand in a turn."""
        from jinja2 import Environment, TemplateError

        template = self._tokenizer.chat_template
        templates = template.values() if isinstance(template, dict) else [template]
        marks: dict[str, None] = {}
        for source in templates:
            try:
                tokens = list(Environment().lex(str(source)))
            except TemplateError:
                continue
            for _, kind, value in tokens:
                mark = value[1:-1].replace("\\n", "\n").strip() if kind == "string" else ""
                if re.search(r"[^\w\s.,:;!?'\"%-]", mark) and len(mark) > 1:
                    marks[mark] = None
        return [mark for mark in marks if self._stays_in_turn(mark)][:_MARKS_OF_A_TEMPLATE]

    def _own_pairs(self) -> list[tuple[str, str]]:
        """Return pairs of marks among the template's string constants, without those of calls."""
        closing = [
            mark
            for mark in self._template_marks()
            if re.match(r"[^\w\s]+/\w", mark) and "tool" not in mark
        ]
        return [(mark.replace("/", "", 1), mark) for mark in closing]

    def _stays_in_turn(self, text: str) -> bool:
        """Return True if no token of a text ends the turn."""
        ids = self._ids(text)
        return len(self._turn_end.cut(ids)) == len(ids)

    def _samples(self, role: str, prompt: str) -> Iterator[tuple[str, Chat, str]]:
        """Yield turns: the mark of what may be removed, messages for a turn, its sampled text."""
        begun = self.begun
        marks = [pair for pair in THOUGHT_MARKS if pair[0] in begun] or list(THOUGHT_MARKS)
        calling = [
            turn
            for turn in _calling_messages(1)
            if _TURN in (self._render([*self._history(1), turn]) or "")
        ]
        if role == "tool" and calling:
            known_marks = {mark for pair in marks for mark in pair}
            marks += [pair for pair in self._own_pairs() if not known_marks.intersection(pair)]
            if self.calls is not None and self.calls.form == "llama":
                marks = []  # the call is the whole turn
            if not begun.strip():
                marks = [("", ""), *marks]
            for opening, close in marks:
                thought = f"{opening}\n{_THOUGHT}\n{close}\n\n" if opening else ""
                turn = {**calling[0], "content": thought}
                text = self._render([*self._history(1), turn, _message(role)]) or ""
                is_intact = text.startswith(prompt) and (not opening or _THOUGHT in text)
                sampled = thought
                if is_intact and self._end:
                    sampled = text[len(prompt) :].partition(self._end)[0]
                yield opening, [turn], sampled
            return
        thoughts = []
        for opening, close in marks:
            beginning = "" if opening in begun else opening
            thoughts.append((opening, f"{beginning}\n{_THOUGHT}\n{close}\n\n{_ANSWER}"))
        constants = self._template_marks()
        alone = [(mark, f"{_THOUGHT}\n{mark}\n\n{_ANSWER}") for mark in constants]
        paired = constants[:_PAIRED_MARKS]
        pairs = [
            (o, f"{o}\n{_THOUGHT}\n{c}\n\n{_ANSWER}") for o in paired for c in paired if o != c
        ]
        lines = f"{_ANSWER}\n\nof several lines\n- one\n- two"
        for removed, sampled in [("", _ANSWER), *thoughts, ("", ""), ("", lines), *alone, *pairs]:
            contents = dict.fromkeys([sampled, begun + sampled])
            yield (
                removed,
                [{"role": "assistant", "content": content} for content in contents],
                sampled,
            )

    # --- tokens

    def _ids(self, text: str) -> tuple[int, ...]:
        return self.prompts.encode_rendered(text)

    def _plain(self, text: str) -> tuple[int, ...]:
        """Return the ids of an observation alone."""
        return self._encoded(_marked(text), ended=True)

    def _encoded(self, text: str, *, ended: bool) -> tuple[int, ...]:
        """Return the ids of a text behind a turn; text between marks gives no special tokens."""
        beginning = self._anchor if ended else f"{self._before_end}{self._end}"
        # of the template and of observations, by turns
        segments = re.split(f"[{_START}{_END}]", text)
        expected = self._structure(self._ids(beginning + "x".join(segments[::2])))
        pieces = [beginning]
        for i, segment in enumerate(segments):
            for j, part in enumerate(self._special_texts.split(segment) if i % 2 else [segment]):
                if j % 2:
                    pieces += [*part, ""]  # a single character is not a special token
                else:
                    pieces[-1] += part
        ids = [token_id for piece in pieces for token_id in self._ids(piece)]
        # a special token that is found in normalized text, or across a border
        if self._structure(ids) != expected:
            ids = list(self._ids(beginning + segments[0]))
            for observation, template in zip(segments[1::2], segments[2::2], strict=True):
                for character in observation:
                    character_ids = self._ids(character)
                    ids += [i for i in character_ids if i not in self._special_ids]
                ids += self._ids(template)
        return tuple(ids[1:] if ended and self._anchor else ids)

    def _structure(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._special_ids]

    def _find_special_texts(self) -> None:
        """Collect the special tokens, and added ones like marks, that observations cannot contain.

        Added tokens of letters, digits and white space are text, and so is the token for unknown
        text.
        """
        tokens = {
            i: (token.content, token.special)
            for i, token in self._tokenizer.added_tokens_decoder.items()
        }
        tokens |= {
            i: (str(self._tokenizer.convert_ids_to_tokens(i)), True)
            for i in self._tokenizer.all_special_ids
        }
        special_texts = {}
        for i, (text, special) in tokens.items():
            is_unknown = i == self._tokenizer.unk_token_id and "unk" in text.lower()
            if not is_unknown and (special or re.search(r"[^\w\s]", text)):
                special_texts[i] = text
        self._special_ids = set(special_texts)
        texts = sorted(filter(str.strip, special_texts.values()), key=len, reverse=True)
        self._special_texts = re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def _token_text(self, token_id: int | None) -> str:
        """Return the text that is encoded as this added token; empty if there is none."""
        added = None if token_id is None else self._tokenizer.added_tokens_decoder.get(token_id)
        if added is None or self._ids(added.content) != (token_id,):
            return ""
        return str(added.content)


def begun_text(prompts: PromptEncoder) -> str:
    """Return the text that the template puts behind the header of the turn that it asks for.

    It is often empty.
    """
    from jinja2 import TemplateError

    if not prompts.uses_template:
        return ""
    question = {"role": "user", "content": _QUESTION}
    try:
        prompt = prompts.render_messages([question])
        answered = prompts.render_messages(
            [question, {"role": "assistant", "content": _TURN}, question], header=False
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return ""
    header, separator, _ = answered.partition(_TURN)
    return prompt.removeprefix(header) if separator and prompt.startswith(header) else ""


def without_surrogates(text: str) -> str:
    """Return the text without lone surrogates: no tokenizer encodes them, and they are marks."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _marked(text: str) -> str:
    """Return the text between marks; white space stays outside, where templates remove it."""
    core = text.strip()
    return text.replace(core, f"{_START}{core}{_END}", 1) if core else text


def _unmarked(text: str) -> str:
    return re.sub(f"[{_START}{_END}{_TURN}]", "", text)


def _message(
    role: str, content: str = "an observation", name: str = _CALL.name, number: int = 0
) -> dict[str, Any]:
    """Return a message of an observation for the template, between marks."""
    result = {"name": name, "tool_call_id": _call_id(number)} if role == "tool" else {}
    return {"role": role, "content": _marked(content), **result}


def _calling_messages(results: int, content: str = "") -> Iterator[dict[str, Any]]:
    """Yield turns that messages of the role `tool` may follow: with a call for each, or one."""
    for count in dict.fromkeys([results, 1]) if results else ():
        for arguments in (_CALL.arguments, json.dumps(_CALL.arguments, ensure_ascii=False)):
            function = {"name": _CALL.name, "arguments": arguments}
            calls = [
                {"type": "function", "id": _call_id(number), "function": function}
                for number in range(count)
            ]
            yield {"role": "assistant", "content": content, "tool_calls": calls}


def _call_id(number: int) -> str:
    return f"call{number:05}"  # nine letters and digits, as Mistral's templates want


def _place(turns: Ranges, token: int) -> str:
    """Name the turn, or the text before it, that the token with this number belongs to."""
    for number, (start, end) in enumerate(turns, start=1):
        if start <= token < end:
            return f"in turn {number}, as the policy sampled it"
        if token < start:
            return f"before turn {number}"
    return f"behind turn {len(turns)}" if turns else "behind the prompt"


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ; the shorter length if none does."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _without_blanks(text: str) -> str:
    """Return the text without white space, which templates add and remove around turns."""
    return "".join(text.split())


def _around(text: str, count: int) -> str:
    """Return the text around its character number `count`, not counting white space."""
    places = [i for i, character in enumerate(text) if not character.isspace()]
    place = places[count] if count < len(places) else len(text)
    return text[max(0, place - 20) : place + 40]
