"""Packing: every response scored once, at the right places, in the caller's order."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.policy.packed_attention import PackedAttentionPlan, packed_attention
from dapo.policy.packing import Microbatch, in_callers_order, pack, partition
from dapo.policy.segments import Segment
from helpers.tables import for_each_row
from helpers.tiny_policies import groups_of, ragged, sample

CPU = torch.device("cpu")


def stream_of(microbatch: Microbatch) -> list[int]:
    return microbatch.input_ids.tolist()


def scored(microbatches: list[Microbatch]) -> list[int]:
    return sorted(i for microbatch in microbatches for i in microbatch.indices)


def test_a_groups_prompt_is_there_once_and_no_response_carries_its_last_token() -> None:
    samples = [
        sample(0, (10, 11), (40, 41)),
        sample(0, (10, 11), (20, 21, 22)),
        sample(0, (10, 11), (20, 31)),
    ]
    (microbatch,) = pack(samples, max_tokens=100)
    # in lexicographic order: sample 1, sample 2, sample 0
    assert microbatch.indices == (1, 2, 0)
    assert stream_of(microbatch) == [10, 11, 20, 21, 40]
    assert microbatch.positions.tolist() == [0, 1, 2, 3, 2]
    assert microbatch.predictors.tolist() == [1, 2, 3, 4]
    assert microbatch.rows.tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert microbatch.targets.tolist() == [20, 20, 40, 21, 31, 22, 41]
    assert microbatch.order.tolist() == [0, 3, 5, 1, 4, 2, 6]
    assert microbatch.first_target.tolist() == [0, 3, 5, 6, 7]
    assert [s.keys.tolist() for s in microbatch.attention_plan.segments] == [
        [0, 1, 2, 3],
        [0, 1, 4],
    ]


def test_the_token_before_predicts_each_token_also_across_microbatches() -> None:
    samples = ragged()
    for microbatch in pack(samples, max_tokens=40):
        stream = stream_of(microbatch)
        at = 0
        predictors = microbatch.predictors[microbatch.rows].tolist()
        numbers = np.argsort(microbatch.order)
        stream_indices = [predictors[k] for k in numbers]
        targets = microbatch.targets[torch.from_numpy(numbers)]
        for i, length in zip(microbatch.indices, microbatch.lengths, strict=True):
            row = samples[i]
            before = (row.prompt_ids + row.response_ids)[len(row.prompt_ids) - 1 : -1]
            assert tuple(stream[index] for index in stream_indices[at : at + length]) == before
            assert tuple(targets[at : at + length].tolist()) == row.response_ids
            at += length


@pytest.mark.parametrize("max_tokens", [1, 13, 40, 64, 1000])
def test_every_sample_is_in_one_microbatch_and_only_a_lone_one_exceeds_the_budget(
    max_tokens: int,
) -> None:
    samples = ragged()
    microbatches = pack(samples, max_tokens=max_tokens)
    assert scored(microbatches) == list(range(len(samples)))
    for microbatch in microbatches:
        prompts = {samples[i].group_id: len(samples[i].prompt_ids) for i in microbatch.indices}
        size = sum(prompts.values()) + sum(microbatch.lengths)
        assert size <= max_tokens or len(microbatch.indices) == 1


def test_each_chunk_goes_into_the_first_microbatch_with_room_for_it() -> None:
    for trial in range(20):
        uniforms = keyed_uniforms(keyed_seed("first fit", trial), 3 * trial + 1)
        samples = groups_of([(1, (1 + int(40 * u),)) for u in uniforms])
        sizes = [1 + len(each.response_ids) for each in samples]
        expected: list[list[int]] = []
        for i in sorted(range(len(samples)), key=lambda i, sizes=sizes: (-sizes[i], i)):  # type: ignore[misc]
            with_room = [
                members for members in expected if sum(sizes[j] for j in members) + sizes[i] <= 30
            ]
            if with_room:
                with_room[0].append(i)
            else:
                expected.append([i])
        (found,) = partition(samples, ranks=1, max_tokens=30)
        assert [list(each.indices) for each in found] == expected


def test_a_group_above_the_budget_is_split_and_its_prompt_repeated() -> None:
    samples = groups_of([(10, (5, 5, 5, 5))])
    microbatches = pack(samples, max_tokens=20)
    assert [len(m.indices) for m in microbatches] == [2, 2]
    assert all(stream_of(m)[:10] == list(samples[0].prompt_ids) for m in microbatches)


def test_a_sequence_above_the_budget_goes_alone_and_whole() -> None:
    samples = groups_of([(4, (100, 2))])
    long, short = pack(samples, max_tokens=16)
    assert (long.lengths, short.lengths) == ((100,), (2,))
    assert long.num_tokens == 4 + 99


def test_what_prompts_of_several_groups_begin_with_is_there_once() -> None:
    samples = [
        sample(0, (7, 8, 5), (1, 2)),
        sample(1, (7, 8), (3, 4)),
        sample(2, (7, 8, 6), (3, 4)),
    ]
    (microbatch,) = pack(samples, max_tokens=100)
    assert stream_of(microbatch) == [7, 8, 3, 5, 1, 6, 3]
    assert microbatch.separate_tokens == 4 + 3 + 4


def test_packing_is_a_function_of_the_samples() -> None:
    first = pack(ragged(), max_tokens=40)
    second = pack(ragged(), max_tokens=40)
    assert [m.indices for m in first] == [m.indices for m in second]
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, second, strict=True))


def test_outputs_come_back_in_the_callers_order() -> None:
    samples = [
        *reversed(ragged()),
        sample(9, (1, 2), (3,)),
        sample(8, (1, 2), range(17)),
        sample(8, (1, 2), (4, 5)),
    ]
    microbatches = pack(samples, max_tokens=40)
    assert [i for m in microbatches for i in m.indices] != list(range(len(samples)))
    rows = in_callers_order(microbatches, [m.targets for m in microbatches], len(samples))
    assert [tuple(row) for row in rows] == [row.response_ids for row in samples]


def test_a_response_of_zero_tokens_has_an_empty_row_and_touches_no_other() -> None:
    samples = [sample(0, (1, 2), ()), sample(0, (1, 2), (3, 4)), sample(1, (5,), ())]
    microbatches = pack(samples, max_tokens=100)
    assert scored(microbatches) == [1]
    rows = in_callers_order(microbatches, [m.targets for m in microbatches], 3)
    assert [tuple(row) for row in rows] == [(), (3, 4), ()]
    assert pack([samples[0]], max_tokens=100) == []


def test_a_sample_without_a_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        pack([sample(3, (), (1, 2))], max_tokens=100)


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_of_a_group_that_are_apart_are_refused(ranks: int) -> None:
    first = sample(0, (1, 2), (3, 4))
    second = sample(0, (1, 2), (5,))
    with pytest.raises(ValueError, match="must be adjacent"):
        partition([first, sample(1, (9,), (8,)), second], ranks=ranks, max_tokens=100)


def test_microbatches_are_nearly_full() -> None:
    samples = groups_of([(10, [3 + (7 * g + 5 * i) % 30 for i in range(8)]) for g in range(16)])
    total = sum(len(s.response_ids) for s in samples) + 16 * 10
    assert len(pack(samples, max_tokens=512)) <= 1.3 * total / 512 + 1


def test_less_than_half_of_what_attention_computes_is_padding() -> None:
    samples = groups_of([(5 + 40 * g, (1, 2, 3, 9, 40, 200)) for g in range(4)])
    (microbatch,) = pack(samples, max_tokens=100_000)
    assert (
        sum(len(block.queries) for block in microbatch.attention_plan.padded.blocks)
        < 2 * microbatch.num_tokens
    )


def segment(*runs: tuple[int, int]) -> Segment:
    """A segment whose keys are the runs (start, length) of the stream; the last run is its own."""
    return Segment(
        np.concatenate([np.arange(start, start + length) for start, length in runs]), runs[-1][1]
    )


# Three prompts, responses before and behind the next prompt; then two that share the beginning of
# another response, one of them only its first two tokens. The first two of the last four are one
# block; the padded third query of the second of them stands behind all keys.
SEGMENTS = (
    segment((0, 5)),
    segment((0, 5), (5, 2)),
    segment((7, 2)),
    segment((0, 5), (9, 7)),
    segment((7, 2), (16, 3)),
    segment((19, 6)),
    segment((0, 5), (25, 3)),
    segment((19, 6), (28, 2)),
    segment((0, 5), (9, 7), (30, 4)),
    segment((0, 5), (9, 2), (34, 3)),
)
NUM_TOKENS = 37


def dense_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """`[1, T, heads, d]`, with one mask over the whole stream that says who sees whom."""
    seen = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for row in SEGMENTS:
        sequence = row.keys.tolist()
        for at in range(row.context_length, len(sequence)):
            first = 0 if window is None else max(0, at - window + 1)
            seen[sequence[at], sequence[first : at + 1]] = True
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 4, 6, 100])
@for_each_row("mask_elements", [10**6, 0])
@for_each_row("kv_heads", [1, 2, 4])
@for_each_row("key_multiple", [1, 16])
def test_packed_attention_equals_one_dense_mask_in_values_and_gradients(
    window: int | None, mask_elements: int, kv_heads: int, key_multiple: int
) -> None:
    attention_plan = PackedAttentionPlan(SEGMENTS, CPU, mask_elements, key_multiple)
    generator = torch.Generator().manual_seed(0)

    def states(heads: int) -> Tensor:
        return torch.randn(
            1, heads, NUM_TOKENS, 8, generator=generator, dtype=torch.float64, requires_grad=True
        )

    query = states(4)
    key = states(kv_heads)
    value = states(kv_heads)
    upstream = torch.randn(1, NUM_TOKENS, 4, 8, generator=generator, dtype=torch.float64)
    packed, _ = packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        sliding_window=window,
        packed_attention_plan=attention_plan,
    )
    dense = dense_attention(query, key, value, window)
    torch.testing.assert_close(packed, dense, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out, (query, key, value), upstream) for out in (packed, dense)]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_blocks_without_masks_are_plain_causal() -> None:
    causal = PackedAttentionPlan(SEGMENTS, CPU, mask_elements=0).padded
    for block in causal.blocks:
        # a context of more tokens than follow it stays out of the queries
        has_long_context = 2 * len(block.queries) < len(block.keys)
        assert (block.mask(None, torch.float32) is not None) == has_long_context
    assert (
        0
        < sum(block.mask(None, torch.float32) is None for block in causal.blocks)
        < len(causal.blocks)
    )
    masked = PackedAttentionPlan(SEGMENTS, CPU).padded
    without = [block for block in masked.blocks if block.mask(None, torch.float32) is None]
    assert sum(block.size for block in without) == 3  # the prompts


def test_masks_have_a_multiple_of_keys_where_the_plan_asks_for_it() -> None:
    masks = [
        block.mask(4, torch.float32)
        for block in PackedAttentionPlan(SEGMENTS, CPU, key_multiple=16).padded.blocks
    ]
    assert {mask.shape[-1] for mask in masks if mask is not None} == {16}


def test_a_model_that_attends_by_a_plan_raises_when_there_is_none() -> None:
    states = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="packed_attention_plan"):
        packed_attention(torch.nn.Identity(), states, states, states, None)
