"""Whether an agent's processes have nothing left to do until somebody answers them."""

import os
import sys
from contextlib import suppress

from dapo.processes.proc_files import children_of, children_of_thread, read_bytes, threads_of

SETTLE_S = 0.05
"""The pause after an agent's last request, where its processes cannot be seen."""
_SLEEPING = (b"S", b"Z", b"X", b"I")
"""States of a thread that does not run, nor waits for a disk."""
CAN_SEE_PROCESSES = sys.platform == "linux" and os.path.exists("/proc/self/schedstat")


def activity(pid: int) -> "dict[str, bytes] | None":
    """Return how often each thread below a process has run; None if one of them runs now.

    An agent is quiet if two calls return the same mapping: in between no thread has run, so none
    can have sent a request that the endpoint has not received.
    """
    counts: dict[str, bytes] = {}
    new = children_of(pid)
    while new:
        children: list[int] = []
        for process in new:
            for thread in threads_of(process):
                with suppress(OSError):  # it has ended
                    # the name of the program, in brackets, may have spaces
                    state = read_bytes(f"{thread}/stat").rpartition(b")")[2].lstrip()[:1]
                    if state not in _SLEEPING:
                        return None
                    counts[thread] = read_bytes(f"{thread}/schedstat")
                    children += children_of_thread(thread)
        new = children
    return counts
