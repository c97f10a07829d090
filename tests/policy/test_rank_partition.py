"""Laws of who computes what: every row once, as many passes for each rank, as evenly as whole
prompts allow.
"""

import math
from statistics import NormalDist

import pytest

from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.policy.packing import (
    DUMMY_MICROBATCH,
    RankMicrobatch,
    first_groups,
    min_passes,
    ordered_groups,
    partition,
)
from dapo.types import Sample
from helpers.tables import for_each_row
from helpers.tiny_policies import groups_of, ids, sample


def tokens(rank_microbatch: RankMicrobatch) -> int:
    """With each group's prompt once."""
    prompts = {(s.group_id, s.prompt_ids) for s in rank_microbatch.samples}
    return sum(len(prompt) for _, prompt in prompts) + sum(
        len(s.response_ids) for s in rank_microbatch.samples
    )


def load(rank_microbatches: tuple[RankMicrobatch, ...]) -> int:
    return sum(
        tokens(rank_microbatch)
        for rank_microbatch in rank_microbatches
        if rank_microbatch != DUMMY_MICROBATCH
    )


def weights_of(samples: list[Sample]) -> list[float]:
    return [1 / (i + 3) for i in range(len(samples))]


EXAMPLES = {
    "one group of one": [(3, (5,))],
    "fewer groups than ranks": [(3, (40, 41, 42)), (2, (9,))],
    "ragged": [
        (5, (1, 3, 50, 7)),
        (12, (2, 30, 9)),
        (1, (4, 4)),
        (3, (1, 1)),
        (60, (2, 2)),
        (2, (100, 1)),
    ],
    "many alike": [(4, (6, 6, 6, 6))] * 16,
    "nothing": [],
}


@for_each_row("ranks", [1, 2, 3, 8])
@for_each_row("name", EXAMPLES)
def test_every_row_is_computed_once_with_its_weight_and_all_ranks_make_as_many_passes(
    name: str, ranks: int
) -> None:
    samples = groups_of(EXAMPLES[name])
    weights = weights_of(samples)
    partitions = partition(samples, weights, ranks=ranks, max_tokens=64)
    assert len(partitions) == ranks
    assert len({len(rank_microbatches) for rank_microbatches in partitions}) == 1
    found = [
        row
        for rank_microbatches in partitions
        for p in rank_microbatches
        for row in zip(p.indices, p.samples, p.weights, strict=False)
    ]
    assert sorted(i for i, _, _ in found) == list(range(len(samples)))
    assert all(row is samples[i] and weight == weights[i] for i, row, weight in found)
    for rank_microbatches in partitions:
        assert all(tokens(p) <= 64 or len(p.samples) == 1 for p in rank_microbatches)


def test_a_rank_without_rows_makes_passes_over_a_row_that_does_not_train() -> None:
    partitions = partition(groups_of([(3, (5,))]), [0.5], ranks=3, max_tokens=64)
    assert [rank_microbatches[0].indices for rank_microbatches in partitions] == [(0,), (), ()]
    assert partitions[1] == partitions[2] == (DUMMY_MICROBATCH,)
    assert not any(DUMMY_MICROBATCH.samples[0].mask)
    assert DUMMY_MICROBATCH.weights == (0.0,)


def test_equal_groups_are_distributed_equally_and_in_as_few_passes_as_fit() -> None:
    samples = groups_of([(4, (6, 6, 6, 6))] * 16)  # 28 tokens a group, two to a microbatch
    partitions = partition(samples, weights_of(samples), ranks=4, max_tokens=64)
    assert [load(rank_microbatches) for rank_microbatches in partitions] == [112] * 4
    assert [len(rank_microbatches) for rank_microbatches in partitions] == [2] * 4


