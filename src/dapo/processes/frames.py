"""Messages between processes: each body follows its length in 8 bytes.

Messages of processes that run user code are JSON: user code may write to the connection itself, and
reading a pickle would run what it wrote.
"""

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct(">Q")
_MAX_ANSWER_BYTES = 1 << 26


def frame(body: bytes) -> bytes:
    """Return the bytes of a message with this body."""
    return _LENGTH.pack(len(body)) + body


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message of JSON. Raises TypeError or ValueError if it is not JSON."""
    # ASCII: json escapes lone surrogates, which a tokenizer may produce and UTF-8 cannot encode
    return frame(json.dumps(message).encode("ascii"))


def receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """Return the next message of JSON, or None at the end of the stream.

    Raises TimeoutError after `deadline`, by `time.monotonic()`, and ValueError for malformed data,
    which user code in the worker may write.
    """
    body = read_frame(connection, deadline)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")
    return message


def read_frame(connection: socket.socket, deadline: float | None = None) -> bytearray | None:
    """Return the body of the next message, as `receive`; with a deadline its size is bounded."""
    head = read_bytes(connection, _LENGTH.size, deadline)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if deadline is not None and size > _MAX_ANSWER_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return read_bytes(connection, size, deadline)


def read_bytes(
    connection: socket.socket, size: int, deadline: float | None = None
) -> bytearray | None:
    """Return so many bytes, or None if the stream ends before."""
    data = bytearray(size)
    remaining = memoryview(data)
    while remaining:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-6))
        count = connection.recv_into(remaining)
        if not count:
            return None
        remaining = remaining[count:]
    return data
