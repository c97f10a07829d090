"""Laws of who computes what: every row once, as many passes for each rank, as evenly as whole prompts allow."""

import pytest

from dapo.policy.packing import DUMMY_MICROBATCH, RankMicrobatch, partition
from dapo.types import Sample
from helpers.tiny_policies import groups_of, ids, sample


def tokens(rank_microbatch: RankMicrobatch) -> int:
    """With each group's prompt once."""
    prompts = {(s.group_id, s.prompt_ids) for s in rank_microbatch.samples}
    return sum(len(prompt) for _, prompt in prompts) + sum(len(s.response_ids) for s in rank_microbatch.samples)


def load(rank_microbatches: tuple[RankMicrobatch, ...]) -> int:
    return sum(tokens(rank_microbatch) for rank_microbatch in rank_microbatches if rank_microbatch != DUMMY_MICROBATCH)


def weights_of(samples: list[Sample]) -> list[float]:
    return [1 / (i + 3) for i in range(len(samples))]


EXAMPLES = {
    "one group of one": [(3, (5,))],
    "fewer groups than ranks": [(3, (40, 41, 42)), (2, (9,))],
    "ragged": [(5, (1, 3, 50, 7)), (12, (2, 30, 9)), (1, (4, 4)), (3, (1, 1)), (60, (2, 2)), (2, (100, 1))],
    "many alike": [(4, (6, 6, 6, 6))] * 16,
    "nothing": [],
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_row_is_computed_once_with_its_weight_and_all_ranks_make_as_many_passes(name: str, ranks: int) -> None:
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
            for rank_microbatches in partition(samples, weights_of(samples), ranks=ranks, max_tokens=400)
        ]
        assert max(loads) <= 1.05 * sum(loads) / ranks, (ranks, loads)


def test_a_response_of_zero_tokens_is_in_no_partition() -> None:
    samples = [sample(0, ids(3), ()), sample(0, ids(3), ids(4))]
    (rank_microbatches,) = partition(samples, [0.1, 0.2], ranks=1, max_tokens=64)
    assert [p.indices for p in rank_microbatches] == [(1,)]
