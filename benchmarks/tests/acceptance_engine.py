"""An engine that shares a pretended GPU with the policy, and the faults that its check must see."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.acceptance.observed import LastLoad
from benchmarks.acceptance.vllm_cycles import ASLEEP_GIB, SLEEP_S, TRANSFER_S, WAKE_S
from dapo.engines.engine import EngineLayer, RolloutEngine, WeightSource

TOTAL_GIB = 80.0
AWAKE_GIB = 60.0


@dataclass
class Clock:
    """Seconds that pass when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@dataclass
class PretendedGpu:
    """What an observer of the GPU sees, with at most one fault."""

    fault: str | None = None
    clock: Clock = field(default_factory=Clock)
    held: float = AWAKE_GIB
    loads: int = 0
    woken_s: float = 0.0

    def free_gib(self) -> float:
        """All that the engine does not hold."""
        return TOTAL_GIB - self.held

    def held_gib(self) -> float:
        """The engine's memory."""
        return self.held

    def last_load(self) -> LastLoad:
        """The first weights come as a file."""
        way = "ipc" if self.loads > 1 and self.fault != "weights go through a file" else "file"
        return LastLoad(way, 1 if self.fault == "one chunk" else 5)

    def wake_s(self) -> float:
        """Seconds of all wakes."""
        return self.woken_s

    def starts(self) -> int:
        """One process, or its replacement too."""
        return 2 if self.fault == "a process was lost" else 1


class SharingEngine(EngineLayer):
    """A native engine in this process that behaves as vLLM does beside a policy."""

    def __init__(self, engine: RolloutEngine, gpu: PretendedGpu) -> None:
        super().__init__(engine)
        self._gpu = gpu
        self._kept: Any = None

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Wake, and take the weights, or those of the fault."""
        gpu = self._gpu
        gpu.loads += 1
        wake_s = 2 * WAKE_S if gpu.fault == "a slow wake" else 0.5
        gpu.woken_s += wake_s
        transfer_s = 2 * TRANSFER_S if gpu.fault == "a slow transfer" else 0.5
        gpu.clock.now += wake_s + transfer_s
        gpu.held = AWAKE_GIB
        is_stale = {
            "the second weights stay": gpu.loads == 3,
            "the third weights stay": gpu.loads == 4,
        }
        if not is_stale.get(gpu.fault or "", False):
            self._engine.load_weights(weights, version)

    def drop_weights(self) -> None:
        """Sleep, unless the fault is that it does not."""
        gpu = self._gpu
        gpu.clock.now += 2 * SLEEP_S if gpu.fault == "a slow sleep" else 0.5
        if gpu.fault == "sleep keeps some gigabytes":
            gpu.held = 2 * ASLEEP_GIB
        elif gpu.fault == "a small cache":
            gpu.held = AWAKE_GIB - 0.1 * TOTAL_GIB
        elif gpu.fault != "no sleep":
            gpu.held = 0.5 * ASLEEP_GIB


PLANTED = {
    # the fault: the numbers that turn red, whatever their cycle
    "weights go through a file": {"weights went from GPU to GPU (ipc)"},
    "one chunk": {"chunks of weights"},
    "a process was lost": {"engine processes that were needed"},
    "a slow sleep": {"sleep"},
    "a slow wake": {"wake"},
    "a slow transfer": {"transfer"},
    "no sleep": {"kept by the engine asleep", "given back by sleep"},
    "sleep keeps some gigabytes": {"kept by the engine asleep"},
    "a small cache": {"kept by the engine asleep", "given back by sleep"},
    "the second weights stay": {"mean gap"},
    "the third weights stay": {"mean gap"},
    "the policy does not change": {"mean gap if the weights before had stayed"},
}
