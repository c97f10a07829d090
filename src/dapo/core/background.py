"""Work in a background thread."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def in_background(work: Callable[[], None], *, name: str) -> Iterator[Future[None]]:
    """Do `work` in a thread while the block runs, and wait for it at the end of the block.

    What `work` raises is raised there; if both fail, the error of the block is.
    """
    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        future = pool.submit(work)
        yield future
    future.result()