def test_a_group_that_is_too_much_for_its_rank_is_cut_and_its_prompt_computed_twice() -> None:
    samples = groups_of([(2, (20, 20, 20, 20))])
    partitions = partition(samples, weights_of(samples), ranks=2, max_tokens=1000)
    assert [load(rank_microbatches) for rank_microbatches in partitions] == [42, 42]


def test_a_group_is_not_cut_where_its_prompt_would_cost_more_than_balance_gains() -> None:
    samples = groups_of([(30, (2, 2, 2, 2))])
    partitions = partition(samples, weights_of(samples), ranks=2, max_tokens=1000)
    assert [load(rank_microbatches) for rank_microbatches in partitions] == [38, 0]


def test_ragged_minibatches_are_balanced_within_a_few_percent() -> None:
    lengths = [(4, tuple(1 + (7 * i + 13 * j) % 97 for j in range(8))) for i in range(32)]
    samples = groups_of(lengths)
    for ranks in (2, 4, 8):
        loads = [
            load(rank_microbatches)
            for rank_microbatches in partition(
                samples, weights_of(samples), ranks=ranks, max_tokens=400
            )
        ]
        assert max(loads) <= 1.05 * sum(loads) / ranks, (ranks, loads)


def test_a_response_of_zero_tokens_is_in_no_partition() -> None:
    samples = [sample(0, ids(3), ()), sample(0, ids(3), ids(4))]
    (rank_microbatches,) = partition(samples, [0.1, 0.2], ranks=1, max_tokens=64)
    assert [p.indices for p in rank_microbatches] == [(1,)]


@pytest.mark.parametrize(
    ("num_groups", "ranks", "max_tokens"), [(8, 8, 1638), (32, 8, 2458), (128, 8, 1638)]
)
def test_the_search_for_the_fewest_passes_begins_at_most_two_below_its_answer(
    num_groups: int, ranks: int, max_tokens: int
) -> None:
    """Each attempt distributes all chunks; from the number of tokens alone, a search would begin 10
    to 15 % below.
    """
    spread = NormalDist(math.log(500), 0.9)
    uniforms = keyed_uniforms(keyed_seed("lengths", num_groups), 16 * num_groups)
    lengths = [min(2048, 1 + int(math.exp(spread.inv_cdf(u)))) for u in uniforms]
    samples = groups_of([(20, tuple(lengths[16 * i : 16 * i + 16])) for i in range(num_groups)])
    found = partition(samples, ranks=ranks, max_tokens=max_tokens)[0]
    chunks = [
        chunk.num_tokens for group in ordered_groups(samples) for chunk in group.cut(max_tokens)
    ]
    first = min_passes(sorted(chunks, reverse=True), ranks=ranks, max_tokens=max_tokens)
    assert first <= len(found) <= first + 2


@for_each_row("lengths", [(6, 6, 6, 6), (5, 5, 4, 4, 3, 3), (9,), (7, 4, 4, 4, 4)])
def test_no_distribution_has_fewer_passes_than_the_search_begins_with(
    lengths: tuple[int, ...],
) -> None:
    def fits(bins: list[int], remaining: tuple[int, ...]) -> bool:
        if not remaining:
            return True
        size = min(remaining[0], 10)
        choices = (i for i, used in enumerate(bins) if used + size <= 10)
        return any(
            fits([*bins[:i], bins[i] + size, *bins[i + 1 :]], remaining[1:]) for i in choices
        )

    passes = min_passes(sorted(lengths, reverse=True), ranks=1, max_tokens=10)
    assert not fits([0] * (passes - 1), lengths)


def test_the_first_groups_fill_about_one_pass_of_every_rank() -> None:
    samples = groups_of([(10, (30, 30)), (10, (30, 30)), (10, (60,)), (5, (1,))])
    found = [
        first_groups(samples, ranks=2, max_tokens=max_tokens)
        for max_tokens in (1, 69, 70, 104, 105, 108)
    ]
    assert found == [2, 2, 4, 4, 5, 6]
    assert first_groups([], ranks=2, max_tokens=10) == 0
