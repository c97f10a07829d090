"""Laws of messages between the controller and a local worker: bytes arrive as they were, in shared
memory or not.
"""

import os
import resource
import socket
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dapo.distributed.channel import BUFFERS_PER_WRITE, MIN_SHARED_BYTES, Buffers, Channel

SMALL = [array("i", range(i % 50)) for i in range(200)]
LARGE = [array("i", range(i % 50)) for i in range(BUFFERS_PER_WRITE + 300)] + [
    array("d", range(10**6))
]


def channels() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours.detach()), Channel(theirs.detach())


def sent(here: Channel, there: Channel, message: tuple[Any, ...]) -> tuple[Any, ...]:
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(there.receive)
        here.send(message)
        return received.result(60)


@contextmanager
def no_large_files() -> Iterator[None]:
    """Files in memory, too, may not grow beyond a page."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_buffers_arrive_byte_by_byte_and_large_ones_read_only_in_shared_memory() -> None:
    here, there = channels()
    message = ("call", (7, Buffers.of(LARGE), Buffers(()), Buffers.of(LARGE[-1:])), {"a": 1})
    name, (number, large, nothing, last), options = sent(here, there, message)
    assert (name, number, nothing, options) == ("call", 7, Buffers(()), {"a": 1})
    (small,) = sent(here, there, (Buffers.of(SMALL),))
    for found, rows, is_shared in (
        (large, LARGE, True),
        (small, SMALL, False),
        (last, LARGE[-1:], True),
    ):
        assert [part.tobytes() for part in found.parts] == [row.tobytes() for row in rows]
        assert (sum(part.nbytes for part in found.parts) >= MIN_SHARED_BYTES) is is_shared
        assert found.parts[-1].flags.writeable is not is_shared


def test_where_the_system_refuses_shared_memory_the_bytes_go_through_the_socket() -> None:
    here, there = channels()
    before = os.listdir("/proc/self/fd")
    with no_large_files():
        _, (found,) = sent(here, there, ("call", (Buffers.of(LARGE),)))
    assert [part.tobytes() for part in found.parts] == [row.tobytes() for row in LARGE]
    assert found.parts[-1].flags.writeable
    assert os.listdir("/proc/self/fd") == before


def test_a_message_that_cannot_be_sent_leaves_nothing_behind_and_the_next_one_arrives() -> None:
    here, there = channels()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TypeError):
        here.send((threading.Lock(), (Buffers.of(LARGE),)))
    assert os.listdir("/proc/self/fd") == before
    here.send(("next",))
    assert there.receive() == ("next",)
    here.send_end()
    with pytest.raises(EOFError):
        there.receive()


def test_shared_memory_has_no_path_and_is_gone_with_the_last_view_of_it() -> None:
    here, there = channels()

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:dapo-buffers (deleted)")

    before = os.listdir("/proc/self/fd")
    _, (found,) = sent(here, there, ("call", (Buffers.of(LARGE),)))
    view = memoryview(found.parts[-1])[8:16].cast("d")
    del found
    assert (mapped(), view[0]) == (1, 1.0)
    del view
    assert (mapped(), os.listdir("/proc/self/fd")) == (0, before)


def test_a_descriptor_that_nobody_receives_is_closed_with_the_socket() -> None:
    here, there = channels()
    before = os.listdir("/proc/self/fd")
    # small enough for the socket: it is in its queue
    here.send(("call", (Buffers.of(LARGE[-1:]),)))
    del there
    with pytest.raises(OSError, match=r"Broken pipe|Connection reset"):
        here.send(("call", (Buffers.of(LARGE[-1:]),)))
    assert len(os.listdir("/proc/self/fd")) == len(before) - 1
