"""Decode steps recorded once and replayed, for a GPU that runs a small model's kernels faster than they are launched.

A recording is of one number of rows and one length of the cache, so both are rounded up. Rows beyond the live ones
write to rows of the cache that nobody reads, and are not looked at. Recordings hold the addresses of the slots, and are
thrown away whenever those move.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.core.errors import ConfigError
from dapo.engines.native.cache import SlotCache

ROWS = 8
"""Recordings are of multiples of so many rows, or of all rows of the cache."""

LENGTH = 256
"""And of multiples of so many positions, or of the cache's capacity: masked ones are read for nothing."""

WARMUP_STEPS = 2
"""Steps of a shape before its recording: it must be worth it, and libraries set themselves up in the first."""

Step = Callable[[SlotCache, Tensor, Tensor, int], Tensor]
"""Cache, `[n, 1]` tokens, `[n]` positions and the length attended to -> `[n, vocabulary]` logits."""

GraphCapturer = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records what a function does on the device; returns what does it again, and the result that it writes each time."""


class CudaGraphCapturer:
    """CUDA graphs, all in one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Nothing is computed before the first replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return graph.replay, result


def graph_capturer(device: torch.device, *, enabled: bool) -> GraphCapturer | None:
    """For an engine on `device`. Raises ConfigError where graphs are wanted and there are none."""
    if enabled and device.type != "cuda":
        raise ConfigError(f"rollout.cuda_graphs=true needs a CUDA device, but the engine computes on {device}")
    return CudaGraphCapturer() if enabled else None


@dataclass(frozen=True)
class _CapturedGraph:
    tokens: Tensor
    positions: Tensor
    logits: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs decode steps, from recordings where a shape has been met before."""

    def __init__(self, step: Step, capturer: GraphCapturer, device: torch.device) -> None:
        self._step, self._capturer, self._device = step, capturer, device
        self._storage: object = None
        self._steps: Counter[tuple[int, int]] = Counter()
        self._captured: dict[tuple[int, int], _CapturedGraph] = {}
        self.replays = 0

    def decode(self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """`[n, vocabulary]` logits of what follows `tokens` at `positions`."""
        n = len(tokens)
        shape = _up(n, ROWS, cache.rows), _up(max(positions) + 1, LENGTH, cache.capacity)
        padding = [0] * (shape[0] - n)
        ids = torch.tensor([*tokens, *padding], device=self._device)[:, None]
        at = torch.tensor([*positions, *padding], device=self._device)
        if cache.storage is not self._storage:
            self._captured.clear()
            self._steps.clear()
            self._storage = cache.storage
        self._steps[shape] += 1
        if self._steps[shape] <= WARMUP_STEPS:
            return self._step(cache, ids, at, shape[1])[:n]
        if shape not in self._captured:
            replay, logits = self._capturer(lambda: self._step(cache, ids, at, shape[1]))
            self._captured[shape] = _CapturedGraph(ids, at, logits, replay)
        captured = self._captured[shape]
        captured.tokens.copy_(ids)
        captured.positions.copy_(at)
        captured.replay()
        self.replays += 1
        return captured.logits[:n].clone()  # the next replay writes there


def _up(value: int, step: int, limit: int) -> int:
    return min(-(-value // step) * step, limit)
