"""Memory of a process: garbage collection, the C library's allocator, and out-of-memory errors of
devices.
"""

import ctypes
import gc
import os
import platform
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dapo.core.errors import OutOfMemory

GIB = 2**30
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
LARGEST = 2**31 - 1

MAX_KERNELS = "64"
"""More than the shapes of products in one update of ragged microbatches."""
KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
GROWTH = 1.15
"""The growth of the resident memory at which freed blocks are returned to the system."""

VARIABLES = ("MALLOC_", "GLIBC_TUNABLES")
"""Prefixes of the environment variables that configure the allocator."""
_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"([\d.]+ \w+) is free")
_CAPACITY = re.compile(r"total capacity of ([\d.]+ \w+)")


@contextmanager
def collections_paused() -> Iterator[None]:
    """Pause the garbage collection of cycles in the block; also a decorator.

    A full collection visits every response of a batch, which takes 0.3 s at the paper's size. Use
    this for blocks that make many objects in well below a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, under glibc with an allocator that the user has not set.

    An update frees its gradients and activations, and the next one allocates as much: glibc returns
    blocks of that size to the system, which clears every page again. On SmolLM2-135M three steps of
    the quickstart then spent 5.3 s instead of 7.3 in the kernel, of 76 s of processor time, with 4
    % more memory at the peak (4,256 MiB). Returns whether it was set.
    """
    library_name, _ = platform.libc_ver()
    is_configured = any(name.startswith(VARIABLES) for name in os.environ)
    if library_name != "glibc" or is_configured:
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(M_MMAP_MAX, 0) and library.mallopt(M_TRIM_THRESHOLD, LARGEST))


def bound_kernels() -> None:
    """Bound the kernels that oneDNN keeps, unless the environment does.

    It compiles one for each shape of a product in bfloat16, which takes about a megabyte, and keeps
    1,024 by default. Batches of ragged lengths seldom meet a shape again. Call this before the
    first product.
    """
    os.environ.setdefault(KERNELS, MAX_KERNELS)


class FreedMemory:
    """Returns freed blocks to the system when the process has grown, under glibc.

    Blocks of ragged lengths leave holes in the heap, which stay resident and which longer blocks do
    not fill, so the peak of an update rises from step to step.
    """

    def __init__(self) -> None:
        library_name, _ = platform.libc_ver()
        self._library = ctypes.CDLL(None) if library_name == "glibc" else None
        self._limit: float | None = None

    def trim_if_grown(self) -> bool:
        """Return the blocks if the resident memory has grown since the update after the last time.

        Call it after each update. Returns whether it did.
        """
        resident = resident_bytes()
        if self._library is None or resident is None:
            return False
        if self._limit is None:
            self._limit = GROWTH * resident
            return False
        if resident <= self._limit:
            return False
        self._library.malloc_trim(0)
        self._limit = None
        return True


def resident_bytes() -> int | None:
    """Return the main memory that this process holds now; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def explain_out_of_memory(
    kind: type[Exception], doing: str, advice: str, *, then: str = "resume the run"
) -> Iterator[None]:
    """Raise OutOfMemory if the block, or the decorated function, raises an error of this kind.

    Drops the variables of the failed frames, because they hold the tensors that filled the memory,
    and saving the state needs memory.

    Args:
        kind: The type of the library's error.
        doing: The computation, with which the message begins.
        advice: The options to change.
        then: What to do after that, with which the message ends.
    """
    try:
        yield
    except kind as error:
        text = str(error)
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory(
            f"{doing} ran out of memory{_amounts(text)}: {advice}, and {then}"
        ) from None


def _amounts(text: str) -> str:
    """Return the requested and the free bytes, as far as torch's message gives them."""
    if not text:
        return ""
    requested = _ASKED.search(text)
    free = _FREE.search(text)
    capacity = _CAPACITY.search(text)
    parts = []
    if requested:
        parts.append(f"{requested[1]} were requested")
    if free and capacity:
        parts.append(f"{free[1]} of {capacity[1]} were free")
    elif free:
        parts.append(f"{free[1]} were free")
    # in other words: as the library has it
    details = ", ".join(parts) or " ".join(text.split())[:200]
    return f" ({details})"
