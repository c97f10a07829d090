"""Messages between controller and local workers; large buffers go through shared memory.

The shared memory is a file without a path (memfd), whose descriptor goes through the socket. No
other process can open it, the size of `/dev/shm` does not matter, and it disappears with the
processes. Where the system provides no such file, the bytes go through the socket, which copies
them twice.
"""

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUFFERS_PER_WRITE = 1024  # the number of buffers that Linux takes in one call (IOV_MAX)
# fewer bytes go through the socket, which buffers them without waiting for the other end
MIN_SHARED_BYTES = 2**16


@dataclass(frozen=True)
class Buffers:
    """A large positional argument of a call, sent without pickling its bytes, also by Ray."""

    parts: tuple[NDArray[np.uint8], ...]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> "Buffers":
        """Return views of objects with a buffer, such as `array.array`, which must not change."""
        return cls(
            tuple(
                np.frombuffer(row, np.uint8) if len(row) else np.empty(0, np.uint8) for row in rows
            )
        )


@dataclass(frozen=True)
class _Sizes:
    """The placeholder of buffers in the message that precedes them."""

    sizes: tuple[int, ...]
    is_shared: bool  # whether the descriptor of a shared file follows instead of the bytes


class Channel:
    """One end of a socket. One thread sends at a time, and one receives."""

    def __init__(self, descriptor: int) -> None:
        """Take over the file descriptor of a blocking socket, one end of a pair on this machine."""
        self._connection: Connection[Any, Any] = Connection(descriptor)

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message; a tuple in it may hold `Buffers`.

        Raises the pickling error of an unsuitable message before it sends anything, and OSError if
        the other end is gone.
        """
        with ExitStack() as files:
            following: list[Callable[[], None]] = []

            def replaced(value: Any) -> Any:
                if not isinstance(value, Buffers):
                    return value
                sizes = tuple(part.nbytes for part in value.parts)
                file = _shared_file(value) if sum(sizes) >= MIN_SHARED_BYTES else None
                if file is None:
                    following.append(lambda: _write(self._connection.fileno(), value))
                else:
                    files.callback(os.close, file)
                    following.append(lambda: self._send_descriptor(file))
                return _Sizes(sizes, is_shared=file is not None)

            self._connection.send(_map_members(replaced, message))
            for send in following:
                send()

    def send_end(self) -> None:
        """Send the mark of the last message."""
        self._connection.send_bytes(b"")

    def receive(self) -> tuple[Any, ...]:
        """Return the next message. Raises EOFError after the last one, or OSError.

        Unpickling can raise any error.
        """
        return _map_members(self._filled, self._connection.recv())

    def _filled(self, value: Any) -> Any:
        if not isinstance(value, _Sizes):
            return value
        size = sum(value.sizes)
        memory = self._mapped(size) if value.is_shared else self._read(size)
        return Buffers(tuple(memory[a:b] for a, b in pairwise(accumulate(value.sizes, initial=0))))

    def _read(self, size: int) -> NDArray[np.uint8]:
        memory = np.empty(size, np.uint8)
        remaining = memory.data
        while remaining:
            if not (count := os.readv(self._connection.fileno(), [remaining])):
                raise EOFError
            remaining = remaining[count:]
        return memory

    def _mapped(self, size: int) -> NDArray[np.uint8]:
        """Return the shared file whose descriptor comes next, which exists as long as its views."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            data, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        if not data:
            raise EOFError
        [descriptor] = descriptors
        try:
            return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(descriptor)

    def _send_descriptor(self, file: int) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            socket.send_fds(end, [b"-"], [file])


def _shared_file(buffers: Buffers) -> int | None:
    """Return the descriptor of a file in memory with the bytes; None if the system refuses."""
    if not hasattr(os, "memfd_create"):
        return None
    file = None
    try:
        file = os.memfd_create("dapo-buffers")
        _write(file, buffers)
    except OSError:
        if file is not None:
            os.close(file)
        return None
    return file


def _write(descriptor: int, buffers: Buffers) -> None:
    filled = [part.data for part in buffers.parts if part.size]
    for start in range(0, len(filled), BUFFERS_PER_WRITE):
        views = filled[start : start + BUFFERS_PER_WRITE]
        first = 0
        while first < len(views):
            num_bytes = os.writev(descriptor, views[first:])
            while first < len(views) and num_bytes >= views[first].nbytes:
                num_bytes -= views[first].nbytes
                first += 1
            if num_bytes:
                views[first] = views[first][num_bytes:]


def _map_members(function: Callable[[Any], Any], message: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the message with `function` applied to the members of the tuples in it."""
    return tuple(
        tuple(map(function, member)) if type(member) is tuple else member for member in message
    )
