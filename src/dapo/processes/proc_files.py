"""Reads what Linux says of processes, with few system calls: it is asked many times a second."""

import os
from collections.abc import Iterator
from contextlib import suppress

_MAX_BYTES = 4096


def threads_of(pid: int) -> Iterator[str]:
    """Yield the folder in /proc of each thread of a process; of one that has ended, none."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            yield f"/proc/{pid}/task/{name}"


def children_of_thread(thread: str) -> list[int]:
    """Return the processes that a thread, named by its folder, has started."""
    with suppress(OSError):
        return [int(name) for name in read_bytes(f"{thread}/children").split()]
    return []


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, or adopted, and that have not ended."""
    return [child for thread in threads_of(pid) for child in children_of_thread(thread)]


def read_bytes(path: str) -> bytes:
    """Return the content of a file of /proc. Raises OSError, also if its process has ended."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, _MAX_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
