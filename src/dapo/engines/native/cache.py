"""Keys and values: of running sequences in slots, of prompts until their groups have started.

All are transformers caches, so the model's own forward fills them. A slot is a row of the cache;
`rows` and `capacity` grow as needed, and all memory is freed when nothing runs. Growing replaces
the tensors one by one, so it needs the memory of the larger cache and of one old tensor.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from dapo.engines.native.attention import RowLengths, VarlenAttention
from dapo.engines.native.decode_graphs import DecodeGraphs
from dapo.engines.native.device_memory import upload
from dapo.libs.cpu_kernels import Rows, can_attend, store_positions_

BLOCK = 64  # positions; capacity grows by at least half, in whole blocks, so that copying is rare
# attention runs over a multiple of this number of positions, which is faster; the mask hides the
# rest
ALIGN = 16


class KeyValueCache(Cache):
    """A cache that also accepts the keys and values of a layer as one tensor."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update_fused(self, key_values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Update from one tensor of both, and return the keys and values to attend to.

        Args:
            key_values: `[n, length, 2 * kv_heads, d]`: heads of keys, then heads of values.
            layer_idx: the layer's index.
        """
        keys, values = key_values.transpose(1, 2).chunk(2, 1)
        return self.update(keys, values, layer_idx)


class PromptCache(KeyValueCache):
    """The keys and values of one prefill, per layer `[prompts, kv_heads, positions, d]`."""

    def __init__(self, prefix: "PromptCache | None" = None) -> None:
        """Take the keys and values `[1, ...]` of a prefix of all prompts, or None."""
        super().__init__()
        self._prefix = prefix
        self._offset = 0 if prefix is None else prefix.keys[0].shape[2]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of a layer; return those that a prefill attends to.

        Args:
            key_states: `[prompts, kv_heads, length, d]`.
            value_states: of the same shape.
            layer_idx: the layer's index.
            args: other arguments of transformers.
            kwargs: other arguments of transformers.
        """
        # layers come in order: a layer that skips the cache would shift all that follow
        if layer_idx != len(self.keys):
            raise ValueError(
                f"layer {layer_idx} stores keys and values, but layer {len(self.keys)} is next"
            )
        if self._prefix is not None:
            key_states = _behind(self._prefix.keys[layer_idx], key_states)
            value_states = _behind(self._prefix.values[layer_idx], value_states)
        self.keys.append(key_states)
        self.values.append(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._offset

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._offset

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of positions attended to, and the first of them."""
        return self._offset + query_length, 0

    def select(self, index: int, length: int) -> "PromptCache":
        """Return a contiguous copy of a prompt's first positions, so the prefill can be freed."""
        single = PromptCache()
        row = slice(index, index + 1)
        layout = torch.contiguous_format  # `addresses` does not tell a model's layout
        for keys, values in zip(self.keys, self.values, strict=True):
            single.keys.append(keys[row, :, :length].clone(memory_format=layout))
            single.values.append(values[row, :, :length].clone(memory_format=layout))
        return single

    @property
    def addresses(self) -> list[list[int]]:
        """Return for each layer the memory addresses of its keys and its values."""
        pairs = zip(self.keys, self.values, strict=True)
        return [[keys.data_ptr(), values.data_ptr()] for keys, values in pairs]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def _behind(prefix: Tensor, states: Tensor) -> Tensor:
    """Return the states of each prompt behind those `[1, ...]` of the common prefix."""
    return torch.cat((prefix.expand(len(states), -1, -1, -1), states), 2)


class ContinuedCache(PromptCache):
    """The keys and values of a prefill whose prompts have different prefixes, computed before."""

    def __init__(self, prefixes: Sequence[PromptCache]) -> None:
        super().__init__()
        self._prefixes = prefixes
        lengths = [prefix.keys[0].shape[2] for prefix in prefixes]
        device = prefixes[0].keys[0].device
        self._offset = max(lengths)
        self._starts = upload(np.array(lengths, dtype=np.int64), device)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of a layer behind each prompt's prefix; return them all."""
        device = key_states.device
        width = key_states.shape[2]
        rows = torch.arange(len(key_states), device=device)[:, None]
        positions = self._starts[:, None] + torch.arange(width, device=device)  # [n, width]
        for states, attribute in ((key_states, "keys"), (value_states, "values")):
            n, heads, _, d = states.shape
            # zeros, not empty: positions behind a short prompt are masked, and 0 * nan is nan
            extended = states.new_zeros(n, heads, self._offset + width, d)
            for row, prefix in enumerate(self._prefixes):
                beginning = getattr(prefix, attribute)[layer_idx][0]
                extended[row, :, : beginning.shape[1]] = beginning
            extended[rows, :, positions] = states.transpose(1, 2)
            getattr(self, attribute).append(extended)
        return self.keys[layer_idx], self.values[layer_idx]

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Return `[n]` positions of the prompts' first queries."""
        return self._starts


class SlotCache(KeyValueCache):
    """The keys and values of running sequences, one row each; a decode step uses rows 0 .. n-1."""

    position_dim: int  # the tensors' dimension of positions

    def __init__(self, graphs: DecodeGraphs | None = None) -> None:
        """`graphs` of decode steps, which this cache clears when its tensors change."""
        super().__init__()
        self.graphs = graphs
        self.tensors: list[Tensor] = []
        self._positions = torch.empty(0, dtype=torch.long)
        self._length = 0
        self.rows = self.capacity = 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def fits(self, rows: int, length: int) -> bool:
        return rows <= self.rows and length <= self.capacity

    def reserve(
        self,
        rows: int,
        length: int,
        limit: int,
        *,
        max_rows: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Make room for `rows` sequences of `length` positions.

        Args:
            rows: the number of sequences.
            length: the positions of the longest.
            limit: the longest reservation, which bounds the growth of the capacity.
            max_rows: if given, rows grow by at least half, up to this number, to copy rarely.
            max_positions: if given, a cache with more positions in total shrinks.
        """
        is_small = max_positions is None or self.rows * self.capacity <= max_positions
        if self.fits(rows, length) and is_small:
            return
        if length > self.capacity:
            target = max(length, self.capacity + self.capacity // 2)
            blocks = -(-target // BLOCK)
            self.capacity = max(length, min(blocks * BLOCK, limit))
        else:
            self.capacity = min(self.capacity, max(length, limit))
        if max_rows is None or rows <= self.rows:
            self.rows = rows
        else:
            self.rows = max(rows, min(self.rows * 3 // 2, max_rows))
        self._clear_graphs()
        for index, tensor in enumerate(self.tensors):
            self.tensors[index] = self._resized(tensor)

    def store(
        self, prompts: PromptCache, sources: Sequence[int], rows: Sequence[int], length: int
    ) -> None:
        """Copy the first `length` positions of prompt `sources[i]` into row `rows[i]`.

        Call `reserve` before.

        Args:
            prompts: the keys and values of a prefill.
            sources: indices of its prompts.
            rows: a row of the cache for each of them.
            length: the number of positions; shorter prompts have fewer.
        """
        if not self.tensors:
            self.tensors = [self._resized(states[:0]) for states in self._as_stored(prompts)]
        self._copy(self._as_stored(prompts), self.tensors, sources, rows, length)

    def move(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows `sources` over rows `rows`."""
        self._copy(self.tensors, self.tensors, sources, rows, length)

    def row(self, index: int, length: int, prompt: PromptCache | None = None) -> PromptCache:
        """Return a copy of the first `length` positions of a row.

        Args:
            index: the row.
            length: the number of positions.
            prompt: keys and values that come before the row's; None: the row holds them.
        """
        copy = PromptCache()
        copy.keys, copy.values = self._row_states(index, length)
        if prompt is not None:
            copy.keys = _joined(prompt.keys, copy.keys)
            copy.values = _joined(prompt.values, copy.values)
        return copy

    def begin_step(self, positions: Tensor, longest: int, rows: Rows | None = None) -> None:
        """Prepare a forward of one token per row.

        Args:
            positions: `[n]`; the forward writes row i at `positions[i]`.
            longest: the positions of the longest row, this one included.
            rows: the rows with their shared prompts; None: prompts are in the rows.
        """
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions before this step, in the longest row."""
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of positions attended to, and the first of them."""
        return self._length, 0

    def release(self) -> None:
        self._clear_graphs()
        self.tensors = []
        self.rows = self.capacity = 0

    def _clear_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def _as_stored(self, prompts: PromptCache) -> Iterable[Tensor]:
        """Return the prompts' keys and values, one tensor at a time, as the slots order them."""
        raise NotImplementedError

    def _row_states(self, index: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of a row's keys and values, per layer `[1, kv_heads, length, d]`."""
        raise NotImplementedError

    def _copy(
        self,
        source_tensors: Iterable[Tensor],
        target_tensors: list[Tensor],
        sources: Sequence[int],
        rows: Sequence[int],
        length: int,
    ) -> None:
        """Copy the first positions of rows.

        Args:
            source_tensors: the tensors of the layers to read.
            target_tensors: the tensors of the layers to write; they may be the same.
            sources: the rows to read.
            rows: the rows to write, one for each.
            length: the number of positions.
        """
        dim = self.position_dim
        indices = np.array([sources, rows], dtype=np.int64)
        source_rows, target_rows = upload(indices, self.tensors[0].device).unbind()
        for source, target in zip(source_tensors, target_tensors, strict=True):
            # the last token of a sequence may not have a position yet
            width = min(length, source.shape[dim], target.shape[dim])
            # selected first: rows of one tensor may be sources and targets
            states = source.narrow(dim, 0, width).index_select(0, source_rows)
            target.narrow(dim, 0, width).index_copy_(0, target_rows, states)

    def _resized(self, tensor: Tensor) -> Tensor:
        """Return a copy of a layer's tensor with `rows` and `capacity`."""
        dim = self.position_dim
        shape = list(tensor.shape)
        shape[0] = self.rows
        shape[dim] = self.capacity
        resized = tensor.new_zeros(shape)  # a masked position has weight 0, and 0 * nan is nan
        n = min(len(tensor), self.rows)
        length = min(tensor.shape[dim], self.capacity)
        states = tensor[:n].narrow(dim, 0, length)
        resized[:n].narrow(dim, 0, length).copy_(states)
        return resized


def _joined(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Return the states of each layer one behind the other, `[1, kv_heads, positions, d]`."""
    return [torch.cat(pair, 2) for pair in zip(first, second, strict=True)]


class MaskedSlots(SlotCache):
    """Slots for attention up to the longest row, under a mask.

    Tensors are `[rows, kv_heads, capacity, d]` per layer, keys of all layers first; `d` of keys and
    values may differ.
    """

    position_dim = 2

    def __init__(self, *, compiled: bool = False) -> None:
        """Take `compiled`: whether `cpu_kernels` attend in a decode step, if they can."""
        super().__init__()
        self._flat_indices: dict[int, Tensor] = {}
        self._query_offset: Tensor | Rows = self._positions
        self._compiled = compiled

    def begin_step(self, positions: Tensor, longest: int, rows: Rows | None = None) -> None:
        self._positions = positions
        self._query_offset = positions
        layers = len(self.tensors) // 2
        if self._compiled and can_attend(self.tensors[0], self.tensors[layers]):
            zeros = torch.zeros_like(positions)
            self._query_offset = rows or Rows(zeros, zeros, positions + 1)
        elif rows is not None and rows.prompts is not None:
            raise ValueError(
                "attention under a mask needs the prompts in the rows, got shared prompts"
            )
        aligned = -(-longest // ALIGN) * ALIGN
        self._length = min(aligned, self.capacity)
        self._flat_indices = {}

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write a position per row, and return the first rows and positions.

        Args:
            key_states: `[n, kv_heads, 1, d]`.
            value_states: of the same shape, whose last dimension may differ.
            layer_idx: the layer's index.
            args: other arguments of transformers.
            kwargs: other arguments of transformers.

        Returns keys and values `[n, kv_heads, length, d]`.
        """
        keys = self.tensors[layer_idx]
        values = self.tensors[len(self.tensors) // 2 + layer_idx]
        n, heads = key_states.shape[:2]
        # [n * heads] positions in the storage as [rows * heads * capacity, d], once for all layers
        if heads not in self._flat_indices:
            lines = torch.arange(n * heads, device=self._positions.device).view(n, heads)
            self._flat_indices[heads] = (lines * self.capacity + self._positions[:, None]).flatten()
        indices = self._flat_indices[heads]
        for tensor, states in ((keys, key_states), (values, value_states)):
            lines = tensor.view(-1, tensor.shape[-1])
            lines.index_copy_(0, indices, states.reshape(n * heads, -1))
        # compiled attention reads each row's own length
        length = None if isinstance(self._query_offset, Rows) else self._length
        return keys[:n, :, :length], values[:n, :, :length]

    def update_fused(self, key_values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        # the compiled function copies both at once, without a transposed view
        if not isinstance(self._query_offset, Rows):
            return super().update_fused(key_values, layer_idx)
        keys = self.tensors[layer_idx]
        values = self.tensors[len(self.tensors) // 2 + layer_idx]
        store_positions_(key_values.squeeze(1), keys, values, self._positions)
        return keys, values

    def get_query_offset(self, layer_idx: int = 0) -> Tensor | Rows:  # type: ignore[override]
        """Return `[n]` positions of the rows' queries, or `Rows` with the shared prompts."""
        return self._query_offset

    def _as_stored(self, prompts: PromptCache) -> Iterable[Tensor]:
        return (*prompts.keys, *prompts.values)

    def _row_states(self, index: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        states = [tensor[index : index + 1, :, :length].clone() for tensor in self.tensors]
        layers = len(self.tensors) // 2
        return states[:layers], states[layers:]


class LengthSlots(SlotCache):
    """Slots for attention up to each row's own length.

    Tensors are `[rows, capacity, 2 * kv_heads, d]` per layer: the heads of a position's key, then
    those of its value. A row is contiguous in memory, as the kernel requires, and a step writes
    keys and values at once.
    """

    position_dim = 1

    def __init__(
        self, attend: VarlenAttention, *, num_splits: int | None, graphs: DecodeGraphs | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            attend: the kernel that attends by lengths.
            num_splits: its number of splits of a row; None: its own choice.
            graphs: the graphs of decode steps.
        """
        super().__init__(graphs)
        self._attend = attend
        self._num_splits = num_splits
        self._row_lengths: RowLengths | None = None
        self._flat_indices = torch.empty(0, dtype=torch.long)

    def begin_step(self, positions: Tensor, longest: int, rows: Rows | None = None) -> None:
        if rows is not None:
            raise ValueError(
                "attention by lengths needs the prompts in the rows, got shared prompts"
            )
        n = len(positions)
        device = positions.device
        self._positions = positions
        self._length = longest
        starts = torch.arange(n + 1, device=device)
        # in [rows * capacity]
        self._flat_indices = torch.add(positions, starts[:n], alpha=self.capacity)
        self._row_lengths = RowLengths(
            self._attend,
            self._num_splits,
            lengths=(positions + 1).to(torch.int32),
            cu_queries=starts.to(torch.int32),
            cu_keys=(starts * self.capacity).to(torch.int32),
            longest=longest,
        )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write a position per row, keys and values `[n, kv_heads, 1, d]`, by `update_fused`."""
        key_values = torch.cat((key_states, value_states), 1).transpose(1, 2)
        return self.update_fused(key_values, layer_idx)

    def update_fused(self, key_values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write a position per row, `[n, 1, 2 * kv_heads, d]`.

        Returns views `[n * capacity, kv_heads, d]`.
        """
        slots = self.tensors[layer_idx].flatten(0, 1)
        slots.index_copy_(0, self._flat_indices, key_values.squeeze(1))
        keys, values = slots.narrow(0, 0, len(key_values) * self.capacity).chunk(2, 1)
        return keys, values

    def get_query_offset(self, layer_idx: int = 0) -> RowLengths | None:  # type: ignore[override]
        """Return the rows' lengths, which `attention.native_mask` accepts instead of positions."""
        return self._row_lengths

    def _as_stored(self, prompts: PromptCache) -> Iterable[Tensor]:
        # one layer at a time: all at once would need the memory of the prompts again
        for pair in zip(prompts.keys, prompts.values, strict=True):
            yield torch.cat(pair, 1).transpose(1, 2)

    def _row_states(self, index: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        keys = []
        values = []
        for tensor in self.tensors:
            states = tensor[index : index + 1, :length].transpose(1, 2).clone()
            layer_keys, layer_values = states.chunk(2, 1)
            keys.append(layer_keys)
            values.append(layer_values)
        return keys, values
