"""An upper bound on the number of tokens of a text, which costs a thousandth of tokenizing it."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ONLY_SPLIT = {"ByteLevel", "Digits", "Sequence", "Split", "Whitespace", "WhitespaceSplit", "Punctuation"}
_NFC_GROWTH = 3  # the most by which NFC lengthens a text in UTF-8 (Unicode Technical Report 15)


class TokenBound:
    """The bound of a byte-level BPE tokenizer: each of its tokens stands for at least one byte of the text.

    Example: 12 bytes are at most 12 tokens; at most 24 where a space may be put before each part of the text, and
    three times as many where the text is normalized to NFC and is not ASCII.
    """

    def __init__(self, *, per_byte: int, normalizes: bool, added: int) -> None:
        """`per_byte` tokens for each byte of the normalized text, and `added` special tokens around it."""
        self._per_byte, self._normalizes, self._added = per_byte, normalizes, added

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool) -> "TokenBound | None":
        """The bound of a tokenizer; None where it is not byte-level BPE, or has a part that could add to a text."""
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or type(backend.model).__name__ != "BPE":
            return None
        normalizers, splitters = list(_parts(backend.normalizer)), list(_parts(backend.pre_tokenizer))
        kinds = {part["type"] for part in splitters}
        if (
            "ByteLevel" not in kinds
            or not kinds <= _ONLY_SPLIT
            or {p["type"] for p in normalizers} - {"NFC", "Sequence"}
        ):
            return None
        adds_space = any(part.get("add_prefix_space", False) for part in splitters)
        added = backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        return cls(per_byte=2 if adds_space else 1, normalizes=bool(normalizers), added=added)

    def __call__(self, text: str) -> int:
        """A number that the tokens of `text` do not exceed."""
        if text.isascii():
            return self._per_byte * len(text) + self._added
        growth = _NFC_GROWTH if self._normalizes else 1
        return self._per_byte * growth * len(text.encode(errors="replace")) + self._added


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A component of a tokenizer and all that it consists of, as the mappings of tokenizer.json."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        yield part
        pending += part.get("pretokenizers", []) + part.get("normalizers", [])
