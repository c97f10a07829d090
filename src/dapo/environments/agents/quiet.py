"""Whether an agent's processes have nothing left to do until somebody answers them."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

SETTLE_S = 0.05
"""The pause after an agent's last request, where its processes cannot be seen."""
_SLEEPING = (b"S", b"Z", b"X", b"I")
"""States of a thread that does not run, nor waits for a disk."""
_MAX_BYTES = 4096

CAN_SEE_PROCESSES = sys.platform == "linux" and os.path.exists("/proc/self/schedstat")


def activity(pid: int) -> "dict[str, bytes] | None":
    """Return how often each thread below a process has run; None if one of them runs now.

    An agent is quiet if two calls return the same mapping: in between no thread has run, so none
    can have sent a request that the endpoint has not received.
    """
    counts: dict[str, bytes] = {}
    new = [child for thread in _threads(pid) for child in _children(thread)]
    while new:
        children: list[bytes] = []
        for process in new:
            for thread in _threads(int(process)):
                with suppress(OSError):  # it has ended
                    # the name of the program, in brackets, may have spaces
                    state = _read(f"{thread}/stat").rpartition(b")")[2].lstrip()[:1]
                    if state not in _SLEEPING:
                        return None
                    counts[thread] = _read(f"{thread}/schedstat")
                    children += _children(thread)
        new = children
    return counts


def _threads(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            yield f"/proc/{pid}/task/{name}"


def _children(thread: str) -> list[bytes]:
    with suppress(OSError):
        return _read(f"{thread}/children").split()
    return []


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
