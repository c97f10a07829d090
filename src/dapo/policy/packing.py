"""Packs samples into microbatches, streams without padding that store shared prefixes once.

A sequence is a prompt and its response. Each distinct prefix of a microbatch's sequences is one
position of the stream, so the tokens with which two sequences begin alike, such as the prompt of a
group, are computed once.

`partition` decides which rank computes which samples in which pass; `pack_microbatch` makes the
tensors of one pass. Sums over a minibatch's tokens do not depend on either, because each sample's
loss weight is given.
"""

import heapq
import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dapo.policy.packed_attention import CUDA_KEY_MULTIPLE, PackedAttentionPlan
from dapo.policy.prefixes import SortedPrefixes, sorted_prefixes, token_array
from dapo.policy.segments import Segment
from dapo.policy.transfer import to_device
from dapo.types import Sample

SHARED_KEYS_PER_TOKEN = 4
"""A response with a shared prefix counts as its new tokens, but at least as a fourth of its
sequence (and at most as its own tokens), because attention gathers the keys of the whole sequence.
"""

# several ranks balance their load by cutting groups with more than a quarter of one rank's tokens,
# but not into chunks of less than eight times the prompt, which each chunk computes again
MIN_CHUNKS_PER_RANK = 4
MIN_CHUNK_PROMPTS = 8


@dataclass(frozen=True)
class PromptChunk:
    """Samples of one group that share a microbatch and their prompt in it."""

    indices: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class RankMicrobatch:
    """The samples of one forward and backward of one rank; those of a group are adjacent."""

    # the samples' positions in the list that was partitioned; empty for a dummy microbatch
    indices: tuple[int, ...]
    samples: tuple[Sample, ...]
    weights: tuple[float, ...]  # the loss weight of each sample's tokens


DUMMY_MICROBATCH = RankMicrobatch(
    (), (Sample(0, (0,), (0,), 0.0, 0.0, (0.0,), (0.0,), (False,)),), (0.0,)
)
"""A pass over one masked token for a rank without samples, as FSDP needs all ranks in a pass."""


@dataclass(frozen=True)
class Microbatch:
    """The tensors of a microbatch: of T stream positions M predict the S response tokens.

    Example: the prompt (10, 11) with responses (20, 21, 22), (20, 31) and (40, 41) has input_ids
    (10, 11, 20, 21, 40) and positions (0, 1, 2, 3, 2). The stream indices (1, 2, 3, 4) predict 3,
    2, 1 and 1 tokens: rows (0, 0, 0, 1, 1, 2, 3), targets (20, 20, 40, 21, 31, 22, 41), order (0,
    3, 5, 1, 4, 2, 6).
    """

    indices: tuple[int, ...]  # the rank microbatch's indices
    lengths: tuple[int, ...]  # the response lengths, in the order of the indices; their sum is S
    input_ids: Tensor  # `[T]`, without the last token of each response, which predicts nothing
    positions: Tensor  # `[T]` from 0 in each sequence
    attention_plan: PackedAttentionPlan
    # `[M]` the stream indices whose hidden states predict response tokens, ascending
    predictors: Tensor
    # `[S]` the index, among the predictors, of the token before each response token; ascending
    rows: Tensor
    targets: Tensor  # `[S]` the response tokens, in the order of their rows
    # `[S]` the index of each target in the concatenated response tokens of all samples
    order: np.ndarray
    first_target: np.ndarray  # `[M + 1]` the first target of each predictor, and S
    separate_tokens: int  # the length of the stream if only each group's prompt were shared

    @property
    def num_tokens(self) -> int:
        """T: the number of distinct prefixes of all sequences without their last tokens."""
        return len(self.input_ids)

    def target_slice(self, predictors: slice) -> slice:
        """Return the targets of a slice of the predictors."""
        first = int(self.first_target[predictors.start])
        last = int(self.first_target[predictors.stop])
        return slice(first, last)

    def local_rows(self, predictors: slice) -> Tensor | None:
        """Return each target's predictor in a slice of them; None: each predicts one target."""
        targets = self.target_slice(predictors)
        if targets.stop - targets.start == predictors.stop - predictors.start:
            return None
        rows = self.rows[targets]
        if predictors.start:
            rows = rows - predictors.start
        return rows

    def sum_over_targets(self, values: Tensor, predictors: slice) -> Tensor:
        """Sum the slice's target `values` for each predictor of a slice."""
        rows = self.local_rows(predictors)
        if rows is None:
            return values
        size = predictors.stop - predictors.start
        return values.new_zeros(size).index_add_(0, rows, values)


