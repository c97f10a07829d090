"""The object in an engine's process."""

import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dapo.core.errors import EngineError
from dapo.distributed.protocol import WeightsHandle
from dapo.engines.engine import RolloutEngine

if TYPE_CHECKING:
    from dapo.distributed.weight_session import Location


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

    def receive_weights(self, handle: WeightsHandle) -> int:
        """Load weights that are being sent; an engine that does not survive a transfer that fails ends its process."""
        try:
            return self.load_weights(handle)
        except EngineError as error:
            if getattr(self._engine, "is_closed", False):
                raise SystemExit(str(error)) from error
            raise

    def location(self) -> "Location | None":
        """Where the engine holds its weights; None if several processes hold them, which read files."""
        from dapo.distributed.weight_session import own_location  # imports torch, which not every engine needs

        device_type = getattr(self._engine, "weights_device", "cpu")
        return None if device_type is None else own_location(device_type)
