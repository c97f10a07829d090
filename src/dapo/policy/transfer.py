"""Copies between main memory and a device: without waiting, or many numbers in one copy."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device`; to a GPU without waiting, from page-locked memory."""
    if device.type == "cuda" and torch.cuda.is_available():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def to_numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return the 0-dim tensors of one device as numbers, in one copy that waits for it."""
    if not scalars:
        return []
    # float64 holds counts and float32 numbers alike
    return torch.stack([scalar.double() for scalar in scalars]).tolist()
