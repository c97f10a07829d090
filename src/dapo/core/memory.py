"""Memory of a process: garbage collection, the C library's allocator, and errors of a device that has none left."""

import ctypes
import gc
import os
import platform
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dapo.core.errors import OutOfMemory

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
LARGEST = 2**31 - 1

VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")
"""Prefixes of the environment variables that configure the allocator."""
_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"([\d.]+ \w+) is free")
_CAPACITY = re.compile(r"total capacity of ([\d.]+ \w+)")


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect no garbage in cycles while the block runs; also a decorator.

    A full collection looks at every response of a batch: 0.3 s at the paper's size. Use it where a block makes many
    objects and takes well below a second: garbage in cycles stays until afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, where its C library is glibc; returns whether it does.

    An update frees its gradients and activations, and the next one takes as much: glibc gives blocks of that size back
    to the system, which has to clear every page again. On SmolLM2-135M three steps of the quickstart spent 5.3 s in the
    kernel instead of 7.3, of 76 s of processor time, and held 4 % more memory at their peak (4,256 MiB). Nothing is
    changed where the user has set the allocator.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(VARIABLES) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(M_MMAP_MAX, 0) and library.mallopt(M_TRIM_THRESHOLD, LARGEST))


@contextmanager
def explain_out_of_memory(
    kind: type[Exception], doing: str, advice: str, *, then: str = "resume the run"
) -> Iterator[None]:
    """Raise OutOfMemory where the block, or the function that this decorates, raises an error of this kind.

    The variables of the frames that failed are dropped: they hold the very tensors that filled the memory, and saving
    the state needs some of it.

    Args:
        kind: The error of the library that computes: torch.OutOfMemoryError.
        doing: The computation, as the subject of a sentence.
        advice: Which options to change, and how.
        then: The remedy with the changed options.
    """
    try:
        yield
    except kind as error:
        text = str(error)
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory(f"{doing} found no memory{_amounts(text)}: {advice}, and {then}") from None


def _amounts(text: str) -> str:
    """The bytes that were asked for and those that were free, as far as torch's message has them."""
    asked, free, capacity = (pattern.search(text) for pattern in (_ASKED, _FREE, _CAPACITY))
    parts = [f"{asked[1]} were asked for"] if asked else []
    if free:
        parts.append(f"{free[1]} of {capacity[1]} were free" if capacity else f"{free[1]} were free")
    return f" ({', '.join(parts) or ' '.join(text.split())[:200]})" if text else ""
