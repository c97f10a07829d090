"""Workers that say what happened to them. Imported in an engine's process, which may have only the
packages of that engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class LastLoad:
    """How an engine's weights came."""

    way: str = "never"
    """`file`, `ipc` or `nccl`."""
    chunks: int = 0


class Observed:
    """In a worker: the object that the run would create there, what its process is set to, and how
    the last weights came.
    """

    def __init__(self, factory: str, options: dict[str, Any]) -> None:
        self._target: Any = resolve_name(factory)(**options)
        self._last_load = LastLoad()

    def prefers_cudnn_attention(self) -> bool:
        """Whether torch may choose cuDNN's attention in this process, after its model has been set
        up.
        """
        return bool(torch.backends.cuda.cudnn_sdp_enabled())

    def last_load(self) -> LastLoad:
        """How the weights came that are in use."""
        return self._last_load

    def load_published(self, handle: Any) -> Any:
        """Load weights of a file."""
        loaded = self._target.load_published(handle)
        self._last_load = LastLoad("file", 1)
        return loaded

    def receive_weights(self, update: Mapping[str, Any], layout: Any, version: Any) -> None:
        """Receive a chunk of weights from GPU to GPU."""
        self._target.receive_weights(update, layout, version)
        chunks = 1 if layout is not None else self._last_load.chunks + 1
        self._last_load = LastLoad("ipc" if update.get("ipc_handles") else "nccl", chunks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class ObservedVllm(Observed):
    """Vllm's engine, whose wakes are timed."""

    def __init__(self, factory: str, options: dict[str, Any]) -> None:
        super().__init__(factory, options)
        self._wake_s = 0.0
        engine = self._target._engine._engine  # worker -> dapo's engine -> vLLM's
        engine.wake_up = self._timed(engine.wake_up)

    def wake_s(self) -> float:
        """Seconds of all wakes so far."""
        return self._wake_s

    def _timed(self, wake_up: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = perf_counter()
            try:
                return wake_up(*arguments, **named)
            finally:
                self._wake_s += perf_counter() - started

        return timed
