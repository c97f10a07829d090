"""Copies between main memory and a device: upwards they do not wait for the device, downwards one copy serves many."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` of main memory on `device`; the copy to a GPU waits neither for it nor for its work.

    Copies to a GPU start from page-locked memory, which torch keeps until they have ended.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def to_numbers(scalars: Sequence[Tensor]) -> list[float]:
    """The 0-dim tensors of one device as numbers, brought to main memory in one copy, which waits for the device."""
    return torch.stack([scalar.double() for scalar in scalars]).tolist() if scalars else []
