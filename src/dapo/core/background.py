"""Work that nobody waits for, done in a thread beside what somebody does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(work: Callable[[], None], *, name: str) -> Iterator[threading.Thread]:
    """Have `work` done while the block runs; it is done when the block ends, and what it raises comes then.

    If both fail, the block's error is raised.
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
