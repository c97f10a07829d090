"""The engine `counted`: the native engine, which also counts the responses that it starts."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from dapo.config import RolloutConfig
from dapo.engines.engine import EngineLayer, RolloutEngine
from dapo.engines.native.engine import open_native_engine
from dapo.types import GenerationRequest


def open_counted(
    rollout: RolloutConfig, model: PreTrainedModel, gpu_processes: float = 1
) -> RolloutEngine:
    """Open the engine; its options are `rollout.options`."""
    engine = open_native_engine(rollout, model, gpu_processes)
    return CountedEngine(engine, Path(rollout.options["counts_file"]))


class CountedEngine(EngineLayer):
    """Passes every call on, and writes the number of requests so far to a file."""

    def __init__(self, engine: RolloutEngine, counts_file: Path) -> None:
        super().__init__(engine)
        self._counts_file = counts_file
        self._num_requests = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._num_requests += len(requests)
        self._counts_file.write_text(str(self._num_requests), encoding="utf-8")
        super().submit(requests)
