"""Laws of the advantages: relative to the group (Eq. 4 and 9), RLOO, REINFORCE++."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.algo.advantages import (
    group_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
)
from dapo.algo.estimator_table import ESTIMATORS as ESTIMATOR_TABLE
from dapo.algo.estimator_table import STD_EPS
from helpers.tables import for_each_row

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def scores(correct: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([1.0] * correct + [-1.0] * (size - correct), dtype=dtype)


def test_one_correct_of_sixteen_earns_3_75_and_costs_the_others_a_quarter():
    advantages = group_advantages(scores(1, 16))
    # mean -0.875, std 0.5: 1.875 / 0.500001 and -0.125 / 0.500001
    assert advantages[0].item() == pytest.approx(3.7499925, abs=1e-7)
    assert advantages[1:].tolist() == pytest.approx([-0.2499995] * 15, abs=1e-7)


def test_scale_none_only_subtracts_the_mean():
    assert group_advantages(scores(1, 16), scale="none").tolist() == [1.875] + [-0.125] * 15


@for_each_row("scale", ["std", "none"])
@for_each_row("count", [2, 3, 7, 16, 1000])
@for_each_row("value", [-1.3, 0.1, 1 / 3, -1.0, 0.0, 1e-30, 12345.678])
@for_each_row("dtype", FLOATS)
def test_equal_rewards_give_exact_zeros_whatever_their_value_and_count(dtype, value, count, scale):
    advantages = group_advantages(torch.full((count,), value, dtype=dtype), scale=scale)
    assert advantages.tolist() == [0.0] * count


def test_a_test_on_the_std_would_have_invented_a_signal():
    # the trap behind the law above: in float32, sixteen times -1.3 have a mean and a std that are
    # off by rounding
    rewards = torch.full((16,), -1.3)
    assert rewards.std() > 0
    assert (rewards - rewards.mean()).abs().max() / (rewards.std() + 1e-6) > 0.05
    assert group_advantages(rewards).abs().max() == 0


def test_a_tiny_real_difference_is_still_a_signal_but_a_small_one():
    # std 1.4142e-6 stands beside eps 1e-6: 1e-6 / 2.4142e-6
    assert group_advantages(
        torch.tensor([0.0, 2e-6], dtype=torch.float64)
    ).tolist() == pytest.approx([-0.4142136, 0.4142136], abs=1e-6)


@for_each_row("dtype", FLOATS)
@for_each_row(("correct", "size"), [(1, 16), (3, 7), (5, 11), (8, 16)])
def test_the_float_type_of_the_rewards_is_kept_but_only_the_result_is_rounded_to_it(
    correct, size, dtype
):
    advantages = group_advantages(scores(correct, size, dtype))
    assert advantages.dtype == dtype
    assert advantages.tolist() == group_advantages(scores(correct, size)).to(dtype).tolist()


@pytest.mark.parametrize("scale", ["std", "none"])
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(scale):
    rewards = torch.tensor([1.0, -1.0, 0.25, -1.5, 0.5], dtype=torch.float64)
    advantages = group_advantages(rewards, scale=scale)
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-12)
    assert advantages.argsort().tolist() == rewards.argsort().tolist() == [3, 1, 2, 4, 0]


def test_the_rewards_are_not_written_to():
    rewards = scores(1, 4)
    group_advantages(rewards)
    assert rewards.tolist() == [1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("rewards", [torch.tensor([1.0]), torch.tensor([]), torch.ones(2, 2)])
def test_anything_but_one_group_of_two_or_more_is_refused(rewards):
    with pytest.raises(ValueError, match=r"at least 2 responses, got shape"):
        group_advantages(rewards)


def test_integer_rewards_are_refused_because_the_result_could_not_keep_their_type():
    with pytest.raises(ValueError, match=r"float type, got torch.int64"):
        group_advantages(torch.tensor([1, -1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages(torch.tensor([1.0, bad]))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="'std' or 'none', got 'batch'"):
        group_advantages(scores(1, 4), scale="batch")


# --- RLOO and REINFORCE++


def in_one_group(rewards: torch.Tensor) -> torch.Tensor:
    return reinforce_pp_baseline_advantages(rewards, torch.zeros(len(rewards)))


ESTIMATORS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    rloo_advantages,
    reinforce_pp_advantages,
    in_one_group,
]
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(
    lambda found: torch.tensor(found).double()
)


@settings(max_examples=50)
@given(REWARDS)
def test_rloo_is_g_over_g_minus_one_times_the_centred_reward(rewards):
    size = len(rewards)
    numbers = rewards.tolist()
    naive = [
        own - sum(numbers[:i] + numbers[i + 1 :]) / (size - 1) for i, own in enumerate(numbers)
    ]
    assert rloo_advantages(rewards).tolist() == pytest.approx(naive, abs=1e-10)
    centred = group_advantages(rewards, scale="none")
    torch.testing.assert_close(
        rloo_advantages(rewards), centred * size / (size - 1), rtol=0, atol=1e-10
    )


@settings(max_examples=50)
@given(REWARDS.filter(lambda rewards: rewards.std() > 0.1), st.floats(-100, 100), st.floats(0.5, 4))
def test_a_shift_of_all_rewards_changes_nothing_and_a_scale_only_rloo(rewards, shift, scale):
    for estimate in ESTIMATORS:
        torch.testing.assert_close(estimate(rewards + shift), estimate(rewards), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        rloo_advantages(scale * rewards), scale * rloo_advantages(rewards), rtol=0, atol=1e-10
    )
    whitened = reinforce_pp_advantages(rewards)
    # std is at least .1, beside which eps moves the result by 1e-5 of it at most
    torch.testing.assert_close(
        reinforce_pp_advantages(scale * rewards), whitened, rtol=2e-5, atol=0
    )


def test_a_batch_of_three_groups_is_whitened_as_one():
    # two right of four, none of two, two of two: mean 0, squares 8, std sqrt(8 / 7) = 1.0690450
    batch = torch.tensor([1, 1, -1, -1, -1, -1, 1, 1], dtype=torch.float64)
    advantages = reinforce_pp_advantages(batch)
    assert advantages.tolist() == pytest.approx((batch / 1.0690450).tolist(), abs=1e-5)
    uneven = reinforce_pp_advantages(torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64))
    assert uneven.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)  # mean -0.5, std 1


@settings(max_examples=50)
@given(REWARDS)
def test_a_whitened_batch_has_mean_zero_and_standard_deviation_one(rewards):
    advantages = reinforce_pp_advantages(rewards)
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
    if float(rewards.std()) > 0.1:
        assert float(advantages.std()) == pytest.approx(1, abs=2e-5)


GROUPED = st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=5)


def whitened_differences(groups: list[list[float]]) -> list[float]:
    """The equations of REINFORCE++ w/ baseline, written out."""
    above = [reward - sum(of_group) / len(of_group) for of_group in groups for reward in of_group]
    mean = sum(above) / len(above)
    std = (sum((value - mean) ** 2 for value in above) / (len(above) - 1)) ** 0.5
    return [(value - mean) / (std + STD_EPS) for value in above]


def batch_of(groups: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards of all groups, and ids in no order that means anything."""
    ids = [7 * (len(groups) - i) - 3 for i, of_group in enumerate(groups) for _ in of_group]
    return torch.tensor(
        [reward for of_group in groups for reward in of_group], dtype=torch.float64
    ), torch.tensor(ids)


