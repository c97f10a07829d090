"""SIGINT and SIGTERM as a request that a run looks at between two polls of its engine, where nothing is half done."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dapo.core.errors import DapoError

SHOW_CURSOR = "\x1b[?25h"


class Interrupted(DapoError):
    """A signal has asked the run to stop; the exit code is 128 plus its number, as a shell would say it."""

    def __init__(self, signum: int, advice: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}{advice}")
        self.exit_code = 128 + signum


class StopRequest:
    """Whether a signal has come."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._is_deferred = False

    def check(self, advice: str = "") -> None:
        """Raise Interrupted, with advice on how to go on, if one has, unless stopping is put off."""
        if self.signum is not None and not self._is_deferred:
            raise Interrupted(self.signum, advice)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, no thread is stopped: what is in hand is seen through. Raises Interrupted if a signal came before."""
        self._is_deferred = True
        try:
            # only now: a thread that was stopped a moment ago must not be waited for
            if self.signum is not None:
                raise Interrupted(self.signum)
            yield
        finally:
            self._is_deferred = False


@contextmanager
def signals_as_requests(
    message: str = "saving, then stopping; Ctrl-C now ends at once",
) -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM becomes a request; a SIGINT after that ends the process at once.

    `message` is what a person is told when the first one comes. Python lets only the main thread have signals: in
    any other the signals keep their meaning.
    """
    request = StopRequest()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if request.signum is None:
            request.signum = signum
            # not print: a signal may come while a line is being printed
            # the live display hides the cursor, and may not get to show it again
            cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
            os.write(2, f"{cursor}\n{signal.Signals(signum).name}: {message}\n".encode())
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the system's own: works in the middle of a matmul too

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
