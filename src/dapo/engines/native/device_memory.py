"""The memory of an engine's device: uploads, the cache's share, and freeing unused memory."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy `values` to the device; to a GPU from pinned memory, queued with its other work."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


CACHE_SHARE = 0.9
"""The share of the free memory, after subtracting the memory of a step, for keys and values.

The rest covers the allocator's rounding, and one layer of the old cache while a larger one is
filled.
"""
SAMPLING_FLOATS = 3
"""The float32 numbers per row and token while a step samples: logits, scores, probabilities."""
PREFILL_WIDTHS = 4
"""The tensors of a layer's hidden and intermediate width in memory at once during a prefill."""


class CudaMemory:
    """The memory of a GPU; free memory is divided equally among the processes that share it."""

    def __init__(self, device: torch.device, *, processes: float = 1) -> None:
        self._device = device
        self._processes = processes

    def free_bytes(self) -> int:
        """Return the number of bytes that this process could allocate now."""
        self.free_unused()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return int(free / self._processes)

    def free_unused(self) -> None:
        """Return unused memory to the device, for other processes and other sizes."""
        torch.cuda.empty_cache()


def cache_token_bound(free_bytes: int, *, position_bytes: int, step_bytes: int) -> int:
    """Return the number of positions that the cache may hold, after the needs of a step.

    `free_bytes` is the free memory without a cache. The result is at least 1: without enough memory
    the engine fails when it allocates, with the device's own message.
    """
    return max(1, int(CACHE_SHARE * (free_bytes - step_bytes)) // position_bytes)


def step_bytes(
    *,
    slots: int,
    vocabulary: int,
    prefill_tokens: int,
    position_bytes: int,
    hidden: int,
    intermediate: int,
    width: int,
) -> int:
    """Return the bytes for sampling from all slots or for a prefill, whichever is more.

    A prefill holds its keys and values twice (a prompt may be kept for the rest of its group) and a
    layer's activations.

    Args:
        slots: the number of rows that sample.
        vocabulary: the number of tokens.
        prefill_tokens: the positions of a prefill.
        position_bytes: the size of a position's keys and values in all layers.
        hidden: the model's hidden width.
        intermediate: the width of its feed-forward blocks.
        width: the bytes of a number.
    """
    sampling = 4 * SAMPLING_FLOATS * slots * vocabulary
    return max(
        sampling,
        prefill_tokens * (2 * position_bytes + PREFILL_WIDTHS * (hidden + intermediate) * width),
    )
