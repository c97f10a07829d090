"""The memory of a device that an engine on a CPU is told to run on."""

from dataclasses import dataclass

from dapo.engines.native.device_memory import CACHE_SHARE, step_bytes
from dapo.engines.native.engine import PREFILL_TOKENS
from helpers.tiny_models import VOCABULARY

POSITION_BYTES = 2 * 2 * 2 * 8 * 8
"""Keys and values of a tiny model in float64: 2 layers, 2 heads of 8 numbers."""


@dataclass
class FakeMemory:
    """A device's memory, with counts of the calls on it."""

    free: int = 10**9
    returned: int = 0

    def free_bytes(self) -> int:
        return self.free

    def free_unused(self) -> None:
        self.returned += 1


def bytes_for_cache(positions: int, *, slots: int) -> int:
    """The free memory that leaves room for a cache of so many positions of a tiny model in float64,
    and no more.
    """
    sizes = {"position_bytes": POSITION_BYTES, "hidden": 48, "intermediate": 80, "width": 8}
    needed = step_bytes(slots=slots, vocabulary=VOCABULARY, prefill_tokens=PREFILL_TOKENS, **sizes)
    return needed + int((positions + 0.5) * POSITION_BYTES / CACHE_SHARE)
