"""Encodes demonstrations as the tokens that the model would have sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dapo.core.errors import DataError
from dapo.core.ranges import Ranges
from dapo.core.text import quoted
from dapo.data.demonstrations import turns_of
from dapo.data.prompts import TOOLS, PromptEncoder, chat_messages, template_columns
from dapo.data.sources.rows import TEMPLATE_KWARGS
from dapo.environments.rendering import TurnRenderer, begun_text
from dapo.environments.thoughts import THOUGHT_MARKS, ends_in_thought, thought_marks
from dapo.types import Message, Problem, content_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo.config import DataConfig


_QUESTION = "a question"
_ANSWER = "an answer"
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with the thought before its content."""


@dataclass(frozen=True)
class Answer:
    """The tokens behind a demonstration's prompt."""

    token_ids: Sequence[int]
    sampled: Ranges | None = None
    """The ranges of the assistant's turns, which are imitated; None: all tokens."""


class AnswerEncoder:
    """Encodes turns of demonstrations as the model would sample them, each with its end token."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: "DataConfig",
        encoder: PromptEncoder,
        *,
        history: Literal["exact", "append"] = "exact",
    ) -> None:
        """`encoder` encodes the prompts, and `history` is the option of environments.

        Raises DataError, at the first demonstration of several turns, for a chat template that
        cannot be continued.
        """
        self._history = history
        self._tokenizer = tokenizer
        self._config = config
        self._prompts = encoder
        self._renderers: dict[tuple[str, ...], TurnRenderer] = {}
        end = encoder.turn_end
        self._end_id = (
            tokenizer.eos_token_id if end is None or end.token_id is None else end.token_id
        )
        if self._end_id is None:
            self._end = ""
        else:
            self._end = str(tokenizer.decode([self._end_id], skip_special_tokens=False))
        self._begun = begun_text(encoder)
        """The beginning of a turn that the prompt holds, such as `<think>`; it is no part of what
        is imitated.
        """
        self._lead = _lead_of(encoder)
        """White space that the template writes before an answer."""
        if end is None:
            self._before_end = ""
        elif self._end:
            self._before_end = end.text.partition(self._end)[0]
        else:
            self._before_end = end.text

    def encode(self, demonstration: Problem) -> Answer:
        """Return the tokens behind the prompt.

        Raises DataError for a turn that contains the end of a turn.
        """
        turns = turns_of(demonstration)
        ids = list[int]()
        ranges = list[tuple[int, int]]()
        position = 0
        while position < len(turns):
            turn_ids = self._turn_ids(turns[position], demonstration, is_first=not ids)
            ranges.append((len(ids), len(ids) + len(turn_ids)))
            ids += turn_ids
            observed = []
            for message in turns[position + 1 :]:
                if message["role"] == "assistant":
                    break
                observed.append(message)
            position += 1 + len(observed)
            if position < len(turns):
                roles = tuple(sorted({message["role"] for message in observed} | {"user"}))
                renderer = self._renderer(roles)
                renderer.require_same_behind(demonstration)
                ids += renderer.following(observed, ended=True, end_id=ids[-1])
        return Answer(ids, None if len(ranges) == 1 else tuple(ranges))

    def _renderer(self, roles: tuple[str, ...]) -> TurnRenderer:
        if roles not in self._renderers:
            renderer = TurnRenderer(
                self._tokenizer, self._config, roles=roles, history=self._history
            )
            self._renderers[roles] = renderer
        return self._renderers[roles]

    def _turn_ids(self, turn: Message, demonstration: Problem, *, is_first: bool) -> list[int]:
        """Return the ids of one turn with its end, as the template writes it after the header."""
        content = content_text(turn)
        if self._end and self._end in content:
            raise DataError(
                f"demonstration {demonstration.id}: the response {quoted(content)} contains"
                f" {self._end}, which ends a turn; leave it out, it is added"
            )
        question = demonstration
        if not is_first:
            fields = {
                name: value
                for name, value in demonstration.fields.items()
                if name in (TOOLS, TEMPLATE_KWARGS)
            }
            question = Problem(demonstration.id, _QUESTION, "", fields=fields)
        if turn.keys() <= {"role", "content", *_THOUGHT_KEYS}:
            text = self._turn_text(turn, question)
        else:
            text = self._whole_turn_text(turn, question, demonstration)
        if is_first:
            rendered_prompt = self._prompts.render(demonstration)
            prompt = self._prompts.encode(demonstration)
            token_ids = self._prompts.encode_rendered(rendered_prompt + text)
            if token_ids[: len(prompt)] == tuple(prompt):
                return list(token_ids[len(prompt) :])
        return list(self._prompts.encode_rendered(text))

    def _whole_turn_text(self, turn: Message, question: Problem, demonstration: Problem) -> str:
        """Return a turn with further keys, such as calls or a thought, as the template writes it.

        Raises DataError if there is no template, or it writes a turn otherwise than behind the
        prompt.
        """
        keys = ", ".join(key for key in turn if key not in ("role", "content"))
        template = self._prompts.template
        if template is None:
            raise DataError(
                f"demonstration {demonstration.id}: {keys} of a message need a chat template; leave"
                " it out"
            )
        if template.unread_keys([turn]) == keys.split(", "):
            return self._turn_text({"role": turn["role"], "content": content_text(turn)}, question)
        messages = chat_messages(
            question, instruction=self._config.instruction, system=self._config.system
        )
        rendered_prompt = self._prompts.render(question)
        try:
            columns = template_columns(question)
            rendered = template.render(
                template.in_its_forms([*messages, turn]), header=False, **columns
            )
        except ValueError as error:
            raise DataError(
                f"demonstration {demonstration.id}: the chat template rejects a turn: {error}"
            ) from None
        if not rendered.startswith(rendered_prompt) or (
            self._end and self._end not in rendered[len(rendered_prompt) :]
        ):
            raise DataError(
                f"demonstration {demonstration.id}: the chat template does not write {keys} after"
                " the prompt; write the turn into its content, in the form that the model uses"
            )
        behind = rendered[len(rendered_prompt) :]
        return f"{behind.rpartition(self._end)[0]}{self._end}" if self._end else behind

    def _turn_text(self, turn: Message, question: Problem) -> str:
        """Return a turn with its end after a prompt, and a thought or channel before its content.

        Raises DataError where it would stand in a thought that the prompt has opened and that it
        does not close.
        """
        if self._prompts.turn_end is None:
            return f"{content_text(turn)}{self._before_end}{self._end}"
        messages = chat_messages(
            question, instruction=self._config.instruction, system=self._config.system
        )
        prompt = self._prompts.render(question)
        has_closed_thought = self._require_no_second_thought(turn, question, prompt)
        rendered = self._prompts.render_messages(
            [*messages, dict(turn)], header=False, **template_columns(question)
        )
        thought = str(next((turn[key] for key in _THOUGHT_KEYS if turn.get(key)), "") or "")
        content = content_text(turn)
        if rendered.startswith(prompt):
            behind = rendered[len(prompt) :]
            turn_text = behind.partition(self._end)[0] if self._end else behind
            turn_words = _words(self._begun + turn_text)
            if _words(content) in turn_words and _words(thought) in turn_words:
                return self._with_end(turn_text, content)
        if thought:
            content = self._with_thought(thought, content, question)
        opening = self._begun.strip()
        if not opening:
            lead = "" if content[:1].isspace() else self._lead
            return f"{lead}{content}{self._before_end}{self._end}"
        text = content
        if content.lstrip().startswith(opening):
            behind_mark = self._begun[len(self._begun.rstrip()) :]
            text = content.lstrip().removeprefix(opening).removeprefix(behind_mark)
        if has_closed_thought:
            return f"{text}{self._before_end}{self._end}"
        closing = [pair[1] for pair in THOUGHT_MARKS if pair[0] in self._begun]
        if ends_in_thought(self._begun + text) or not all(mark in text for mark in closing):
            raise DataError(
                f"demonstration {question.id}: the prompt ends with {quoted(self._begun)}, and the"
                f" response {quoted(content)} does not close this thought; the chat template itself"
                f" writes {quoted(rendered)}. Begin the response with a thought and its end, or"
                " leave the demonstration out"
            )
        return f"{text}{self._before_end}{self._end}"

    def _require_no_second_thought(self, turn: Message, question: Problem, prompt: str) -> bool:
        """Return True if the prompt ends with an empty thought, as with thinking switched off.

        Raises DataError if a thought would follow it.
        """
        header = prompt.rpartition(question.question.strip())[2]
        if not _opening_marks(header) or ends_in_thought(header):
            return False
        content = content_text(turn)
        if any(turn.get(key) for key in _THOUGHT_KEYS) or _opening_marks(content):
            raise DataError(
                f"demonstration {question.id}: the prompt ends with {quoted(header)}, in which the"
                f" thought is empty, and the response {quoted(content)} has another one; leave it"
                " out, or switch thinking on by data.chat_template_kwargs or the system message"
            )
        return True

    def _with_end(self, turn_text: str, content: str) -> str:
        """Return a turn with its end and with the white space of the template after its content."""
        core = content.strip()
        if core and core in turn_text:
            head, middle, tail = turn_text.rpartition(core)
            return f"{head}{middle}{tail if self._end else ''}{self._end}"
        return f"{turn_text if self._end else turn_text.rstrip()}{self._end}"

    def _with_thought(self, thought: str, content: str, question: Problem) -> str:
        """Put the thought before the content, in the marks of a template that reads no thoughts."""
        template = str(self._tokenizer.chat_template)
        marks = [pair for pair in THOUGHT_MARKS if pair[0] in self._begun] or [
            pair for pair in THOUGHT_MARKS if pair[1] in template
        ]
        if not marks:
            raise DataError(
                f"demonstration {question.id}: the chat template shows no"
                f" {', '.join(_THOUGHT_KEYS)}; put the thought into the content, as the model"
                " writes it, or leave it out"
            )
        opening, closing = marks[0]
        return f"{opening}\n{thought.strip()}\n{closing}\n\n{content}"


def _opening_marks(text: str) -> list[str]:
    """Return the marks in a text that open a thought."""
    return [text[mark.start : mark.end] for mark in thought_marks(text) if mark.opens]


def _lead_of(prompts: PromptEncoder) -> str:
    """Return the white space that the template writes between its header and an answer."""
    if prompts.template is None:
        return ""
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        prompt = prompts.render_messages([question])
        answered = prompts.render_messages([question, answer], header=False)
    except ValueError:
        return ""
    lead, separator, _ = answered.removeprefix(prompt).partition(_ANSWER)
    is_lead = separator and answered.startswith(prompt) and lead.isspace()
    return lead if is_lead else ""


def _words(text: str) -> str:
    """Return the text without white space, which templates add and remove around thoughts."""
    return "".join(text.split())


def encode_answers(
    demonstrations: Sequence[Problem], encoder: AnswerEncoder, *, max_tokens: int
) -> tuple[list[Problem], dict[str, Answer], int]:
    """Encode demonstrations: the short enough ones, their answers by id, the number of longer ones.

    Raises DataError if all are longer.
    """
    answers = {demonstration.id: encoder.encode(demonstration) for demonstration in demonstrations}
    short_enough = [
        demonstration
        for demonstration in demonstrations
        if len(answers[demonstration.id].token_ids) <= max_tokens
    ]
    if demonstrations and not short_enough:
        shortest = min(len(answer.token_ids) for answer in answers.values())
        raise DataError(
            f"all {len(demonstrations):,} demonstrations are longer than"
            f" rollout.max_response_tokens={max_tokens}; the shortest has {shortest:,} tokens"
        )
    return (
        short_enough,
        {demonstration.id: answers[demonstration.id] for demonstration in short_enough},
        len(demonstrations) - len(short_enough),
    )
