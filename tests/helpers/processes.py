"""Waiting for what other processes do, and asking whether they still run."""

import time
from collections.abc import Callable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 60.0, what: str = "the condition") -> None:
    """Poll until the condition holds; a failed assertion that names `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} is not true after {timeout_s:g} s"
        time.sleep(0.02)


def wait_until_ended(*pids: int, timeout_s: float = 60.0) -> None:
    """Wait until none of these processes runs any more."""
    wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout_s=timeout_s, what=f"end of processes {pids}")
