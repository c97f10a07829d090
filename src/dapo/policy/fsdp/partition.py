"""Which rank computes which rows of a minibatch: as evenly by tokens as whole prompts allow, in as few passes as fit.

A sharded model's forward and backward are collective, so every rank makes the same number of passes; one that has no
rows left makes a pass over a row that does not train. What a minibatch contains, and each row's weight in it, are
settled before: sums over its tokens do not depend on who computes them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dapo.policy.packing import PromptChunk, prompt_chunks
from dapo.types import Sample

MIN_CHUNKS_PER_RANK = 4
"""A group is cut where it has more than this part of a rank's tokens, a quarter, for the sake of balance."""
MIN_CHUNK_PROMPTS = 8
"""But not into pieces of less than so many times its prompt, which each piece computes anew."""


@dataclass(frozen=True)
class RankMicrobatch:
    """What one rank computes in one pass."""

    indices: tuple[int, ...]
    """Of the samples, among those that were shared out; none for a pass that only keeps the others company."""
    samples: tuple[Sample, ...]
    weights: tuple[float, ...]
    """Of each sample's tokens in the loss."""


DUMMY_MICROBATCH = RankMicrobatch(
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


def partition(
    samples: Sequence[Sample], weights: Sequence[float], *, ranks: int, max_tokens: int
) -> list[tuple[RankMicrobatch, ...]]:
    """For each rank what it computes, one portion a pass: at most `max_tokens` in each, or a single sequence.

    A function of the arguments alone. Samples without response tokens are in no portion.
    """
    total = sum(prompt_chunk.num_tokens for prompt_chunk in prompt_chunks(samples, lambda _: max_tokens))
    target_tokens = total // (ranks * MIN_CHUNKS_PER_RANK)
    chunks = prompt_chunks(samples, lambda prompt: min(max_tokens, max(target_tokens, MIN_CHUNK_PROMPTS * prompt)))
    bins = _bins(chunks, ranks=ranks, max_tokens=max_tokens)
    load = [0] * ranks
    rank_microbatches: list[list[RankMicrobatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        # bins of a pass are of like sizes: the largest of them goes to whoever has had least
        order = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, content in zip(order, bins[start : start + ranks], strict=True):
            load[rank] += _tokens(content)
            rank_microbatches[rank].append(_rank_microbatch(content, samples, weights))
    return [tuple(passes) for passes in rank_microbatches]


def _bins(chunks: Sequence[PromptChunk], *, ranks: int, max_tokens: int) -> list[list[PromptChunk]]:
    """The pieces in bins, the fullest first: a multiple of `ranks`, the smallest that holds them all."""
    chunks = sorted(chunks, key=lambda prompt_chunk: (-prompt_chunk.num_tokens, prompt_chunk.indices))
    passes = -(-sum(prompt_chunk.num_tokens for prompt_chunk in chunks) // (max_tokens * ranks))
    while (bins := _fill(chunks, passes * ranks, max_tokens)) is None:
        passes += 1
    return sorted(bins, key=lambda content: -_tokens(content))


def _fill(chunks: Sequence[PromptChunk], count: int, max_tokens: int) -> list[list[PromptChunk]] | None:
    """Each piece into the emptiest bin; None where it does not fit there."""
    bins: list[list[PromptChunk]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for prompt_chunk in chunks:
        tokens, i = heapq.heappop(heap)
        if tokens and tokens + prompt_chunk.num_tokens > max_tokens:
            return None
        bins[i].append(prompt_chunk)
        heapq.heappush(heap, (tokens + prompt_chunk.num_tokens, i))
    return bins


def _tokens(content: Sequence[PromptChunk]) -> int:
    return sum(prompt_chunk.num_tokens for prompt_chunk in content)


def _rank_microbatch(
    content: Sequence[PromptChunk], samples: Sequence[Sample], weights: Sequence[float]
) -> RankMicrobatch:
    indices = tuple(i for prompt_chunk in content for i in prompt_chunk.indices)
    if not indices:
        return DUMMY_MICROBATCH
    return RankMicrobatch(indices, tuple(samples[i] for i in indices), tuple(weights[i] for i in indices))
