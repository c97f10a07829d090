"""Decode steps as CUDA graphs: the host launches all layers at once, not kernel by kernel.

Launching the kernels of a step from Python takes several times as long as a GPU takes to run them.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Pool: TypeAlias = Any  # `torch.cuda.graph_pool_handle()`, whose type is private
MIN_UNIT = 8
UNITS = 8
"""A graph has a multiple of `MIN_UNIT` rows; beyond 64 there are `UNITS` sizes between a power of
two and the next.
"""


class DecodeGraphs:
    """The graphs of one cache, for several numbers of rows.

    A graph reads and writes the tensors with which it was captured: the weights, the cache and its
    own inputs. So `clear` has to be called when the cache's tensors are replaced, and before
    weights move.
    """

    def __init__(self) -> None:
        self._graphs: dict[int, _Graph] = {}
        self._pool: Pool = None
        """The memory that all graphs use, which is possible because only one runs at a time."""

    def clear(self) -> None:
        self._graphs = {}
        self._pool = None

    def run(self, ids: Tensor, positions: Tensor, compute: Compute, *, max_rows: int) -> Tensor:
        """Return `compute(ids, positions)` for `[n]` numbers each: `[n, hidden]`.

        The result is valid until the next call.

        Args:
            ids: `[n]` tokens.
            positions: `[n]` positions.
            compute: called with as many rows as the graph has; those after the first n have ids and
                positions of earlier steps.
            max_rows: the rows of the cache.
        """
        n = len(ids)
        rows = min(padded_rows(n), max_rows)
        graph = self._graphs.get(rows)
        if graph is None:
            graph = self._graphs[rows] = _Graph(positions.new_zeros(2, rows))
        graph.inputs[0, :n] = ids
        graph.inputs[1, :n] = positions
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return graph.run(compute, self._pool)[:n]


class _Graph:
    """A step of a fixed number of rows: computed at first, then captured, then launched."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs  # [2, rows] token ids and positions
        self._is_warm = False
        self._captured: tuple[Callable[[], None], Tensor] | None = None

    def run(self, compute: Compute, pool: Pool) -> Tensor:
        if not self._is_warm:  # kernels are loaded where they first run, which cannot be captured
            self._is_warm = True
            return compute(*self.inputs)
        if self._captured is None:
            self._captured = capture(partial(compute, *self.inputs), pool)
        launch, hidden = self._captured
        launch()
        return hidden


def capture(compute: Callable[[], Tensor], pool: Pool) -> tuple[Callable[[], None], Tensor]:
    """Record the kernels of `compute` without running them; return a launcher and its result."""
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream()
    torch.cuda.empty_cache()  # a pool of graphs takes no memory that is cached outside of it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # other threads may go on using the GPU
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            output = compute()
        except BaseException:
            with suppress(RuntimeError):  # that the capture has failed; why is the error above
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay, output


@cache
# one, because graphs share the memory of a pool by stream
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def padded_rows(n: int) -> int:
    """Return the number of rows of the graph for `n` rows."""
    unit = max(MIN_UNIT, 2 ** (n - 1).bit_length() // (2 * UNITS))
    return -(-n // unit) * unit