def partition(
    samples: Sequence[Sample],
    weights: Sequence[float] | None = None,
    *,
    ranks: int,
    max_tokens: int,
) -> list[tuple[RankMicrobatch, ...]]:
    """Return a tuple of passes, samples with weights, for each rank, all of the same length.

    Args:
        samples: the samples of a group are adjacent; those without response tokens are left out.
        weights: the samples' loss weights; None: 0, for scoring only.
        ranks: the number of ranks.
        max_tokens: the most prompt and response tokens per pass, shared prefixes of a group counted
            once; a longer sequence gets a pass of its own, uncut.

    A shared prefix is computed once, or once per chunk if the group is cut; a cut keeps responses
    with long shared prefixes together. One rank gets nearly full microbatches of similar lengths.
    Several ranks get loads as equal as whole chunks allow, in as few passes as possible.

    Raises ValueError if a prompt is empty, so that nothing predicts the first token, or a group's
    samples are not adjacent.
    """
    groups = ordered_groups(samples)
    chunks: list[PromptChunk] = []
    for group in groups:
        chunks += group.cut(max_tokens)
    if ranks == 1:
        bins = _first_fit(chunks, max_tokens)
    else:
        target = _num_tokens(chunks) // (ranks * MIN_CHUNKS_PER_RANK)
        chunks = []
        for group in groups:
            limit = max(target, MIN_CHUNK_PROMPTS * group.prompt_length)
            chunks += group.cut(min(max_tokens, limit))
        bins = _balanced(chunks, ranks=ranks, max_tokens=max_tokens)
    load = [0] * ranks
    if not weights:
        weights = [0.0] * len(samples)
    partitions: list[list[RankMicrobatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        # the bins of a pass have similar sizes; the largest goes to the rank with the least load
        order = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, content in zip(order, bins[start : start + ranks], strict=True):
            load[rank] += _num_tokens(content)
            rank_microbatch = DUMMY_MICROBATCH
            if content:
                indices = tuple(i for chunk in content for i in chunk.indices)
                rank_microbatch = RankMicrobatch(
                    indices, tuple(samples[i] for i in indices), tuple(weights[i] for i in indices)
                )
            partitions[rank].append(rank_microbatch)
    return [tuple(passes) for passes in partitions]


def first_groups(samples: Sequence[Sample], *, ranks: int, max_tokens: int) -> int:
    """Return the number of samples in the first groups, at least one, that fit into one pass."""
    num_first = num_tokens = 0
    for _, members in groupby(samples, key=lambda sample: sample.group_id):
        group = list(members)
        num_tokens += len(group[0].prompt_ids) + sum(len(sample.response_ids) for sample in group)
        if num_first and num_tokens > ranks * max_tokens:
            break
        num_first += len(group)
    return num_first


@dataclass(frozen=True)
class OrderedGroup:
    """A group's samples with non-empty responses, in lexicographic order of the responses.

    A response begins where the prompts of the group, if they differ, cease to be equal.
    """

    prompt_length: int
    indices: tuple[int, ...]
    lengths: tuple[int, ...]  # of the responses
    shared: tuple[int, ...]  # the number of response tokens that each shares with its predecessor

    def cut(self, limit: int) -> list[PromptChunk]:
        """Cut the group, in its order, into as few chunks of at most `limit` tokens as possible."""
        chunks: list[PromptChunk] = []
        for index, length, shared in zip(self.indices, self.lengths, self.shared, strict=True):
            new_tokens = length - shared
            keys = self.prompt_length + length
            tokens = 0  # a copy of the response before costs nothing
            if new_tokens:
                gathered = -(-keys // SHARED_KEYS_PER_TOKEN)
                tokens = max(new_tokens, min(length, gathered))
            if chunks and chunks[-1].num_tokens + tokens <= limit:
                last = chunks[-1]
                chunks[-1] = PromptChunk((*last.indices, index), last.num_tokens + tokens)
            else:
                # a new chunk computes the prompt and shared prefixes again
                chunks.append(PromptChunk((index,), keys))
        return chunks


def ordered_groups(samples: Sequence[Sample]) -> list[OrderedGroup]:
    """Return the groups of `samples`. Raises ValueError like `partition`."""
    members_of: dict[int, list[int]] = {}
    previous_id = None
    for i, sample in enumerate(samples):
        if sample.group_id != previous_id and sample.group_id in members_of:
            raise ValueError("the samples of a group must be adjacent to share its prompt")
        members_of.setdefault(sample.group_id, []).append(i)
        previous_id = sample.group_id
    return [_ordered_group(samples, members) for members in members_of.values()]


def _ordered_group(samples: Sequence[Sample], members: Sequence[int]) -> OrderedGroup:
    """Order the samples of a group, which are those at the indices `members`."""
    prompts = _distinct_prompts([samples[i] for i in members])
    if not all(prompts):
        raise ValueError(
            f"the samples of group {samples[members[0]].group_id} have no prompt to predict their"
            " first token from"
        )
    # the branches of an agent's episodes have prompts that differ from some token on
    common = _common_length(prompts)
    scored = [i for i in members if len(samples[i].response_ids)]
    responses = [
        token_array((*samples[i].prompt_ids[common:], *samples[i].response_ids))
        if len(prompts) > 1
        else token_array(samples[i].response_ids)
        for i in scored
    ]
    prefixes = sorted_prefixes(responses)
    indices = [scored[at] for at in prefixes.order]
    lengths = [len(responses[at]) for at in prefixes.order]
    return OrderedGroup(common, tuple(indices), tuple(lengths), tuple(prefixes.shared))


def _distinct_prompts(samples: Sequence[Sample]) -> set[tuple[int, ...]]:
    """Return the prompts; mostly one object, because long ones are not compared token by token."""
    return set({id(sample.prompt_ids): sample.prompt_ids for sample in samples}.values())


def _common_length(prompts: Collection[tuple[int, ...]]) -> int:
    """Return the number of tokens with which all prompts begin."""
    lowest = min(prompts)
    highest = max(prompts)
    length = min(len(lowest), len(highest))
    if lowest == highest:
        return length
    for i in range(length):
        if lowest[i] != highest[i]:
            return i
    return length


def _first_fit(chunks: Sequence[PromptChunk], max_tokens: int) -> list[list[PromptChunk]]:
    """Return a rank's bins: chunks by descending mean length, each in the first with room."""
    bins: list[list[PromptChunk]] = []
    room = np.full(len(chunks), max_tokens)

    def by_mean_length(chunk: PromptChunk) -> tuple[float, tuple[int, ...]]:
        return -chunk.num_tokens / len(chunk.indices), chunk.indices

    for chunk in sorted(chunks, key=by_mean_length):
        size = min(chunk.num_tokens, max_tokens)  # a longer chunk gets an empty bin
        at = int((room[: len(bins) + 1] >= size).argmax())
        if at == len(bins):
            bins.append([])
        bins[at].append(chunk)
        room[at] -= chunk.num_tokens
    return bins


def _balanced(
    chunks: Sequence[PromptChunk], *, ranks: int, max_tokens: int
) -> list[list[PromptChunk]]:
    """Return bins for several ranks, the fullest first.

    Their number is the smallest sufficient multiple of `ranks`; from 100 passes on it may be 1 %
    more.
    """
    chunks = sorted(chunks, key=lambda chunk: (-chunk.num_tokens, chunk.indices))
    passes = min_passes([chunk.num_tokens for chunk in chunks], ranks=ranks, max_tokens=max_tokens)
    while (bins := _fill(chunks, passes * ranks, max_tokens)) is None:
        passes += 1 + passes // 100
    # chunks of one group in the same bin become adjacent, so that they share their prompt
    bins.sort(key=_num_tokens, reverse=True)
    return [sorted(content, key=lambda chunk: chunk.indices) for content in bins]


def min_passes(sizes: Sequence[int], *, ranks: int, max_tokens: int) -> int:
    """Return a lower bound on the passes for chunks of these sizes, the largest first."""
    num_tokens = np.minimum(sizes, max_tokens)
    # the first n chunks have at least the size of the last of them, so a bin holds at most
    # max_tokens // size of them
    bins = np.arange(1, len(num_tokens) + 1) / (max_tokens // num_tokens)
    needed = max(num_tokens.sum() / max_tokens, bins.max(initial=0))
    return math.ceil(needed / ranks)


def _fill(
    chunks: Sequence[PromptChunk], count: int, max_tokens: int
) -> list[list[PromptChunk]] | None:
    """Put each chunk into the emptiest of `count` bins; None if a chunk does not fit."""
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


def pack(
    samples: Sequence[Sample], *, max_tokens: int, device: str | torch.device = "cpu"
) -> list[Microbatch]:
    """Return the microbatches of `partition` on one rank, as tensors on `device`."""
    (passes,) = partition(samples, ranks=1, max_tokens=max_tokens)
    return [pack_microbatch(rank_microbatch, device) for rank_microbatch in passes]


def pack_microbatch(rank_microbatch: RankMicrobatch, device: str | torch.device) -> Microbatch:
    """Make one stream of all samples in lexicographic order, without waiting for the device."""
    samples = rank_microbatch.samples
    prompts = {id(sample.prompt_ids): token_array(sample.prompt_ids) for sample in samples}
    lengths = [len(sample.response_ids) for sample in samples]
    num_prompt_tokens = sum(map(len, _distinct_prompts(samples)))
    sequences = []
    for sample in samples:
        tokens = (prompts[id(sample.prompt_ids)], token_array(sample.response_ids))
        sequences.append(np.concatenate(tokens))
    paths, segments = _stream_indices(sequences, sorted_prefixes(sequences))
    new_ids = []
    new_positions = []
    plan = []
    for i, at in segments:
        new_ids.append(sequences[i][at : len(paths[i])])
        new_positions.append(np.arange(at, len(paths[i])))
        plan.append(Segment(paths[i], len(paths[i]) - at))
    # a path ends one token before its sequence, so its last n positions predict the response
    response_paths = [path[len(path) - n :] for path, n in zip(paths, lengths, strict=True)]
    responses = [ids[len(ids) - n :] for ids, n in zip(sequences, lengths, strict=True)]
    predictors = np.concatenate(response_paths)
    order = predictors.argsort(kind="stable")
    distinct, first, rows = np.unique(predictors[order], return_index=True, return_inverse=True)
    columns = (
        np.concatenate(new_ids),
        np.concatenate(new_positions),
        distinct,
        rows,
        np.concatenate(responses)[order],
    )
    device = torch.device(device)
    # one copy to the device, cut there
    joined = torch.from_numpy(np.concatenate(columns, dtype=np.int64))
    parts = to_device(joined, device).split([len(column) for column in columns])
    input_ids, positions, predictor_indices, target_rows, targets = parts
    key_multiple = CUDA_KEY_MULTIPLE if device.type == "cuda" else 1
    return Microbatch(
        indices=rank_microbatch.indices,
        lengths=tuple(lengths),
        input_ids=input_ids,
        positions=positions,
        attention_plan=PackedAttentionPlan(tuple(plan), device, key_multiple=key_multiple),
        predictors=predictor_indices,
        rows=target_rows,
        targets=targets,
        order=order,
        first_target=np.append(first, len(order)),
        separate_tokens=num_prompt_tokens + sum(lengths) - len(lengths),
    )


def _stream_indices(
    sequences: Sequence[np.ndarray], prefixes: SortedPrefixes
) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Return each sequence's stream indices without its last token, and where it is new.

    The second list has pairs of a sequence and its first new token.
    """
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(sequences)
    segments: list[tuple[int, int]] = []
    end = 0
    previous = paths[0]
    for i, shared in zip(prefixes.order, prefixes.shared, strict=True):
        length = len(sequences[i]) - 1
        # neither this sequence's last token nor its predecessor's is in the stream
        shared = min(shared, length, len(previous))
        num_new = length - shared
        if num_new:
            segments.append((i, shared))
        path = np.concatenate([previous[:shared], np.arange(end, end + num_new)])
        paths[i] = path
        previous = path
        end += num_new
    return paths, segments


def rows_of(scores: Tensor, microbatch: Microbatch) -> list[Sequence[float]]:
    """Return the `[S]` scores of a microbatch's targets as one row per sample."""
    target_scores = scores.detach().cpu().numpy()
    numbers = np.empty_like(target_scores)
    numbers[microbatch.order] = target_scores
    rows: list[Sequence[float]] = []
    start = 0
    for length in microbatch.lengths:
        row = numbers[start : start + length]
        # a copy: a view would keep the numbers of all samples in memory
        rows.append(array(numbers.dtype.char, row.tobytes()))
        start += length
    return rows


def in_callers_order(
    microbatches: Sequence[Microbatch], scores: Sequence[Tensor], num_samples: int
) -> list[Sequence[float]]:
    """Return each microbatch's `[S]` scores as rows, in the order of the packed samples.

    A sample without response tokens gets an empty row.
    """
    rows: list[Sequence[float]] = [()] * num_samples
    for microbatch, values in zip(microbatches, scores, strict=True):
        for i, row in zip(microbatch.indices, rows_of(values, microbatch), strict=True):
            rows[i] = row
    return rows
