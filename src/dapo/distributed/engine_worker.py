"""The object in an engine's process, which may have only the packages of that engine."""

import pkgutil
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from dapo.core.errors import EngineError, WorkerDied
from dapo.core.terminal import print_text
from dapo.distributed.protocol import WeightsHandle
from dapo.engines.engine import EngineLayer, WeightReceiver
from dapo.types import Generation, WeightLayout


class EngineWorker(EngineLayer):
    """Any rollout engine, as `EnginePool` calls it from another process."""

    def __init__(self, factory: str, options: Mapping[str, Any]) -> None:
        super().__init__(pkgutil.resolve_name(factory)(**options))
        self._has_loaded = False

    def poll(self, seconds: float = 0.0) -> list[Generation]:
        """Advance, by at least one step, until a request is finished or the seconds are over."""
        deadline = time.monotonic() + seconds
        generations = super().poll()
        while not generations and time.monotonic() < deadline:
            generations = super().poll()
        return generations

    def load_published(self, handle: WeightsHandle) -> int:
        """Load a version.

        A failure after an earlier success is WorkerDied: a new process then tries once more.
        """
        try:
            with handle.open() as weights:
                self.load_weights(weights, handle.version)
        # engines and devices fail in many ways, and may hold half of the weights
        except Exception as error:
            if not self._has_loaded:
                raise
            print_text(traceback.format_exc(), file=sys.stderr)
            raise WorkerDied(
                f"an engine did not load the weights of version {handle.version}: {error}"
            ) from error
        self._has_loaded = True
        return handle.version

    def connect_weights(self, init_info: Mapping[str, Any]) -> None:
        self._receiver.connect_weights(init_info)

    def receive_weights(
        self, update: Mapping[str, Any], layout: WeightLayout | None, version: int | None
    ) -> None:
        # the run's first weights came as a file, perhaps to an earlier process: the set is right,
        # and a new process may load what this one cannot
        self._has_loaded = True
        self._receiver.receive_weights(update, layout, version)

    @property
    def _receiver(self) -> WeightReceiver:
        receiver = self.capabilities.receiver
        if receiver is None:
            raise EngineError("this engine cannot receive weights from GPU to GPU")
        return receiver
