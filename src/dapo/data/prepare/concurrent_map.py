"""Many problems through one slow function at once, each result kept as soon as it is there."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from dapo.core.openai_client import ServerFailed

MAX_CONSECUTIVE_FAILURES = 8
"""So many say that the server is gone."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def concurrent_map(
    items: Sequence[Item],
    work: Callable[[Item, Callable[[], None]], Result],
    keep: Callable[[Result], None],
    *,
    concurrency: int,
) -> list[ServerFailed]:
    """`keep(work(item, check))` for every item, `concurrency` at a time, `keep` in the calling thread.

    Returns the failures of the server; after too many in a row it stops. `work` calls `check` before each slow thing:
    it ends the thread once the whole is being abandoned. Any other error is raised after the running ones have ended.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise ServerFailed("abandoned")

    failures: list[ServerFailed] = []
    consecutive_failures = 0
    remaining = iter(items)
    running: set[Future[Result]] = set()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                while len(running) < concurrency and (item := next(remaining, None)) is not None:
                    running.add(pool.submit(work, item, check))
                if not running:
                    return failures
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        keep(future.result())
                        consecutive_failures = 0
                    except ServerFailed as error:
                        failures.append(error)
                        consecutive_failures += 1
                if consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                    return failures
        finally:
            stop.set()
