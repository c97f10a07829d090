"""Work in a background thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(work: Callable[[], None], *, name: str) -> Iterator[threading.Thread]:
    """Do `work` in a thread while the block runs, and wait for it at the end of the block.

    What `work` raises is raised there; if both fail, the error of the block is.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised where the block ends
            failures.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
    if failures:
        raise failures[0]
