"""Messages between the controller and a local worker, over a socket; what is in buffers is not copied on the way."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUFFERS_PER_WRITE = 1024
"""How many buffers Linux takes in one call (IOV_MAX)."""


@dataclass(frozen=True)
class Buffers:
    """A positional argument of a call that is many bytes: they are written from where they lie.

    Ray, too, leaves numpy arrays outside of the message, in shared memory.
    """

    parts: tuple[NDArray[np.uint8], ...]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> "Buffers":
        """Views of objects with a buffer, such as `array.array` and bytes: these must not change."""
        return cls(tuple(np.frombuffer(row, np.uint8) if len(row) else np.empty(0, np.uint8) for row in rows))


@dataclass(frozen=True)
class _Sizes:
    """What stands for buffers in the message that goes before them."""

    sizes: tuple[int, ...]


class Channel:
    """One end of a socket. One thread sends at a time, and one receives."""

    def __init__(self, descriptor: int) -> None:
        """Take over the file descriptor of a socket that blocks."""
        self._connection: Connection[Any, Any] = Connection(descriptor)

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message; a tuple in it may hold `Buffers`.

        Raises what refuses to be sent, before anything is, and OSError if the other end is gone.
        """
        parts: list[NDArray[np.uint8]] = []
        self._connection.send(_map_members(partial(_taken_out, parts), message))
        filled = [part.data for part in parts if part.size]
        for start in range(0, len(filled), BUFFERS_PER_WRITE):
            self._write(filled[start : start + BUFFERS_PER_WRITE])

    def send_end(self) -> None:
        """Send what the other end reads as the end of all messages."""
        self._connection.send_bytes(b"")

    def receive(self) -> tuple[Any, ...]:
        """The next message. Raises EOFError after the last one, OSError, and what reading a message raises."""
        return _map_members(self._filled, self._connection.recv())

    def _filled(self, value: Any) -> Any:
        if not isinstance(value, _Sizes):
            return value
        memory = np.empty(sum(value.sizes), np.uint8)
        remaining = memory.data
        while remaining:
            if not (count := os.readv(self._connection.fileno(), [remaining])):
                raise EOFError
            remaining = remaining[count:]
        return Buffers(tuple(np.split(memory, np.cumsum(value.sizes)[:-1]))) if value.sizes else Buffers(())

    def _write(self, views: list[memoryview]) -> None:
        first = 0
        while first < len(views):
            written = os.writev(self._connection.fileno(), views[first:])
            while first < len(views) and written >= views[first].nbytes:
                written -= views[first].nbytes
                first += 1
            if written:
                views[first] = views[first][written:]


def _map_members(function: Callable[[Any], Any], message: tuple[Any, ...]) -> tuple[Any, ...]:
    """The message with `function` applied to the members of the tuples in it."""
    return tuple(tuple(map(function, member)) if type(member) is tuple else member for member in message)


def _taken_out(parts: list[NDArray[np.uint8]], value: Any) -> Any:
    if not isinstance(value, Buffers):
        return value
    parts += value.parts
    return _Sizes(tuple(part.nbytes for part in value.parts))
