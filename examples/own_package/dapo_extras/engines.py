"""The engine `counted`: the native engine, which also counts the responses that it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config.engines import EngineKind

COUNTED = EngineKind(open="dapo_extras.engines:open_counted", rounds_as_trainer=True)


def open_counted(rollout: Any, model: Any, gpu_processes: float = 1) -> Any:
    """Open the engine; its options are `rollout.options`."""
    from dapo.engines.native.engine import open_native_engine

    return CountedEngine(open_native_engine(rollout, model, gpu_processes), **rollout.options)


@dataclass
class CountedEngine:
    """Passes every call on, and writes the number of requests to a file."""

    engine: Any
    counts_file: str
    num_requests: int = 0

    def submit(self, requests: Sequence[Any]) -> None:
        self.num_requests += len(requests)
        with open(self.counts_file, "w", encoding="utf-8") as file:
            file.write(str(self.num_requests))
        self.engine.submit(requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
