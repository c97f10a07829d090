"""Is the machine free for a measurement?

Processor time that others take, from the kernel's own account (Linux).
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

QUIET_SHARE = 0.05
"""Largest share of all cores' time that other processes may use; more would change the digits
shown.
"""


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds since boot that all cores together have been at work, whoever asked for it, and of
    all there were.
    """

    busy_s: float
    total_s: float

    @classmethod
    def now(cls) -> "ProcessorTime":
        """Raises OSError where the kernel gives no such account."""
        return cls.parse(
            Path("/proc/stat").read_text(encoding="ascii"), ticks_per_s=os.sysconf("SC_CLK_TCK")
        )

    @classmethod
    def parse(cls, text: str, *, ticks_per_s: int) -> "ProcessorTime":
        """From the text of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal."""
        ticks = [int(word) for word in text.splitlines()[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return cls((sum(ticks) - idle) / ticks_per_s, sum(ticks) / ticks_per_s)

    def share_since(self, before: "ProcessorTime", *, own_s: float = 0.0) -> float:
        """Which part of all cores' time since `before` was spent, less `own_s` seconds that do not
        count.
        """
        total = self.total_s - before.total_s
        return max(0.0, self.busy_s - before.busy_s - own_s) / total if total > 0 else 0.0


def busy_share(seconds: float = 3.0) -> float:
    """The part of all cores' time that is in use while this process waits."""
    before = ProcessorTime.now()
    time.sleep(seconds)
    return ProcessorTime.now().share_since(before)


def require_quiet() -> None:
    """Raise RuntimeError where other processes use the processor."""
    share = busy_share()
    if share > QUIET_SHARE:
        raise RuntimeError(
            f"other processes use {share:.0%} of the processor; expected at most {QUIET_SHARE:.0%}:"
            " end them, or give --allow-busy, which marks the results"
        )
