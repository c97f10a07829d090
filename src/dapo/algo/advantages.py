"""Advantages of responses: Eq. 4 and 9, and the estimators of RLOO and REINFORCE++
(`estimator_table` lists them).

Each function maps shaped rewards to one number per response, shared by all its tokens. They differ
in the baseline and in the scale. Those over the batch take all responses of a step, before it is
split into minibatches or over ranks.
"""

from math import fsum, sqrt
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dapo.algo.estimator_table import STD_EPS

Scale: TypeAlias = Literal["std", "none"]


def group_advantages(rewards: Tensor, *, scale: Scale = "std") -> Tensor:
    """Eq. 9: `A_i = (R_i - mean) / (std + 1e-6)` over one group.

    `rewards`: `[G]`, shaped rewards of any float type. Returns `[G]` in the same type, computed in
    float64. `std` is the sample standard deviation (divisor G - 1), as in the released code;
    `scale="none"` only subtracts the mean. Equal rewards give exact zeros.

    Raises:
        ValueError: there are fewer than two rewards, some are not finite, or they are integers,
            whose type the result could not keep.
    """
    _check(rewards, "[G], one group of at least 2 responses")
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    if _are_equal(rewards):
        return torch.zeros_like(rewards)
    exact = rewards.double()
    centred = exact - _mean(exact)
    scaled = centred / (_deviation(exact) + STD_EPS) if scale == "std" else centred
    return scaled.to(rewards.dtype)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): the reward minus the mean reward of the group's other responses.

        A_i = R_i - sum_{j != i} R_j / (G - 1) = G / (G - 1) (R_i - mean)

    The baseline of a response does not depend on the response itself, so the policy gradient stays
    unbiased; Eq. 9 without its division is (G - 1) / G times as large. Argument, result and errors
    are those of `group_advantages`.
    """
    _check(rewards, "[G], one group of at least 2 responses")
    if _are_equal(rewards):
        return torch.zeros_like(rewards)
    exact = rewards.double()
    # fsum as in `_mean`
    baselines = (fsum(exact.tolist()) - exact) / (len(exact) - 1)
    return (exact - baselines).to(rewards.dtype)


def reinforce_pp_advantages(rewards: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262) without a baseline: the rewards of all groups of a step,
    whitened together.

        A_i = (R_i - mean of the batch) / (std of the batch + 1e-6)

    A response is also compared with those to other problems, so the responses of a group with equal
    rewards train too. Each response counts once, whatever its length. `std` has the divisor N - 1,
    as in Eq. 9. `rewards` are `[N]`, of all responses of a step, else as for `group_advantages`;
    `group_ids` are ignored.
    """
    _check(rewards, "[N], a batch of at least 2 responses")
    return group_advantages(rewards)


def reinforce_pp_baseline_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """REINFORCE++ w/ baseline (arXiv 2501.03262): rewards minus their group's mean, whitened over
    the batch.

        D_i = R_i - mean of the group,    A_i = (D_i - mean of D) / (std of D + 1e-6)

    The mean of D over the batch is 0. Unlike Eq. 9, a group with a small spread of rewards keeps
    small advantages, and only the batch sets their scale. Each response counts once, whatever its
    length. `std` has the divisor N - 1.

    `rewards` are `[N]`, `group_ids` `[N]` integers, of which equal ones form a group of at least
    two responses. A group with equal rewards has exact zeros. Result and errors are those of
    `group_advantages`.
    """
    _check(rewards, "[N], a batch of at least 2 responses")
    differences = torch.empty(len(rewards), dtype=torch.float64)
    for group_id in group_ids.unique():
        is_member = group_ids == group_id
        differences[is_member] = group_advantages(rewards[is_member].double(), scale="none")
    if _are_equal(differences):
        return torch.zeros_like(rewards)
    return (differences / (_deviation(differences) + STD_EPS)).to(rewards.dtype)


def _mean(values: Tensor) -> float:
    # fsum: torch adds in an order that depends on the processor, and the sign of an advantage
    # decides by which bound its tokens are clipped
    return fsum(values.tolist()) / len(values)


def _deviation(values: Tensor) -> float:
    distances = values - _mean(values)
    return sqrt(fsum(distances.square().tolist()) / (len(values) - 1))


def _are_equal(rewards: Tensor) -> bool:
    # never std == 0: the float mean of sixteen times -1.3 is not -1.3, and dividing that difference
    # by 1e-6 invents a signal
    return bool(rewards.max() == rewards.min())


def _check(rewards: Tensor, expected: str) -> None:
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"rewards must be {expected}, got shape {list(rewards.shape)}")
    if not rewards.is_floating_point():
        raise ValueError(
            f"rewards must have a float type, got {rewards.dtype}; convert them with .float()"
        )
    if not rewards.isfinite().all():
        raise ValueError(
            f"rewards must be finite, got {rewards.tolist()}; a failed verdict does not belong in a"
            " group"
        )
