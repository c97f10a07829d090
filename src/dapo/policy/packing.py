"""Samples to microbatches: flat streams without padding in which the responses of a group share one prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dapo.core.packed import CompactArray
from dapo.policy.packed_attention import PackedAttentionPlan, Segment, build_attention_plan
from dapo.types import Sample


@dataclass(frozen=True)
class Microbatch:
    """One forward and backward: T tokens in the stream, S response tokens to score."""

    indices: tuple[int, ...]
    """Which of the caller's samples are here, in the order of their scored tokens."""
    lengths: tuple[int, ...]
    """Their response lengths; they add up to S."""
    input_ids: Tensor
    """`[T]`. A response's last token is not there: nothing follows it."""
    positions: Tensor
    """`[T]` from 0 in each sequence; a response goes on where its prompt ends."""
    attention_plan: PackedAttentionPlan
    predictors: Tensor
    """`[S]` the place in the stream whose hidden state predicts each response token: the one before it."""
    targets: Tensor
    """`[S]` the response tokens."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)


@dataclass(frozen=True)
class PromptChunk:
    """A prompt with responses of its group that go into one microbatch together."""

    prompt_ids: tuple[int, ...]
    indices: tuple[int, ...]
    num_tokens: int


def pack(samples: Sequence[Sample], *, max_tokens: int, device: str | torch.device = "cpu") -> list[Microbatch]:
    """Distribute `samples` over microbatches of at most `max_tokens` prompt and response tokens.

    A group's prompt is there once, or once in each microbatch where the group does not fit into one; a single sequence
    above `max_tokens` goes alone, uncut. Samples without response tokens have nothing to score and are left out, so
    every other sample is in exactly one microbatch. A function of the samples and `max_tokens` alone. Raises ValueError
    for an empty prompt: nothing would predict the first token.
    """
    bins: list[list[PromptChunk]] = []
    room: list[int] = []
    # the longest first, each where it fits first: nearly full microbatches of similar lengths
    for prompt_chunk in sorted(
        prompt_chunks(samples, lambda _: max_tokens), key=lambda p: (-p.num_tokens / len(p.indices), p.indices)
    ):
        at = next((i for i, free in enumerate(room) if prompt_chunk.num_tokens <= free), None)
        if at is None:
            bins.append([prompt_chunk])
            room.append(max_tokens - prompt_chunk.num_tokens)
        else:
            bins[at].append(prompt_chunk)
            room[at] -= prompt_chunk.num_tokens
    return [_microbatch(prompt_chunks, samples, torch.device(device)) for prompt_chunks in bins]


def prompt_chunks(samples: Sequence[Sample], limit: Callable[[int], int]) -> list[PromptChunk]:
    """Every group, cut where it has more tokens than the `limit` for its length of prompt, longest responses first."""
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, sample in enumerate(samples):
        if not sample.prompt_ids:
            raise ValueError(f"sample {i} of group {sample.group_id} has no prompt: nothing predicts its response")
        if sample.response_ids:
            groups.setdefault((sample.group_id, sample.prompt_ids), []).append(i)
    found = []
    for (_, prompt_ids), members in groups.items():
        max_tokens = limit(len(prompt_ids))
        members.sort(key=lambda i: (-len(samples[i].response_ids), i))
        chosen: list[int] = []
        num_tokens = len(prompt_ids)
        for i in members:
            length = len(samples[i].response_ids)
            if chosen and num_tokens + length > max_tokens:
                found.append(PromptChunk(prompt_ids, tuple(chosen), num_tokens))
                chosen, num_tokens = [], len(prompt_ids)
            chosen.append(i)
            num_tokens += length
        found.append(PromptChunk(prompt_ids, tuple(chosen), num_tokens))
    return found


def _microbatch(prompt_chunks: Sequence[PromptChunk], samples: Sequence[Sample], device: torch.device) -> Microbatch:
    stream: list[int] = []
    positions: list[int] = []
    rows: list[Segment] = []
    predictors: list[int] = []
    for prompt_chunk in prompt_chunks:
        prompt_start, prompt_length = len(stream), len(prompt_chunk.prompt_ids)
        rows.append(Segment(0, 0, prompt_start, prompt_length))
        stream += prompt_chunk.prompt_ids
        positions += range(prompt_length)
        for i in prompt_chunk.indices:
            response_start, fed = len(stream), samples[i].response_ids[:-1]
            if fed:
                rows.append(Segment(prompt_start, prompt_length, response_start, len(fed)))
            stream += fed
            positions += range(prompt_length, prompt_length + len(fed))
            predictors += [prompt_start + prompt_length - 1, *range(response_start, response_start + len(fed))]
    indices = tuple(i for prompt_chunk in prompt_chunks for i in prompt_chunk.indices)
    return Microbatch(
        indices=indices,
        lengths=tuple(len(samples[i].response_ids) for i in indices),
        input_ids=torch.tensor(stream, device=device),
        positions=torch.tensor(positions, device=device),
        attention_plan=build_attention_plan(rows, len(stream), device),
        predictors=torch.tensor(predictors, device=device),
        targets=torch.tensor([token for i in indices for token in samples[i].response_ids], device=device),
    )


def in_callers_order(
    microbatches: Sequence[Microbatch], scores: Sequence[Tensor], num_samples: int
) -> list[Sequence[float]]:
    """The `[S]` scores of each microbatch as one row a sample, in the order in which the samples were given.

    A sample without response tokens gets an empty one.
    """
    rows: list[Sequence[float]] = [()] * num_samples
    for microbatch, values in zip(microbatches, scores, strict=True):
        numbers = values.detach().cpu().numpy()
        ends = list(accumulate(microbatch.lengths))
        for i, length, end in zip(microbatch.indices, microbatch.lengths, ends, strict=True):
            rows[i] = CompactArray(numbers[end - length : end])
    return rows
