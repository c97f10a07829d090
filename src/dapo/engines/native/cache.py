"""Keys and values: of running sequences in slots written in place, of prompts until their groups have started.

Both are transformers caches, so the model's own forward fills them. A slot is a row of `[rows, kv_heads, capacity, d]`;
both `rows` and `capacity` grow as needed, and all memory is freed when nothing runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

BLOCK = 64  # capacity grows by at least half, in whole blocks of this many positions, so that copying stays rare

ALIGN = 16  # attention runs over a multiple of this many positions: uneven ends are slow, and the mask hides the others


class _KeyValueCache(Cache):
    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]


class PromptCache(_KeyValueCache):
    """The keys and values of one prefill, per layer `[prompts, kv_heads, positions, d]`."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a layer, which are all that a prefill attends to."""
        if layer_idx != len(self.keys):
            raise ValueError(f"layer {layer_idx} keeps keys and values, but layer {len(self.keys)} is the next one due")
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(positions attended to, the first of them)."""
        return query_length, 0

    def select(self, index: int, length: int) -> "PromptCache":
        """A copy of one prompt's keys and values, so that the others can be freed."""
        single = PromptCache()
        single.keys = [keys[index : index + 1, :, :length].clone() for keys in self.keys]
        single.values = [values[index : index + 1, :, :length].clone() for values in self.values]
        return single


class SlotCache(_KeyValueCache):
    """The keys and values of running sequences, one row each; a decode step uses rows 0 .. n-1.

    Per layer `[rows, kv_heads, capacity, d]`; `d` of keys and values may differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self._positions, self._length = torch.empty(0, dtype=torch.long), 0
        self._flat_indices: dict[int, Tensor] = {}
        self.rows = self.capacity = 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

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
        for tensors in (self.keys, self.values):
            for index, tensor in enumerate(tensors):
                tensors[index] = _resized(tensor, rows, self.capacity)

    def store(self, prompts: PromptCache, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy prompt `sources[i]`, its first `length` positions, into row `rows[i]`; needs `reserve` before."""
        if not self.keys:
            self.keys = [_zeros_like(tensor, self.rows, self.capacity) for tensor in prompts.keys]
            self.values = [_zeros_like(tensor, self.rows, self.capacity) for tensor in prompts.values]
        self._copy(prompts, sources, rows, length)

    def move(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows `sources` over rows `rows`."""
        self._copy(self, sources, rows, length)

    def _copy(self, cache: _KeyValueCache, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        source_rows, target_rows = (torch.tensor(indices, device=self.keys[0].device) for indices in (sources, rows))
        for source, target in zip(cache.tensors, self.tensors, strict=True):
            target[:, :, :length].index_copy_(0, target_rows, source[:, :, :length].index_select(0, source_rows))

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """The next forward writes row i at `positions[i]` `[n]` and attends to the first `longest` positions."""
        self._positions = positions
        self._length = min(-(-longest // ALIGN) * ALIGN, self.capacity)
        self._flat_indices = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one position per row, `[n, kv_heads, 1, d]`; returns views `[n, kv_heads, length, d]` of the slots."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        n, heads = key_states.shape[:2]
        if heads not in self._flat_indices:  # [n * heads] positions in the storage as [rows * heads * capacity, d]
            lines = torch.arange(n * heads, device=self._positions.device).view(n, heads)
            self._flat_indices[heads] = (lines * self.capacity + self._positions[:, None]).flatten()
        for tensor, states in ((keys, key_states), (values, value_states)):
            tensor.view(-1, tensor.shape[-1]).index_copy_(0, self._flat_indices[heads], states.reshape(n * heads, -1))
        return keys[:n, :, : self._length], values[:n, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of positions before this step, in the longest row."""
        return self._length - 1

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """`[n]` position of each row's query; `attention.native_mask` reads it."""
        return self._positions

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(positions attended to, the first of them)."""
        return self._length, 0

    def release(self) -> None:
        self.keys, self.values = [], []
        self._flat_indices = {}
        self.rows = self.capacity = 0


def _zeros_like(states: Tensor, rows: int, capacity: int) -> Tensor:
    return states.new_zeros(rows, states.shape[1], capacity, states.shape[3])


def _resized(tensor: Tensor, rows: int, capacity: int) -> Tensor:
    larger = _zeros_like(tensor, rows, capacity)  # zeros: a masked position has weight 0, and 0 * nan is nan
    n, length = min(rows, tensor.shape[0]), min(capacity, tensor.shape[2])
    larger[:n, :, :length] = tensor[:n, :, :length]
    return larger
