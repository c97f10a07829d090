"""Keys and values: of the live sequences in dense slots written in place, of prompts until their groups have started.

Both are transformers caches, so the model's own forward fills them. A slot is a row of `[rows, kv_heads, capacity, d]`;
both `rows` and `capacity` grow by need, and all of it is given back when nothing is live.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

BLOCK = 64
"""Capacity grows by at least half, in whole blocks of so many positions, so copying stays a small share."""

ALIGN = 16
"""Attention runs over a multiple of so many positions: uneven ends are slow, and the mask hides the rest."""


class PromptCache(Cache):
    """What one prefill leaves behind: per layer the prompts' keys and values `[prompts, kv_heads, positions, d]`."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values; a prefill attends to just these."""
        if layer_idx != len(self.keys):
            raise ValueError(f"layer {layer_idx} keeps keys and values, but layer {len(self.keys)} is the next one due")
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this prefill: none."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The first query stands at position 0."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(positions attended to, the first of them)."""
        return query_length, 0

    def select(self, index: int, length: int) -> "PromptCache":
        """A copy of one prompt's keys and values, so that the rest can be freed."""
        single = PromptCache()
        single.keys = [keys[index : index + 1, :, :length].clone() for keys in self.keys]
        single.values = [values[index : index + 1, :, :length].clone() for values in self.values]
        return single


@dataclass(frozen=True)
class _Layer:
    """One layer's storage, `[rows, kv_heads, capacity, d]` each; `d` of keys and values may differ."""

    keys: Tensor
    values: Tensor

    def resized(self, rows: int, capacity: int) -> "_Layer":
        # zeros, not empty: a masked position has weight 0, and 0 * nan is nan
        return _Layer(*(_resized(tensor, rows, capacity) for tensor in (self.keys, self.values)))


class SlotCache(Cache):
    """The live sequences' keys and values, one row each; rows 0 .. n-1 take part in a decode step."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._storage: list[_Layer] = []
        self._positions = torch.empty(0, dtype=torch.long)
        self._length = 0
        self._flat_indices: dict[int, Tensor] = {}
        self.rows = 0
        self.capacity = 0

    @property
    def num_bytes(self) -> int:
        """What the slots take at present."""
        return sum(t.numel() * t.element_size() for layer in self._storage for t in (layer.keys, layer.values))

    def reserve(self, rows: int, length: int, limit: int) -> None:
        """Make room for `rows` sequences of `length` positions; `limit`, the longest reservation, bounds the growth."""
        if rows <= self.rows and length <= self.capacity:
            return
        if length > self.capacity:
            wanted = max(length, self.capacity + self.capacity // 2)
            self.capacity = max(length, min(-(-wanted // BLOCK) * BLOCK, limit))
        else:
            self.capacity = min(self.capacity, max(length, limit))
        self.rows = rows
        for index, layer in enumerate(self._storage):
            self._storage[index] = layer.resized(self.rows, self.capacity)

    def store(self, prompts: PromptCache, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy prompt `sources[i]`, its first `length` positions, into row `rows[i]`; needs `reserve` before."""
        if not self._storage:
            self._storage = [
                _Layer(*(_zeros_like(t, self.rows, self.capacity) for t in pair))
                for pair in zip(prompts.keys, prompts.values, strict=True)
            ]
        device = self._storage[0].keys.device
        source_rows, target_rows = torch.tensor(sources, device=device), torch.tensor(rows, device=device)
        for layer, keys, values in zip(self._storage, prompts.keys, prompts.values, strict=True):
            layer.keys[:, :, :length].index_copy_(0, target_rows, keys[:, :, :length].index_select(0, source_rows))
            layer.values[:, :, :length].index_copy_(0, target_rows, values[:, :, :length].index_select(0, source_rows))

    def move(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows `sources` over rows `rows`."""
        device = self._storage[0].keys.device
        source_rows, target_rows = torch.tensor(sources, device=device), torch.tensor(rows, device=device)
        for layer in self._storage:
            for tensor in (layer.keys, layer.values):
                part = tensor[:, :, :length]
                part.index_copy_(0, target_rows, part.index_select(0, source_rows))

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """The next forward writes row i at `positions[i]` `[n]` and attends to the first `longest` positions."""
        self._positions = positions
        self._length = min(-(-longest // ALIGN) * ALIGN, self.capacity)
        self._flat_indices = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one position a row, `[n, kv_heads, 1, d]`; returns views `[n, kv_heads, length, d]` of the slots."""
        layer = self._storage[layer_idx]
        n, heads = key_states.shape[:2]
        if heads not in self._flat_indices:
            self._flat_indices[heads] = self._make_flat_indices(n, heads)
        flat_indices = self._flat_indices[heads]
        for tensor, states in ((layer.keys, key_states), (layer.values, value_states)):
            tensor.view(-1, tensor.shape[-1]).index_copy_(0, flat_indices, states.reshape(n * heads, -1))
        return layer.keys[:n, :, : self._length], layer.values[:n, :, : self._length]

    def _make_flat_indices(self, n: int, heads: int) -> Tensor:
        """`[n * heads]` indices of the positions to write, in the storage seen as `[rows * heads * capacity, d]`."""
        lines = torch.arange(n * heads, device=self._positions.device).view(n, heads)
        return (lines * self.capacity + self._positions[:, None]).flatten()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this step's: of the longest row."""
        return self._length - 1

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """`[n]` where each row's query stands; `attention.native_mask` reads it."""
        return self._positions

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(positions attended to, the first of them)."""
        return self._length, 0

    def release(self) -> None:
        """Give all memory back."""
        self._storage = []
        self._flat_indices = {}
        self.rows = self.capacity = 0


def _zeros_like(states: Tensor, rows: int, capacity: int) -> Tensor:
    return states.new_zeros(rows, states.shape[1], capacity, states.shape[3])


def _resized(tensor: Tensor, rows: int, capacity: int) -> Tensor:
    larger = _zeros_like(tensor, rows, capacity)
    n, length = min(rows, tensor.shape[0]), min(capacity, tensor.shape[2])
    larger[:n, :, :length] = tensor[:n, :, :length]
    return larger
