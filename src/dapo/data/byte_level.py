"""Fast paths for byte-level tokenizers: decode token ids with a table of bytes, and bound the
length of a text.

Decoding gives the tokenizer's result many times faster: a step at the paper's scale has 150 million
response tokens, which a tokenizer takes as Python integers one by one. The bound costs a thousandth
of tokenizing.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo.core.rng import keyed_seed, keyed_uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_CHECKS = 32
_CHECK_TOKENS = 64
_ONLY_SPLIT = {
    "ByteLevel",
    "Digits",
    "Sequence",
    "Split",
    "Whitespace",
    "WhitespaceSplit",
    "Punctuation",
}
_NFC_GROWTH = 3  # the most by which NFC lengthens a text in UTF-8 (Unicode Technical Report 15)


class ByteDecoder:
    """Decodes token ids by joining the bytes of each token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces[i]` are the bytes of token i."""
        import pyarrow as pa

        self._size = len(pieces)
        # the last one decodes ids beyond the vocabulary
        self._pieces = pa.array([*pieces, b""], pa.binary())

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool
    ) -> "ByteDecoder | None":
        """Return the decoder of a byte-level tokenizer; None for any other tokenizer.

        It is compared with the tokenizer on random ids; if they differ, the result is None.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
            return None
        pieces = _token_bytes(backend, skip_special_tokens=skip_special_tokens)
        table = cls(pieces)
        options = {
            "skip_special_tokens": skip_special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        uniforms = keyed_uniforms(keyed_seed("detokenize"), _NUM_CHECKS * _CHECK_TOKENS)
        samples = (uniforms * len(pieces)).astype(np.int32)
        for ids in np.split(samples, _NUM_CHECKS):
            if table.decode(ids.tolist()) != tokenizer.decode(ids.tolist(), **options):
                return None
        return table

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        import pyarrow as pa

        if not len(ids):
            return ""
        indices = np.minimum(np.asarray(ids, np.int32), self._size)
        pieces = self._pieces.take(pa.array(indices))
        _, ends, data = pieces.buffers()
        length = int(np.frombuffer(ends, np.int32, count=len(indices) + 1)[-1])
        # without any byte there is no buffer
        if not length:
            return ""
        return str(memoryview(data)[:length], "utf-8", "replace")


def _token_bytes(backend: Any, *, skip_special_tokens: bool) -> list[bytes]:
    """Return the bytes of each token id of a byte-level tokenizer; none for a skipped token."""
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    special = set()
    if skip_special_tokens:
        for token_id, token in backend.get_added_tokens_decoder().items():
            if token.special:
                special.add(token_id)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    alphabet = byte_alphabet()
    for text, token_id in vocabulary.items():
        if token_id in special:
            continue
        # a token with characters outside of the alphabet is plain text
        if all(character in alphabet for character in text):
            pieces[token_id] = bytes(alphabet[character] for character in text)
        else:
            pieces[token_id] = text.encode()
    return pieces


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies; others start at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(unprintable):
        alphabet[chr(256 + i)] = byte
    return alphabet


class TokenBound:
    """The bound of a byte-level BPE tokenizer, whose tokens stand for at least one byte each.

    Example: 12 bytes are at most 12 tokens; at most 24 where a space may be put before each part of
    the text, and three times as many where the text is normalized to NFC and is not ASCII.
    """

    def __init__(self, *, per_byte: int, normalizes: bool, added: int) -> None:
        """Set the terms of the bound.

        Args:
            per_byte: the most tokens per byte of the normalized text.
            normalizes: whether the tokenizer normalizes the text to NFC.
            added: the number of special tokens that it adds.
        """
        self._per_byte = per_byte
        self._normalizes = normalizes
        self._added = added

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool
    ) -> "TokenBound | None":
        """Return a tokenizer's bound; None unless it is byte-level BPE that adds nothing."""
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or type(backend.model).__name__ != "BPE":
            return None
        normalizers = list(_parts(backend.normalizer))
        splitters = list(_parts(backend.pre_tokenizer))
        splitter_kinds = {part["type"] for part in splitters}
        normalizer_kinds = {part["type"] for part in normalizers}
        if "ByteLevel" not in splitter_kinds or not splitter_kinds <= _ONLY_SPLIT:
            return None
        if not normalizer_kinds <= {"NFC", "Sequence"}:
            return None
        adds_space = any(part.get("add_prefix_space", False) for part in splitters)
        added = 0
        if add_special_tokens:
            added = backend.num_special_tokens_to_add(False)
        return cls(per_byte=2 if adds_space else 1, normalizes=bool(normalizers), added=added)

    def __call__(self, text: str) -> int:
        """Return a number that the tokens of `text` do not exceed."""
        if text.isascii():
            return self._per_byte * len(text) + self._added
        num_bytes = len(text.encode(errors="replace"))
        if self._normalizes:
            num_bytes *= _NFC_GROWTH
        return self._per_byte * num_bytes + self._added


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield a tokenizer's component and all of its parts, as mappings of tokenizer.json."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        yield part
        pending += part.get("pretokenizers", []) + part.get("normalizers", [])
