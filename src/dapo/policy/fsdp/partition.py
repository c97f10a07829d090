"""Which rank computes which rows of a minibatch: as evenly by tokens as whole prompts allow, in as few passes as fit.

A sharded model's forward and backward are collective, so every rank makes the same number of passes; one that has no
rows left makes a pass over a row that does not train. What a minibatch contains, and each row's weight in it, are
settled before: sums over its tokens do not depend on who computes them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dapo.policy.packing import Piece, pieces
from dapo.types import Sample

CUT_SHARES = 4
"""A group is cut where it has more than this part of a rank's tokens, a quarter, for the sake of balance."""
CUT_PROMPTS = 8
"""But not into pieces of less than so many times its prompt, which each piece computes anew."""


@dataclass(frozen=True)
class Portion:
    """What one rank computes in one pass."""

    indices: tuple[int, ...]
    """Of the samples, among those that were shared out; none for a pass that only keeps the others company."""
    samples: tuple[Sample, ...]
    weights: tuple[float, ...]
    """Of each sample's tokens in the loss."""


IDLE = Portion(
    (),
    (
        Sample(
            group_id=0,
            prompt_ids=(0,),
            response_ids=(0,),
            reward=0.0,
            advantage=0.0,
            engine_logprobs=(0.0,),
            old_logprobs=(0.0,),
            mask=(False,),
        ),
    ),
    (0.0,),
)
"""A pass over one row that does not train."""


def share(
    samples: Sequence[Sample], weights: Sequence[float], *, ranks: int, max_tokens: int
) -> list[tuple[Portion, ...]]:
    """For each rank what it computes, one portion a pass: at most `max_tokens` in each, or a single sequence.

    A function of the arguments alone. Samples without response tokens are in no portion.
    """
    total = sum(piece.num_tokens for piece in pieces(samples, lambda _: max_tokens))
    fair = total // (ranks * CUT_SHARES)
    parts = pieces(samples, lambda prompt: min(max_tokens, max(fair, CUT_PROMPTS * prompt)))
    bins = _bins(parts, ranks=ranks, max_tokens=max_tokens)
    load = [0] * ranks
    portions: list[list[Portion]] = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        # bins of a pass are of like sizes: the largest of them goes to whoever has had least
        order = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, content in zip(order, bins[start : start + ranks], strict=True):
            load[rank] += _tokens(content)
            portions[rank].append(_portion(content, samples, weights))
    return [tuple(passes) for passes in portions]


def _bins(parts: Sequence[Piece], *, ranks: int, max_tokens: int) -> list[list[Piece]]:
    """The pieces in bins, the fullest first: a multiple of `ranks`, the smallest that holds them all."""
    parts = sorted(parts, key=lambda piece: (-piece.num_tokens, piece.indices))
    passes = -(-sum(piece.num_tokens for piece in parts) // (max_tokens * ranks))
    while (bins := _fill(parts, passes * ranks, max_tokens)) is None:
        passes += 1
    return sorted(bins, key=lambda content: -_tokens(content))


def _fill(parts: Sequence[Piece], count: int, max_tokens: int) -> list[list[Piece]] | None:
    """Each piece into the emptiest bin; None where it does not fit there."""
    bins: list[list[Piece]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for piece in parts:
        tokens, i = heapq.heappop(heap)
        if tokens and tokens + piece.num_tokens > max_tokens:
            return None
        bins[i].append(piece)
        heapq.heappush(heap, (tokens + piece.num_tokens, i))
    return bins


def _tokens(content: Sequence[Piece]) -> int:
    return sum(piece.num_tokens for piece in content)


def _portion(content: Sequence[Piece], samples: Sequence[Sample], weights: Sequence[float]) -> Portion:
    indices = tuple(i for piece in content for i in piece.indices)
    if not indices:
        return IDLE
    return Portion(indices, tuple(samples[i] for i in indices), tuple(weights[i] for i in indices))
