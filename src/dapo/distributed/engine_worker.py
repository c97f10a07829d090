"""What an engine's process holds: any rollout engine, behind calls whose arguments and answers can travel."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dapo.distributed.protocol import WeightsHandle, WorkerSpec
from dapo.distributed.worker_main import resolve
from dapo.engines.engine import RolloutEngine
from dapo.types import Generation, GenerationRequest


def engine_worker_spec(spec: WorkerSpec) -> WorkerSpec:
    """The same process with the engine that `spec` makes inside an `EngineWorker`."""
    options = {"factory": spec.factory, "options": dict(spec.options)}
    return replace(spec, factory="dapo.distributed.engine_worker:EngineWorker", options=options)


class EngineWorker:
    """Makes the engine, and gives it weights by their handle."""

    def __init__(self, factory: str, options: Mapping[str, Any]) -> None:
        self._engine: RolloutEngine = resolve(factory)(**options)

    def load_weights(self, handle: WeightsHandle) -> int:
        """Returns the version that was loaded."""
        self._engine.load_weights(handle.open(), handle.version)
        return handle.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """As the engine does."""
        self._engine.submit(requests)

    def poll(self, times: int) -> list[Generation]:
        """As the engine does, several times in a row."""
        return [generation for _ in range(times) for generation in self._engine.poll()]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """As the engine does."""
        return self._engine.abort(request_ids)

    def close(self) -> None:
        """As the engine does."""
        self._engine.close()
