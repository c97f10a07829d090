"""Messages between controller and local workers; large buffers go through shared memory.

The shared memory is a file without a path (memfd), whose descriptor goes through the socket. No
other process can open it, the size of `/dev/shm` does not matter, and it disappears with the
processes. Where the system provides no such file, the bytes go through the socket, which copies
them twice.
"""

import mmap
import os
import pickle
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.processes.frames import frame, read_bytes, read_frame

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

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Have the bytes sent beside the pickle, without the type and shape of each array."""
        return _buffers, tuple(pickle.PickleBuffer(part.data) for part in self.parts)


def _buffers(*rows: Any) -> Buffers:
    return Buffers(tuple(np.frombuffer(row, np.uint8) for row in rows))


class Channel:
    """One end of a socket. One thread sends at a time, and one receives.

    A message is a frame with its pickle, the sizes of its buffers, and whether the descriptor of a
    shared file follows instead of their bytes.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over the file descriptor of a blocking socket, one end of a pair on this machine."""
        self._connection = socket.socket(fileno=descriptor)
        weakref.finalize(self, self._connection.close)

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message, in which `Buffers` may stand.

        Raises the pickling error of an unsuitable message before it sends anything, and OSError if
        the other end is gone.
        """
        arrays: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        buffers = [array.raw() for array in arrays]
        sizes = [buffer.nbytes for buffer in buffers]
        file = _shared_file(buffers) if sum(sizes) >= MIN_SHARED_BYTES else None
        try:
            self._connection.sendall(frame(pickle.dumps((body, sizes, file is not None))))
            if file is None:
                _write(self._connection.fileno(), buffers)
            else:
                socket.send_fds(self._connection, [b"-"], [file])
        finally:
            if file is not None:
                os.close(file)

    def send_end(self) -> None:
        """Send the mark of the last message."""
        self._connection.sendall(frame(b""))

    def receive(self) -> tuple[Any, ...]:
        """Return the next message. Raises EOFError after the last one, or OSError.

        Unpickling can raise any error.
        """
        head = read_frame(self._connection)
        if not head:
            raise EOFError
        body, sizes, is_shared = pickle.loads(head)
        memory = self._mapped(sum(sizes)) if is_shared else self._read(sum(sizes))
        ends = accumulate(sizes, initial=0)
        message: tuple[Any, ...] = pickle.loads(
            body, buffers=[memory[start:end] for start, end in pairwise(ends)]
        )
        return message

    def _read(self, size: int) -> memoryview:
        data = read_bytes(self._connection, size)
        if data is None:
            raise EOFError
        return memoryview(data)

    def _mapped(self, size: int) -> memoryview:
        """Return the shared file whose descriptor comes next, which exists as long as its views."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not data:
            raise EOFError
        [descriptor] = descriptors
        try:
            return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)


def _shared_file(buffers: Sequence[memoryview]) -> int | None:
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


def _write(descriptor: int, buffers: Sequence[memoryview]) -> None:
    filled = [buffer for buffer in buffers if buffer.nbytes]
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
