"""Runs a user's coroutines on one event loop that stays open, as the HTTP clients they hold expect."""

import asyncio
import inspect
import threading
import weakref
from collections.abc import Awaitable
from typing import Any


class EventLoop:
    """An event loop in a thread of its own, started by the first coroutine; works under a running loop as well."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, result: Any) -> Any:
        """A plain result as it is, an awaitable one awaited."""
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="dapo-reward-coroutines").start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # would end the loop, and leave the caller waiting for it
        raise RuntimeError(f"sys.exit({error.code!r})") from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
