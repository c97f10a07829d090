"""Messages between the controller and a local worker, over a socket; what is in buffers is not copied on the way."""

import os
import pickle
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

BUFFERS_PER_WRITE = 1024
"""How many buffers Linux takes in one call (IOV_MAX)."""


class Channel:
    """One end of a socket. One thread sends at a time, and one receives.

    A message is a pickle. A `pickle.PickleBuffer` in it stays outside of the pickle: it is written from where it lies,
    and arrives as a memoryview of the memory that it was read into.
    """

    def __init__(self, descriptor: int) -> None:
        """Take over the file descriptor of a socket that blocks."""
        self._connection: Connection[Any, Any] = Connection(descriptor)

    def send(self, message: Any) -> None:
        """Send a message. Raises what pickling raises, having sent nothing, and OSError if the other end is gone."""
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        views = [view for buffer in buffers if (view := buffer.raw()).nbytes]
        sizes = [buffer.raw().nbytes for buffer in buffers]
        self._connection.send_bytes(array("Q", sizes).tobytes())
        self._connection.send_bytes(content)
        for start in range(0, len(views), BUFFERS_PER_WRITE):
            self._write(views[start : start + BUFFERS_PER_WRITE])

    def send_end(self) -> None:
        """Send what the other end reads as the end of all messages."""
        self._connection.send_bytes(b"")
        self._connection.send_bytes(b"")

    def receive(self) -> Any:
        """The next message. Raises EOFError after the last one, OSError, and what unpickling raises."""
        sizes = array("Q", self._connection.recv_bytes())
        content = self._connection.recv_bytes()
        memory = memoryview(bytearray(sum(sizes)))
        self._read(memory)
        buffers, end = [], 0
        for size in sizes:
            buffers.append(memory[end : end + size])
            end += size
        return pickle.loads(content, buffers=buffers)

    def _write(self, views: "Sequence[memoryview]") -> None:
        remaining = list(views)
        while remaining:
            written = os.writev(self._connection.fileno(), remaining)
            while remaining and written >= remaining[0].nbytes:
                written -= remaining.pop(0).nbytes
            if written:
                remaining[0] = remaining[0][written:]

    def _read(self, memory: memoryview) -> None:
        while memory:
            if not (count := os.readv(self._connection.fileno(), [memory])):
                raise EOFError
            memory = memory[count:]
