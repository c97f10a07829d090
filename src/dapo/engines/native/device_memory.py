"""The memory of the device that an engine runs on: how much is free for its cache, and giving it back."""

from typing import Protocol

import torch

CACHE_SHARE = 0.9
"""Of the free memory that is not needed for a step, the part that keys and values may take. The rest is for what is
not counted: the allocator's rounding, and one layer of the smaller cache while a larger one is filled."""

SAMPLING_FLOATS = 3
"""float32 numbers per row and token of the vocabulary while a step samples: logits, scores, probabilities."""

PREFILL_WIDTHS = 4
"""Tensors of a layer's hidden and of its intermediate width that live at the same time during a prefill."""


class DeviceMemory(Protocol):
    """What an engine asks of the memory of its device."""

    def free_bytes(self) -> int:
        """The bytes that this process could allocate now."""

    def free_unused(self) -> None:
        """Return what the allocator holds without need to the device, for other processes and other sizes."""


class CudaMemory:
    """A GPU's memory, of whose free part each of the processes that share it may take an equal share."""

    def __init__(self, device: torch.device, *, processes: float = 1) -> None:
        self._device, self._processes = device, processes

    def free_bytes(self) -> int:
        self.free_unused()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return int(free / self._processes)

    def free_unused(self) -> None:
        torch.cuda.empty_cache()


def cache_token_bound(free_bytes: int, *, position_bytes: int, step_bytes: int) -> int:
    """How many positions the cache may hold.

    Args:
        free_bytes: of the device, before there is a cache.
        position_bytes: of the keys and values of one position.
        step_bytes: what a step needs beside the cache (`step_bytes`).

    Returns:
        At least 1: an engine that has no room fails when it allocates, with the device's own words.
    """
    return max(1, int(CACHE_SHARE * (free_bytes - step_bytes)) // position_bytes)


def step_bytes(
    *, slots: int, vocabulary: int, prefill_tokens: int, position_bytes: int, hidden: int, intermediate: int, width: int
) -> int:
    """The bytes that sampling for all slots or a prefill takes, whichever is more.

    A prefill holds its keys and values twice (a prompt may be kept for the rest of its group) and a layer's activations
    in numbers of `width` bytes.
    """
    sampling = 4 * SAMPLING_FLOATS * slots * vocabulary
    return max(sampling, prefill_tokens * (2 * position_bytes + PREFILL_WIDTHS * (hidden + intermediate) * width))
