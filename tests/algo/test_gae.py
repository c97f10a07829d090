"""GAE and the value loss against naive loops and by hand."""

import math
import random

import pytest
import torch
from torch import Tensor

from conformance import naive
from dapo.algo.gae import (
    explained_variance,
    generalized_advantages,
    token_rewards,
    value_loss,
    whiten,
)

LENGTHS = (5, 1, 9, 3, 0)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`[N, T]` rewards, values and `[N]` lengths; behind the ends stand numbers that must not
    count.
    """
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(
        2, len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64
    )
    lengths = torch.tensor(LENGTHS)
    behind = torch.arange(max(LENGTHS)) >= lengths[:, None]
    return rewards.masked_fill(behind, torch.nan), values.masked_fill(behind, torch.nan), lengths


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5, 0.0])
def test_advantages_and_targets_equal_the_naive_double_loop_over_tokens(
    gamma: float, lam: float
) -> None:
    rewards, values, lengths = batch()
    advantages, targets = generalized_advantages(
        rewards, values, lengths, gamma=gamma, gae_lambda=lam
    )
    own = [
        [row[:n].tolist() for row, n in zip(each, LENGTHS, strict=True)]
        for each in (rewards, values)
    ]
    expected = naive.generalized_advantages(*own, gamma, lam)
    for found, by_loop in zip((advantages, targets), expected, strict=True):
        for row, each in zip(found.tolist(), by_loop, strict=True):
            assert row == pytest.approx([*each, *[0.0] * (9 - len(each))], abs=1e-12)


def test_the_example_of_the_docstring() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.5, 0.75]])
    advantages, targets = generalized_advantages(
        rewards, values, torch.tensor([3]), gamma=1.0, gae_lambda=1.0
    )
    assert advantages.tolist() == [[0.5, 0.5, 0.25]]
    assert targets.tolist() == [[1.0, 1.0, 1.0]]


def test_the_last_token_has_the_reward_and_each_token_its_penalty() -> None:
    penalties = torch.tensor([[0.5, -0.25, 0.0], [0.125, 9.0, 9.0], [9.0, 9.0, 9.0]])
    found = token_rewards(torch.tensor([1.0, -1.0, 7.0]), torch.tensor([3, 1, 0]), penalties)
    assert found.tolist() == [[-0.5, 0.25, 1.0], [-1.125, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_tokens_that_train() -> None:
    advantages = torch.tensor([[1.0, 2.0, 50.0], [4.0, torch.nan, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    found = whiten(advantages, mask)
    # of 1, 2, 4, 9: mean 4, variance (9 + 4 + 0 + 25) / 3
    scale = math.sqrt(38 / 3 + 1e-8)
    assert found.flatten().tolist() == pytest.approx(
        [-3 / scale, -2 / scale, 0, 0, 0, 5 / scale], abs=1e-12
    )
    assert float(found[mask.bool()].var()) == pytest.approx(1, abs=1e-8)
    rows = whiten(advantages.flip(0), mask.flip(0))
    assert torch.equal(rows, found.flip(0))  # no order of responses matters


def test_equal_advantages_a_single_one_and_none_are_whitened_to_zeros() -> None:
    for number in (6, 1):
        advantages = torch.full((number,), 0.1, dtype=torch.float64)
        assert whiten(advantages, torch.ones(number)).tolist() == [0.0] * number
    assert whiten(torch.tensor([3.0, 4.0]), torch.zeros(2)).tolist() == [0.0, 0.0]


def tokens(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values, old, targets = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    mask = torch.arange(40) % 5 != 3
    weights = torch.rand(40, generator=generator, dtype=torch.float64)
    return {
        "values": values,
        "old_values": old,
        "targets": targets,
        "mask": mask,
        "weights": weights,
    }


@pytest.mark.parametrize("clip_range", [None, 0.2, 0.7])
def test_the_value_loss_its_gradient_and_its_clips_equal_the_naive_loop(
    clip_range: float | None,
) -> None:
    given = tokens()
    values = given["values"].clone().requires_grad_()
    loss, sums = value_loss(**{**given, "values": values}, clip_range=clip_range)
    loss.backward()
    trained = [each[given["mask"]].tolist() for name, each in given.items() if name != "mask"]
    expected, gradient = naive.value_loss(*trained, clip_range)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert values.grad[given["mask"]].tolist() == pytest.approx(gradient, abs=1e-12)
    assert not values.grad[~given["mask"]].any()
    assert (int(sums["tokens"]), int(sums["clipped"])) == (32, gradient.count(0.0))
    assert (gradient.count(0.0) > 0) == (clip_range is not None)


def test_a_value_that_was_moved_far_towards_its_target_has_no_gradient_and_away_from_it_has() -> (
    None
):
    old = torch.zeros(3)
    targets = torch.tensor([1.0, 1.0, 1.0])
    values = torch.tensor([0.6, 0.4, -0.6])
    values.requires_grad_()
    loss, sums = value_loss(values, old, targets, torch.ones(3), torch.ones(3), clip_range=0.5)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -0.6, -1.6])
    assert int(sums["clipped"]) == 1


def test_microbatches_add_up_and_masked_numbers_are_never_read() -> None:
    given = tokens(2)
    whole, sums = value_loss(**given, clip_range=0.2)
    parts = [
        value_loss(**{name: each[i : i + 7] for name, each in given.items()}, clip_range=0.2)
        for i in range(0, 40, 7)
    ]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), abs=1e-12)
    assert sum(int(part["clipped"]) for _, part in parts) == int(sums["clipped"])
    for name in ("values", "old_values", "targets", "weights"):
        given[name] = given[name].masked_fill(~given["mask"], torch.nan)
    values = given["values"].requires_grad_()
    loss, _ = value_loss(**{**given, "values": values}, clip_range=0.2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(whole), abs=1e-12)
    assert bool(values.grad.isfinite().all())


def test_perfect_values_explain_all_of_the_variance_and_a_constant_none() -> None:
    chance = random.Random(0)
    targets = torch.tensor([chance.gauss(0, 1) for _ in range(50)], dtype=torch.float64)
    assert explained_variance(targets, targets) == 1
    assert explained_variance(torch.full_like(targets, 3.0), targets) == pytest.approx(0, abs=1e-12)
    assert explained_variance(-targets, targets) == pytest.approx(-3, abs=1e-12)
    assert explained_variance(targets, torch.ones(50)) is None
    assert explained_variance(targets[:1], targets[:1]) is None
    assert explained_variance(targets[:2], targets[:2]) == 1


def test_numbers_of_the_wrong_shape_are_refused() -> None:
    rewards, values, lengths = batch()
    with pytest.raises(
        ValueError, match=r"lengths must have one number per response of \[N, T\] tokens, got \[4\]"
    ):
        generalized_advantages(rewards, values, lengths[:4], gamma=1.0, gae_lambda=1.0)
    with pytest.raises(
        ValueError, match=r"rewards must be of the shape of the values, \[5, 9\], got \[5, 8\]"
    ):
        generalized_advantages(rewards[:, :8], values, lengths, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match="rewards must have one number per response"):
        token_rewards(torch.zeros(4), lengths, values)
