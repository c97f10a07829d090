"""Cuts a set of weights into the parts that are sent at a time, the same on both ends."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

CHUNK_BYTES = 2**30
Weights: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""The type, such as `bfloat16`, and the shape of each weight by its name, in the order in which
they are sent.
"""


class Layout(Protocol):
    """The layout of a set of weights."""

    @property
    def tensors(self) -> Weights: ...


class Source(Protocol):
    """A trainer's weights, on its GPU."""

    def layout(self) -> Layout:
        """Return the names, types and shapes, without computing or copying a tensor."""

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return every weight in the order of the layout; names that the layout lacks are left out."""


def chunks_of(weights: Weights) -> list[dict[str, list[Any]]]:
    """Chunks of CHUNK_BYTES at most, or of one larger weight, in the fields of vLLM's update info.

    vLLM receives such a chunk as one buffer (`packed`).

    >>> chunks_of({"a": ("bfloat16", (2, 3))})
    [{'names': ['a'], 'dtype_names': ['bfloat16'], 'shapes': [[2, 3]], 'tensor_sizes': [12]}]
    """
    chunks: list[dict[str, list[Any]]] = []
    total = CHUNK_BYTES
    for name, (dtype, shape) in weights.items():
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        if total + size > CHUNK_BYTES:
            chunks.append({"names": [], "dtype_names": [], "shapes": [], "tensor_sizes": []})
            total = 0
        total += size
        for column, value in zip(
            chunks[-1].values(), (name, dtype, list(shape), size), strict=True
        ):
            column.append(value)
    return chunks
