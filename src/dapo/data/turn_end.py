"""Where a response ends: the token behind an assistant's turn in a chat template, and special tokens in a text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _ANSWER = "question", "answer of the assistant"
_STANDS_FOR_TEXT = re.compile(r"(?<![a-z])unk|think|reason", re.IGNORECASE)
"""Special tokens that end no text: what the tokenizer does not know, and the marks around private reasoning."""


@dataclass(frozen=True)
class TurnEnd:
    """What a chat template puts behind an assistant's turn."""

    text: str
    token_id: int | None
    """The first special token of the text, or token that was added to the vocabulary; None if it has none."""
    text_before: str = ""
    """What the template writes before that token, which then is part of the response."""


def find_turn_end(tokenizer: "PreTrainedTokenizerBase") -> TurnEnd:
    """What the tokenizer's chat template puts behind an assistant's turn, found by rendering one."""
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
    """Cuts token ids off where their text ends: at the first special token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turn_end: int | None) -> None:
        """A special token ends the text; so does `turn_end`, special or not.

        Special tokens for unknown text, or around a model's private reasoning, end nothing.
        """
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in special | set(tokenizer.all_special_ids)}
        ends = {i for i, name in names.items() if not _STANDS_FOR_TEXT.search(name)}
        ends |= set() if turn_end is None else {turn_end}
        self._is_end = np.zeros(max(ends, default=0) + 2, np.bool_)  # the last entry is for all larger ids
        self._is_end[list(ends)] = True

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids before the first that ends the text; all of them if none does."""
        ended = self._is_end[np.minimum(np.asarray(ids, np.int64), len(self._is_end) - 1)]
        return ids[: int(ended.argmax())] if ended.any() else ids
