"""Token sequences in lexicographic order, in which each shares its longest common beginning with the one before it.

So the distinct beginnings of any sequences, the nodes of their prefix tree, are runs: of each sequence the tokens after
those that it shares with its predecessor in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dapo.types import Sample


@dataclass(frozen=True)
class PrefixOrder:
    """N sequences in lexicographic order of their token ids, a beginning of another before it."""

    order: list[int]  # `[N]` the sequences' numbers
    shared: list[int]
    """`[N]` the tokens that the sequence at that place of the order shares with the one before; 0 for the first. No
    earlier sequence shares more."""


def token_array(token_ids: Sequence[int]) -> np.ndarray:
    """Token ids as numbers of 4 bytes."""
    return np.asarray(token_ids, np.int64).astype(np.int32)


def prefix_order(sequences: Sequence[np.ndarray]) -> PrefixOrder:
    """The order of sequences that are `token_array`s."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]  # bytes that compare like the numbers
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [0] * len(order)
    for k in range(1, len(order)):
        before, i = order[k - 1], order[k]
        equal = keys[before] == keys[i]
        shared[k] = len(sequences[i]) if equal else _common(sequences[before], sequences[i])
    return PrefixOrder(order, shared)


def sequence_arrays(samples: Sequence[Sample]) -> list[np.ndarray]:
    """Prompt and response of each sample as a `token_array`."""
    prompts = {sample.group_id: token_array(sample.prompt_ids) for sample in samples}
    return [np.concatenate([prompts[sample.group_id], token_array(sample.response_ids)]) for sample in samples]


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
