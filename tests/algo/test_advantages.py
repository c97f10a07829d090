"""Laws of the group-relative advantage (Eq. 4 and 9)."""

import pytest
import torch

from dapo.algo.advantages import group_advantages

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def scores(correct: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([1.0] * correct + [-1.0] * (size - correct), dtype=dtype)


def test_one_correct_of_sixteen_earns_3_75_and_costs_the_others_a_quarter():
    advantages = group_advantages(scores(1, 16))
    # mean -0.875, std 0.5: 1.875 / 0.500001 and -0.125 / 0.500001
    assert advantages[0].item() == pytest.approx(3.7499925, abs=1e-7)
    assert advantages[1:].tolist() == pytest.approx([-0.2499995] * 15, abs=1e-7)


def test_eight_correct_of_sixteen_weigh_0_9682_either_way():
    # std is sqrt(16 / 15) = 1.0327956 by Bessel's correction; without it both would be exactly 1
    assert group_advantages(scores(8, 16)).tolist() == pytest.approx([0.968245] * 8 + [-0.968245] * 8, abs=1e-5)


def test_two_responses_differ_by_the_square_root_of_two():
    assert group_advantages(torch.tensor([1.0, -1.0])).tolist() == pytest.approx([0.707106, -0.707106], abs=1e-5)


def test_shaped_rewards_of_one_group_give_hand_computed_advantages():
    # mean 0, squares 1 + 0.25 + 0.25 + 1 = 2.5, variance 2.5 / 3, std 0.9128709
    advantages = group_advantages(torch.tensor([1.0, 0.5, -0.5, -1.0], dtype=torch.float64))
    assert advantages.tolist() == pytest.approx([1.0954439, 0.5477220, -0.5477220, -1.0954439], abs=1e-6)


def test_scale_none_only_subtracts_the_mean():
    assert group_advantages(scores(1, 16), scale="none").tolist() == [1.875] + [-0.125] * 15


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("count", [2, 3, 7, 16, 1000])
@pytest.mark.parametrize("value", [-1.3, 0.1, 1 / 3, -1.0, 0.0, 1e-30, 12345.678])
@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_rewards_give_exact_zeros_whatever_their_value_and_count(dtype, value, count, scale):
    advantages = group_advantages(torch.full((count,), value, dtype=dtype), scale=scale)
    assert advantages.tolist() == [0.0] * count


def test_a_test_on_the_std_would_have_invented_a_signal():
    # the trap behind the law above: in float32, sixteen times -1.3 have a mean and a std that are off by rounding
    rewards = torch.full((16,), -1.3)
    assert rewards.std() > 0
    assert (rewards - rewards.mean()).abs().max() / (rewards.std() + 1e-6) > 0.05
    assert group_advantages(rewards).abs().max() == 0


def test_a_tiny_real_difference_is_still_a_signal_but_a_small_one():
    # std 1.4142e-6 stands beside eps 1e-6: 1e-6 / 2.4142e-6
    assert group_advantages(torch.tensor([0.0, 2e-6], dtype=torch.float64)).tolist() == pytest.approx(
        [-0.4142136, 0.4142136], abs=1e-6
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("correct", "size"), [(1, 16), (3, 7), (5, 11), (8, 16)])
def test_the_float_type_of_the_rewards_is_kept_but_only_the_result_is_rounded_to_it(correct, size, dtype):
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
