"""Eq. 4 and 9: the advantage of a response is its reward relative to its group."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Scale: TypeAlias = Literal["std", "none"]

STD_EPS = 1e-6


def group_advantages(rewards: Tensor, *, scale: Scale = "std") -> Tensor:
    """Eq. 9: `A_i = (R_i - mean) / (std + 1e-6)` over one group; the same number for every token of response i.

    `rewards`: `[G]`, shaped rewards of any float type. Returns `[G]` in the same type, computed in float64. `std` is
    the sample standard deviation (divisor G - 1), as in the released code; `scale="none"` only subtracts the mean.
    Equal rewards give exact zeros. Raises ValueError for fewer than two rewards (a group of one has nothing to be
    compared with), for rewards that are not finite and for integers (the result could not keep their type).
    """
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(f"rewards must be [G], one group of at least 2 responses, got shape {list(rewards.shape)}")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards must have a float type, got {rewards.dtype}; convert them with .float()")
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}; a failed verdict does not belong in a group")
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    # never std == 0: the float mean of sixteen times -1.3 is not -1.3, and dividing that rest by 1e-6 invents a signal
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    exact = rewards.double()
    centred = exact - exact.mean()
    scaled = centred / (exact.std(correction=1) + STD_EPS) if scale == "std" else centred
    return scaled.to(rewards.dtype)
