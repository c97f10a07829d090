"""Samples to microbatches: token streams without padding in which the responses of a group share one prompt.

`partition` decides which rank computes which samples in which pass, on one rank or many; `pack_microbatch` makes the
tensors of one pass. Sums over a minibatch's tokens do not depend on either: each sample's loss weight is set before.
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby

import torch
from torch import Tensor

from dapo.policy.packed_attention import CUDA_KEY_MULTIPLE, PackedAttentionPlan
from dapo.policy.segments import Segment
from dapo.policy.transfer import to_device
from dapo.types import Sample

# for balance, several ranks cut a group that has more than a quarter of one rank's tokens, but not into chunks of less
# than eight times its prompt, which each chunk computes anew
MIN_CHUNKS_PER_RANK = 4
MIN_CHUNK_PROMPTS = 8


@dataclass(frozen=True)
class PromptChunk:
    """Samples of one group that go into one microbatch together, with their prompt."""

    indices: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class RankMicrobatch:
    """What one rank computes in one forward and backward: samples, those of a group adjacent."""

    indices: tuple[int, ...]  # the samples' positions in the list that was partitioned; empty for a dummy microbatch
    samples: tuple[Sample, ...]
    weights: tuple[float, ...]  # the loss weight of each sample's tokens


DUMMY_MICROBATCH = RankMicrobatch((), (Sample(0, (0,), (0,), 0.0, 0.0, (0.0,), (0.0,), (False,)),), (0.0,))
"""A pass over one masked token, for a rank without samples: FSDP's collectives need every rank in every pass."""


