"""The object in an engine's process: a rollout engine that takes weights by handle and polls several times per call."""

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dapo.distributed.protocol import WeightsHandle, WorkerSpec
from dapo.engines.engine import RolloutEngine
from dapo.types import Generation


def engine_worker_spec(spec: WorkerSpec) -> WorkerSpec:
    """The same process, with the engine that `spec` creates inside an EngineWorker."""
    options = {"factory": spec.factory, "options": dict(spec.options)}
    return replace(spec, factory="dapo.distributed.engine_worker:EngineWorker", options=options)


class EngineWorker:
    """Creates the engine. `submit`, `abort` and `close` are the engine's own."""

    def __init__(self, factory: str, options: Mapping[str, Any]) -> None:
        engine: RolloutEngine = pkgutil.resolve_name(factory)(**options)
        self.submit, self.abort, self.close = engine.submit, engine.abort, engine.close
        self._engine = engine

    def load_weights(self, handle: WeightsHandle) -> int:
        """Load published weights; returns their version."""
        self._engine.load_weights(handle.open(), handle.version)
        return handle.version

    def poll(self, times: int) -> list[Generation]:
        """Poll `times` times in a row; returns all finished generations."""
        return [generation for _ in range(times) for generation in self._engine.poll()]
