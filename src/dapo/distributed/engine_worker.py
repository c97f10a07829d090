"""The object in an engine's process."""

import pkgutil
from collections.abc import Mapping
from typing import Any

from dapo.distributed.protocol import WeightsHandle
from dapo.engines.engine import RolloutEngine


class EngineWorker:
    """The object in an engine's process: any rollout engine, which gets its weights by handle."""

    def __init__(self, factory: str, options: Mapping[str, Any]) -> None:
        engine: RolloutEngine = pkgutil.resolve_name(factory)(**options)
        self._engine = engine
        self.submit, self.poll, self.abort, self.close = engine.submit, engine.poll, engine.abort, engine.close
        self.drop_weights = engine.drop_weights

    def load_weights(self, handle: WeightsHandle) -> int:
        with handle.open() as weights:
            self._engine.load_weights(weights, handle.version)
        return handle.version
