"""Orders sequences of token ids by the prefixes that they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

# most responses differ within these, so that their order is found without reading the others
HEAD_TOKENS = 64


@dataclass(frozen=True)
class SortedPrefixes:
    """The lexicographic order of N token sequences; prefixes come before longer sequences.

    In this order the new nodes of the prefix tree are, for each sequence, its tokens after those
    shared with its predecessor.
    """

    order: list[int]  # `[N]` the indices of the sequences
    shared: list[int]
    """`[N]` first tokens shared with the predecessor in `order`; no earlier one shares more."""


def token_array(token_ids: Sequence[int]) -> np.ndarray:
    """Return token ids as an array of 4-byte numbers: a view where they are stored like that."""
    return np.asarray(token_ids, np.int32)


def sorted_prefixes(sequences: Sequence[np.ndarray]) -> SortedPrefixes:
    """Sort sequences made by `token_array`.

    Only sequences with equal first tokens are compared any further.
    """
    heads = [_key(sequence[:HEAD_TOKENS]) for sequence in sequences]
    order: list[int] = []
    by_head = sorted(range(len(heads)), key=heads.__getitem__)
    for _, equal_heads in groupby(by_head, key=heads.__getitem__):
        indices = list(equal_heads)
        if len(indices) > 1:
            indices.sort(key=lambda i: _key(sequences[i]))
        order += indices
    shared = [0] * len(order)
    for k, (previous, i) in enumerate(pairwise(order), start=1):
        # sequences whose heads differ share fewer tokens than a head has
        end = None if heads[previous] == heads[i] else HEAD_TOKENS
        shared[k] = _common(sequences[previous][:end], sequences[i][:end])
    return SortedPrefixes(order, shared)


def _key(sequence: np.ndarray) -> bytes:
    """Return bytes that compare like the token ids: the most significant byte is first."""
    return sequence.astype(">i4").tobytes()


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the longest shared prefix."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length
