"""Laws of who computes what: every row once, as many passes for each rank, as evenly as whole prompts allow."""

import pytest
from policy_examples import groups_of, ids, sample

from dapo.policy.fsdp.partition import IDLE, Portion, share
from dapo.types import Sample


def tokens(portion: Portion) -> int:
    """With each group's prompt once."""
    prompts = {(s.group_id, s.prompt_ids) for s in portion.samples}
    return sum(len(prompt) for _, prompt in prompts) + sum(len(s.response_ids) for s in portion.samples)


def load(portions: tuple[Portion, ...]) -> int:
    return sum(tokens(portion) for portion in portions if portion != IDLE)


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
    shares = share(samples, weights, ranks=ranks, max_tokens=64)
    assert len(shares) == ranks
    assert len({len(portions) for portions in shares}) == 1
    found = [row for portions in shares for p in portions for row in zip(p.indices, p.samples, p.weights, strict=False)]
    assert sorted(i for i, _, _ in found) == list(range(len(samples)))
    assert all(row is samples[i] and weight == weights[i] for i, row, weight in found)
    for portions in shares:
        assert all(tokens(p) <= 64 or len(p.samples) == 1 for p in portions)


def test_a_rank_without_rows_makes_passes_over_a_row_that_does_not_train() -> None:
    shares = share(groups_of([(3, (5,))]), [0.5], ranks=3, max_tokens=64)
    assert [portions[0].indices for portions in shares] == [(0,), (), ()]
    assert shares[1] == shares[2] == (IDLE,)
    assert not any(IDLE.samples[0].mask)
    assert IDLE.weights == (0.0,)


def test_equal_groups_are_shared_out_equally_and_in_as_few_passes_as_fit() -> None:
    samples = groups_of([(4, (6, 6, 6, 6))] * 16)  # 28 tokens a group, two to a microbatch
    shares = share(samples, weights_of(samples), ranks=4, max_tokens=64)
    assert [load(portions) for portions in shares] == [112] * 4
    assert [len(portions) for portions in shares] == [2] * 4


def test_a_group_that_is_too_much_for_its_rank_is_cut_and_its_prompt_computed_twice() -> None:
    samples = groups_of([(2, (20, 20, 20, 20))])
    shares = share(samples, weights_of(samples), ranks=2, max_tokens=1000)
    assert [load(portions) for portions in shares] == [42, 42]


def test_a_group_is_not_cut_where_its_prompt_would_cost_more_than_balance_gains() -> None:
    samples = groups_of([(30, (2, 2, 2, 2))])
    shares = share(samples, weights_of(samples), ranks=2, max_tokens=1000)
    assert [load(portions) for portions in shares] == [38, 0]


def test_ragged_minibatches_are_balanced_within_a_few_percent() -> None:
    lengths = [(4, tuple(1 + (7 * i + 13 * j) % 97 for j in range(8))) for i in range(32)]
    samples = groups_of(lengths)
    for ranks in (2, 4, 8):
        loads = [load(portions) for portions in share(samples, weights_of(samples), ranks=ranks, max_tokens=400)]
        assert max(loads) <= 1.05 * sum(loads) / ranks, (ranks, loads)


def test_a_response_of_zero_tokens_is_nobodys() -> None:
    samples = [sample(0, ids(3), ()), sample(0, ids(3), ids(4))]
    (portions,) = share(samples, [0.1, 0.2], ranks=1, max_tokens=64)
    assert [p.indices for p in portions] == [(1,)]
