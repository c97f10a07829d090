"""The end of a response: the token after an assistant's turn in a chat template, or the first special token."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _ANSWER = "question", "answer of the assistant"
_ENDS_NOTHING = re.compile(r"(?<![a-z])unk|think|reason", re.IGNORECASE)
"""Special tokens that do not end a text: the token for unknown text, and the marks around private reasoning."""


@dataclass(frozen=True)
class TurnEnd:
    """The text that a chat template puts after an assistant's turn."""

    text: str
    token_id: int | None
    """The first special or added token of the text; None without one."""
    text_before: str = ""
    """The template's text before that token, which is part of the response."""


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

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turn_end: int | None) -> None:
        """A special token ends the text; so does `turn_end`, special or not.

        Special tokens for unknown text, or around a model's private reasoning, end nothing.
        """
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in special | set(tokenizer.all_special_ids)}
        ends = {i for i, name in names.items() if not _ENDS_NOTHING.search(name)}
        ends |= set() if turn_end is None else {turn_end}
        self._is_end = np.zeros(max(ends, default=0) + 2, np.bool_)  # the last entry is for all larger ids
        self._is_end[list(ends)] = True

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids before the first that ends the text; all of them if none does."""
        ended = self._is_end[np.minimum(np.asarray(ids, np.int64), len(self._is_end) - 1)]
        return ids[: int(ended.argmax())] if ended.any() else ids
