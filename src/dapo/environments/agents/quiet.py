"""Whether an agent's processes have nothing left to do until somebody answers them."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path

SETTLE_S = 0.05
"""The pause after an agent's last request, where its processes cannot be seen."""
_SLEEPING = frozenset("SZXI")
"""States of a thread that does not run, nor waits for a disk."""

CAN_SEE_PROCESSES = sys.platform == "linux" and os.path.exists("/proc/self/schedstat")


def activity(pid: int) -> "dict[str, str] | None":
    """Return how often each thread below a process has run; None if one of them runs now.

    An agent is quiet if two calls return the same mapping: in between no thread has run, so none
    can have sent a request that the endpoint has not received.
    """
    counts = {}
    for process in _below(pid):
        for folder in glob(f"/proc/{process}/task/*"):
            with suppress(OSError, IndexError):  # it has ended
                # the name of the program, in brackets, may have spaces
                state = Path(folder, "stat").read_text().rpartition(")")[2].split()[0]
                if state not in _SLEEPING:
                    return None
                counts[folder] = Path(folder, "schedstat").read_text()
    return counts


def _below(pid: int) -> Iterator[int]:
    new = [pid]
    while new:
        children: list[int] = []
        for parent in new:
            for path in glob(f"/proc/{parent}/task/*/children"):
                with suppress(OSError):
                    children += map(int, Path(path).read_text().split())
        yield from children
        new = children