@settings(max_examples=100)
@given(GROUPED)
def test_with_a_baseline_the_mean_is_of_the_group_and_the_std_of_the_batch(groups):
    rewards, ids = batch_of(groups)
    advantages = reinforce_pp_baseline_advantages(rewards, ids)
    assert advantages.tolist() == pytest.approx(whitened_differences(groups), abs=1e-7)
    mixed = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(0))
    again = reinforce_pp_baseline_advantages(rewards[mixed], ids[mixed])
    torch.testing.assert_close(again, advantages[mixed], rtol=0, atol=1e-9)


def test_with_a_baseline_easy_and_hard_problems_share_the_scale_but_not_the_mean():
    # three right of four: 1/4 and -3/4; one right of four: 3/4 and -1/4; squares 1.5 over 7: std
    # 0.46291
    groups = [[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    advantages = reinforce_pp_baseline_advantages(*batch_of(groups)).tolist()
    assert advantages == pytest.approx(
        [0.54006] * 3 + [-1.62018] + [1.62018] + [-0.54006] * 3, abs=1e-4
    )
    plain = reinforce_pp_advantages(batch_of(groups)[0]).tolist()
    # without it a wrong response to either problem counts the same
    assert plain[3] == pytest.approx(plain[5])
    assert advantages[3] == pytest.approx(3 * advantages[5])


def test_with_a_baseline_a_group_of_equal_rewards_has_exact_zeros_and_counts_in_the_std():
    alone = reinforce_pp_baseline_advantages(*batch_of([[1.0, 0.0]]))
    advantages = reinforce_pp_baseline_advantages(*batch_of([[0.1, 0.1, 0.1], [1.0, 0.0]]))
    assert advantages[:3].tolist() == [0.0] * 3
    # std .5 / sqrt(4 / 1) of before
    assert advantages[3:].tolist() == pytest.approx((2 * alone).tolist(), rel=1e-5)


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(ValueError, match="at least 2 responses"):
        reinforce_pp_baseline_advantages(*batch_of([[1.0, 0.0], [1.0]]))


def test_each_row_of_the_table_names_a_function_and_gae_a_critic():
    for name, row in ESTIMATOR_TABLE.items():
        assert (row.function is None) == (name == "gae")
        if row.function is not None:
            assert row.load().__name__ == f"{name}_advantages"
            assert row.takes_batch == name.startswith("reinforce_pp")


@for_each_row("estimate", ESTIMATORS)
@for_each_row("dtype", FLOATS)
@for_each_row("value", [-1.3, 0.1, 1 / 3, 0.0, 12345.678])
def test_equal_rewards_are_exact_zeros_with_any_estimator(estimate, value, dtype):
    advantages = estimate(torch.full((16,), value, dtype=dtype))
    assert advantages.dtype == dtype
    assert advantages.tolist() == [0.0] * 16


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_what_no_estimator_can_compare_is_refused(estimate):
    for rewards, message in [
        (torch.tensor([1.0]), "at least 2 responses, got shape"),
        (torch.tensor([1, -1]), "float type, got torch.int64"),
        (torch.tensor([1.0, float("nan")]), "must be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            estimate(rewards)
