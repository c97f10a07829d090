"""Peak resident memory of a process, from the kernel's own account. Standard library only."""

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path


def peak_rss_bytes(children: Sequence[int] = ()) -> int:
    """The largest resident size of this process so far, plus those of the named children that
    live.
    """
    if sys.platform == "darwin":
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        # Linux's getrusage begins with what the parent had when it started this program
        own = _status_bytes(os.getpid(), "VmHWM")
    return own + sum(_status_bytes(pid, "VmHWM") for pid in children)


def current_rss_bytes() -> int:
    """The resident size of this process now (Linux only)."""
    return rss_bytes(os.getpid())


def rss_bytes(process: int) -> int:
    """The resident size of a process now (Linux only). Raises OSError if it has ended."""
    return _status_bytes(process, "VmRSS")


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no {field}")
