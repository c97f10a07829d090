"""Encodes demonstrations as the tokens that the model would have sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo.core.errors import DataError
from dapo.core.ranges import Ranges
from dapo.core.text import quoted
from dapo.data.demonstrations import turns_of
from dapo.data.prompts import PromptEncoder, chat_messages, template_columns
from dapo.environments.rendering import TurnRenderer
from dapo.types import Message, Problem, content_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo.config import DataConfig


_QUESTION = "a question"


@dataclass(frozen=True)
class Answer:
    """The tokens behind a demonstration's prompt."""

    token_ids: Sequence[int]
    sampled: Ranges | None = None
    """The ranges of the assistant's turns, which are imitated; None: all tokens."""


class AnswerEncoder:
    """Encodes the turns of demonstrations as the model would sample them, each with its end token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: "DataConfig", encoder: PromptEncoder) -> None:
        """`encoder` encodes the prompts. Raises DataError, at the first demonstration of several turns, for a chat
        template that cannot be continued.
        """
        self._tokenizer, self._config, self._prompts = tokenizer, config, encoder
        self._renderers: dict[tuple[str, ...], TurnRenderer] = {}
        end = encoder.turn_end
        self._end_id = tokenizer.eos_token_id if end is None or end.token_id is None else end.token_id
        self._end = "" if self._end_id is None else str(tokenizer.decode([self._end_id], skip_special_tokens=False))
        self._before_end = "" if end is None else end.text.partition(self._end)[0] if self._end else end.text

    def encode(self, demonstration: Problem) -> Answer:
        """The tokens behind the prompt. Raises DataError for a turn that contains the end of a turn."""
        turns, ids, ranges = turns_of(demonstration), list[int](), list[tuple[int, int]]()
        position = 0
        while position < len(turns):
            own = self._turn_ids(turns[position], demonstration, is_first=not ids)
            ranges.append((len(ids), len(ids) + len(own)))
            ids += own
            observed = []
            for message in turns[position + 1 :]:
                if message["role"] == "assistant":
                    break
                observed.append(message)
            position += 1 + len(observed)
            if position < len(turns):
                roles = tuple(sorted({message["role"] for message in observed} | {"user"}))
                ids += self._renderer(roles).following(observed, ended=True, end_id=ids[-1])
        return Answer(ids, None if len(ranges) == 1 else tuple(ranges))

    def _renderer(self, roles: tuple[str, ...]) -> TurnRenderer:
        if roles not in self._renderers:
            self._renderers[roles] = TurnRenderer(self._tokenizer, self._config, roles=roles)
        return self._renderers[roles]

    def _turn_ids(self, turn: Message, demonstration: Problem, *, is_first: bool) -> list[int]:
        """The ids of one turn with its end, as the chat template writes it behind the header of the turn."""
        content = content_text(turn)
        if self._end and self._end in content:
            raise DataError(
                f"demonstration {demonstration.id}: the response {quoted(content)} contains {self._end}, which ends a "
                "turn; leave it out, it is added"
            )
        asked = demonstration if is_first else Problem("", _QUESTION, "")
        is_text = turn.keys() == {"role", "content"} and isinstance(turn["content"], str)
        text = self._turn_text(content, asked) if is_text else self._whole_turn_text(turn, asked, demonstration)
        if is_first:
            before, prompt = self._prompts.render(demonstration), self._prompts.encode(demonstration)
            whole = self._prompts.encode_rendered(before + text)
            if whole[: len(prompt)] == tuple(prompt):
                return list(whole[len(prompt) :])
        return list(self._prompts.encode_rendered(text))

    def _whole_turn_text(self, turn: Message, asked: Problem, demonstration: Problem) -> str:
        """The text of a turn with further keys, such as calls or a thought, as the chat template writes it.

        Raises DataError if there is no template, or it writes a turn otherwise than behind the prompt.
        """
        keys = ", ".join(key for key in turn if key not in ("role", "content"))
        template = self._prompts.template
        if template is None:
            raise DataError(f"demonstration {demonstration.id}: {keys} of a message need a chat template; leave it out")
        if template.unread_keys([turn]) == keys.split(", "):
            return self._turn_text(content_text(turn), asked)
        messages = chat_messages(asked, instruction=self._config.instruction, system=self._config.system)
        before = self._prompts.render(asked)
        try:
            columns = template_columns(asked)
            rendered = template.render(template.in_its_forms([*messages, turn]), header=False, **columns)
        except ValueError as error:
            raise DataError(f"demonstration {demonstration.id}: the chat template rejects a turn: {error}") from None
        if not rendered.startswith(before) or (self._end and self._end not in rendered[len(before) :]):
            raise DataError(
                f"demonstration {demonstration.id}: the chat template does not write {keys} behind the prompt; write "
                "the turn into its content, in the form in which the model writes it"
            )
        behind = rendered[len(before) :]
        return f"{behind.rpartition(self._end)[0]}{self._end}" if self._end else behind

    def _turn_text(self, content: str, asked: Problem) -> str:
        """The text of a turn with its end; a template may put an empty thought or a channel before its content."""
        end = self._prompts.turn_end
        if end is not None:
            messages = chat_messages(asked, instruction=self._config.instruction, system=self._config.system)
            rendered = self._prompts.render_messages([*messages, _assistant(content)], header=False)
            before = self._prompts.render(asked)
            if rendered.startswith(before) and content.strip() in (behind := rendered[len(before) :]):
                head, found, rest = behind.rpartition(content.strip())
                return f"{head}{found}{rest.partition(self._end)[0] if self._end in rest else ''}{self._end}"
        return f"{content}{self._before_end}{self._end}"


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def encode_answers(
    demonstrations: Sequence[Problem], encoder: AnswerEncoder, *, max_tokens: int
) -> tuple[list[Problem], dict[str, Answer], int]:
    """Encode demonstrations: those of at most `max_tokens` tokens, their answers by id, and the number of longer ones.

    Raises DataError if all are longer.
    """
    answers = {each.id: encoder.encode(each) for each in demonstrations}
    kept = [each for each in demonstrations if len(answers[each.id].token_ids) <= max_tokens]
    if demonstrations and not kept:
        shortest = min(len(answer.token_ids) for answer in answers.values())
        raise DataError(
            f"all {len(demonstrations):,} demonstrations are longer than rollout.max_response_tokens={max_tokens}; the "
            f"shortest has {shortest:,} tokens"
        )
    return kept, {each.id: answers[each.id] for each in kept}, len(demonstrations) - len(kept)