@dataclass(frozen=True)
class Microbatch:
    """The tensors of a rank microbatch: T tokens in the stream, S response tokens to score.

    Example: the prompt (10, 11) with responses (20, 21, 22) and (30, 31) has input_ids (10, 11, 20, 21, 30), positions
    (0, 1, 2, 3, 2), predictors (1, 2, 3, 1, 4) and targets (20, 21, 22, 30, 31).
    """

    indices: tuple[int, ...]  # the rank microbatch's indices, in the order of the scored tokens
    lengths: tuple[int, ...]  # the response lengths; they add up to S
    input_ids: Tensor  # `[T]`. A response's last token is left out: it predicts nothing.
    positions: Tensor  # `[T]` from 0 in each sequence; a response continues where its prompt ends
    attention_plan: PackedAttentionPlan
    predictors: Tensor
    """`[S]` the stream index whose hidden state predicts each response token: that of the token before it."""
    targets: Tensor  # `[S]` the response tokens

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def partition(
    samples: Sequence[Sample], weights: Sequence[float] | None = None, *, ranks: int, max_tokens: int
) -> list[tuple[RankMicrobatch, ...]]:
    """Distribute samples over ranks and passes: one tuple of passes for each rank, all of the same length.

    A group's prompt is computed once, or once in each chunk of a group that is cut. One rank gets nearly full
    microbatches of similar lengths; several get loads as equal as whole chunks allow, in as few passes as fit.

    Args:
        samples: those of a group adjacent; the ones without response tokens are left out.
        weights: each sample's loss weight; None: 0, for scoring alone.
        ranks: how many ranks compute at the same time.
        max_tokens: prompt and response tokens of a pass; a single longer sequence goes alone, uncut.

    Raises:
        ValueError: a prompt is empty (nothing would predict the first token), or a group's samples are not adjacent.
    """
    if ranks == 1:
        bins = _first_fit(prompt_chunks(samples, lambda _: max_tokens), max_tokens)
    else:
        target = _num_tokens(prompt_chunks(samples, lambda _: max_tokens)) // (ranks * MIN_CHUNKS_PER_RANK)
        chunks = prompt_chunks(samples, lambda prompt: min(max_tokens, max(target, MIN_CHUNK_PROMPTS * prompt)))
        bins = _balanced(chunks, ranks=ranks, max_tokens=max_tokens)
    load = [0] * ranks
    weights = weights or [0.0] * len(samples)
    partitions: list[list[RankMicrobatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        # the bins of a pass are of similar sizes: the largest of them goes to the rank with the least load
        order = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, content in zip(order, bins[start : start + ranks], strict=True):
            load[rank] += _num_tokens(content)
            indices = tuple(i for chunk in content for i in chunk.indices)
            found = RankMicrobatch(indices, tuple(samples[i] for i in indices), tuple(weights[i] for i in indices))
            partitions[rank].append(found if indices else DUMMY_MICROBATCH)
    return [tuple(passes) for passes in partitions]


def prompt_chunks(samples: Sequence[Sample], limit: Callable[[int], int]) -> list[PromptChunk]:
    """Every group, cut where it has more tokens than the `limit` for its length of prompt, longest responses first."""
    groups = [list(members) for _, members in groupby(range(len(samples)), key=lambda i: samples[i].group_id)]
    if len({samples[members[0]].group_id for members in groups}) < len(groups):
        raise ValueError("the samples of a group must be adjacent to share its prompt")
    chunks: list[PromptChunk] = []
    for members in groups:
        first = samples[members[0]]
        if not first.prompt_ids:
            raise ValueError(f"the samples of group {first.group_id} have no prompt: nothing predicts their responses")
        if any(samples[i].prompt_ids is not first.prompt_ids != samples[i].prompt_ids for i in members):
            raise ValueError(f"the samples of group {first.group_id} have different prompts")
        prompt_length = len(first.prompt_ids)
        own: list[PromptChunk] = []
        for i in sorted(members, key=lambda i: (-len(samples[i].response_ids), i)):
            if not (length := len(samples[i].response_ids)):
                break
            if own and own[-1].num_tokens + length <= limit(prompt_length):
                own[-1] = PromptChunk((*own[-1].indices, i), own[-1].num_tokens + length)
            else:
                own.append(PromptChunk((i,), prompt_length + length))
        chunks += own
    return chunks


def _first_fit(chunks: Sequence[PromptChunk], max_tokens: int) -> list[list[PromptChunk]]:
    """Bins for one rank: chunks by falling mean length, each in the first bin with room for it."""
    bins: list[list[PromptChunk]] = []
    leaves = 1 << max(0, len(chunks) - 1).bit_length()
    # free room as a binary tree: that of bin i in leaf `leaves + i`, in every other node the larger of its two children
    room = [max_tokens] * (2 * leaves)
    for chunk in sorted(chunks, key=lambda chunk: (-chunk.num_tokens / len(chunk.indices), chunk.indices)):
        needed = min(chunk.num_tokens, max_tokens)  # a longer one goes alone, into an empty bin
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < needed)
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(chunk)
        room[node] -= chunk.num_tokens
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _balanced(chunks: Sequence[PromptChunk], *, ranks: int, max_tokens: int) -> list[list[PromptChunk]]:
    """Bins for several ranks, the fullest first: a multiple of `ranks`, the smallest that holds all chunks."""
    chunks = sorted(chunks, key=lambda chunk: (-chunk.num_tokens, chunk.indices))
    passes = -(-_num_tokens(chunks) // (max_tokens * ranks))
    failed, step = passes - 1, 1
    while (bins := _fill(chunks, passes * ranks, max_tokens)) is None:
        failed, passes, step = passes, passes + step, 2 * step
    while passes - failed > 1:
        middle = (failed + passes) // 2
        if (fewer := _fill(chunks, middle * ranks, max_tokens)) is None:
            failed = middle
        else:
            passes, bins = middle, fewer
    # chunks of one group that meet in a bin become adjacent, and share their prompt after all
    return [sorted(content, key=lambda chunk: chunk.indices) for content in sorted(bins, key=_num_tokens, reverse=True)]


def _fill(chunks: Sequence[PromptChunk], count: int, max_tokens: int) -> list[list[PromptChunk]] | None:
    """Each chunk in the emptiest of `count` bins; None if one does not fit there."""
    bins: list[list[PromptChunk]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for chunk in chunks:
        tokens, i = heapq.heappop(heap)
        if tokens and tokens + chunk.num_tokens > max_tokens:
            return None
        bins[i].append(chunk)
        heapq.heappush(heap, (tokens + chunk.num_tokens, i))
    return bins


def _num_tokens(chunks: Sequence[PromptChunk]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)


def pack(samples: Sequence[Sample], *, max_tokens: int, device: str | torch.device = "cpu") -> list[Microbatch]:
    """The microbatches of `partition` on one rank, as tensors on `device`."""
    (passes,) = partition(samples, ranks=1, max_tokens=max_tokens)
    return [pack_microbatch(rank_microbatch, device) for rank_microbatch in passes]


def pack_microbatch(rank_microbatch: RankMicrobatch, device: str | torch.device) -> Microbatch:
    """One stream of all samples: the prompt of each group, followed by its responses. Nothing waits for the device."""
    stream: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    segments: list[Segment] = []
    for _, group in groupby(rank_microbatch.samples, key=lambda sample: sample.group_id):
        members = list(group)
        prompt_start, prompt_length = len(stream), len(members[0].prompt_ids)
        segments.append(Segment(0, 0, prompt_start, prompt_length))
        stream += members[0].prompt_ids
        positions += range(prompt_length)
        for sample in members:
            response_start, inputs = len(stream), sample.response_ids[:-1]
            if inputs:
                segments.append(Segment(prompt_start, prompt_length, response_start, len(inputs)))
            stream += inputs
            positions += range(prompt_length, prompt_length + len(inputs))
            predictors += [prompt_start + prompt_length - 1, *range(response_start, response_start + len(inputs))]
    targets = [token for sample in rank_microbatch.samples for token in sample.response_ids]
    rows = (stream, positions, predictors, targets)
    device = torch.device(device)
    tensors = to_device(torch.tensor([*chain(*rows)]), device).split([len(row) for row in rows])
    key_multiple = CUDA_KEY_MULTIPLE if device.type == "cuda" else 1
    return Microbatch(
        indices=rank_microbatch.indices,
        lengths=tuple(len(sample.response_ids) for sample in rank_microbatch.samples),
        input_ids=tensors[0],
        positions=tensors[1],
        attention_plan=PackedAttentionPlan(tuple(segments), device, key_multiple=key_multiple),
        predictors=tensors[2],
        targets=tensors[3],
    )


def rows_of(scores: Tensor, lengths: Sequence[int]) -> list[Sequence[float]]:
    """The `[S]` scores of a microbatch as one row per sample."""
    numbers = scores.detach().cpu().numpy()
    return [
        array(numbers.dtype.char, numbers[end - n : end].tobytes())
        for n, end in zip(lengths, accumulate(lengths), strict=True)
    ]


def in_callers_order(
    microbatches: Sequence[Microbatch], scores: Sequence[Tensor], num_samples: int
) -> list[Sequence[float]]:
    """The `[S]` scores of each microbatch as one row per sample, in the order in which the samples were given.

    A sample without response tokens gets an empty row.
    """
    rows: list[Sequence[float]] = [()] * num_samples
    for microbatch, values in zip(microbatches, scores, strict=True):
        for i, row in zip(microbatch.indices, rows_of(values, microbatch.lengths), strict=True):
            rows[i] = row
    return rows
