"""Orders sequences of token ids by the prefixes that they share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SortedPrefixes:
    """The lexicographic order of N sequences of token ids, in which a prefix precedes the sequences that begin with it.

    In this order the new nodes of the prefix tree are, for each sequence, its tokens after those shared with its
    predecessor.
    """

    order: list[int]  # `[N]` the indices of the sequences
    shared: list[int]
    """`[N]` the number of first tokens shared with the predecessor in `order`; no earlier sequence shares more."""


def token_array(token_ids: Sequence[int]) -> np.ndarray:
    """Token ids as an array of 4-byte numbers."""
    return np.asarray(token_ids, np.int64).astype(np.int32)


def sorted_prefixes(sequences: Sequence[np.ndarray]) -> SortedPrefixes:
    """Sort sequences made by `token_array`."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]  # these bytes compare like the numbers
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [0] * len(order)
    for k in range(1, len(order)):
        before, i = order[k - 1], order[k]
        equal = keys[before] == keys[i]
        shared[k] = len(sequences[i]) if equal else _common(sequences[before], sequences[i])
    return SortedPrefixes(order, shared)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """The length of the longest shared prefix."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
