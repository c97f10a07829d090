"""Turns SIGINT and SIGTERM into a stop request, which a run checks before each poll of its
engine.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

from dapo.core.errors import DapoError
from dapo.core.loading import describe
from dapo.core.waiting import STOP_SIGNAL, Interrupted

InterruptHandler: TypeAlias = signal.Handlers | Callable[[int, FrameType | None], Any] | None
"""A handler for Ctrl-C, as `signal.signal` takes it."""
END_AT_ONCE: InterruptHandler = signal.SIG_DFL  # the system's default, which ends even a matmul
INTERRUPT_MESSAGE = "saving, then stopping; Ctrl-C now ends at once"
SHOW_CURSOR = "\x1b[?25h"


class Stop(Exception):
    """Raised or returned by a callback, it ends the run normally, with its state saved.

    `dapo.train` and `dapo.resume` return the run, whose status is `stopped` with this reason.

    Example:
        >>> def enough(run, metrics):
        ...     if metrics["reward/mean"] > 0.9:
        ...         raise dapo.Stop("the mean reward is above 0.9")
    """

    def __init__(self, reason: str = "a callback asked for it") -> None:
        """`reason` is shown wherever the status of the run is."""
        super().__init__(str(reason))


STOP = Stop()
"""What a callback returns to end the run normally: `return dapo.STOP`."""


class ListenerFailed(DapoError):
    """A user's callback has raised: its error is the cause. The run's state is saved."""


class StoppedByCallback(DapoError):
    """A user's callback has ended the run by `Stop`. The run's state is saved."""


class StopRequest:
    """Whether a signal has come, or a callback has failed or wants the run to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.failure: BaseException | None = None
        self._is_deferred = False

    def check(self, advice: str = "") -> None:
        """Raise Interrupted with advice to continue, after a signal, unless that is deferred."""
        if self._is_deferred:
            return
        self.check_listeners()
        if self.signum is not None:
            raise Interrupted(self.signum, advice)

    def check_listeners(self) -> None:
        """Raise StoppedByCallback or ListenerFailed after what a callback has raised."""
        if isinstance(self.failure, Stop):
            raise StoppedByCallback(str(self.failure))
        if self.failure is not None:
            raise ListenerFailed(
                f"a callback after a step raised {describe(self.failure)}"
            ) from self.failure

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block finish even if a signal comes. Raises Interrupted if one came before."""
        self._is_deferred = True
        try:
            # after deferring: a sampling thread that saw the signal first has ended, and must not
            # be waited for
            if self.signum is not None:
                raise Interrupted(self.signum)
            yield
        finally:
            self._is_deferred = False


class StepListener:
    """A sink that calls a function with each finished step's metrics; what it raises ends the run.

    A KeyboardInterrupt, from the function itself, counts as the first Ctrl-C.
    """

    def __init__(self, stop: StopRequest, call: Callable[[int, Mapping[str, float]], None]) -> None:
        self._stop = stop
        self._call = call

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._call(step, metrics)
        except KeyboardInterrupt:
            if self._stop.signum is not None:  # the second one: nothing more is saved
                raise
            self._stop.signum = signal.SIGINT
        except BaseException as error:  # also SystemExit: the state is saved before it leaves
            self._stop.failure = self._stop.failure or error

    def close(self) -> None:
        """Nothing is pending."""


@contextmanager
def signals_as_requests(
    message: str = INTERRUPT_MESSAGE,
    *,
    on_second: InterruptHandler = END_AT_ONCE,
) -> Iterator[StopRequest]:
    """Turn the block's first SIGINT or SIGTERM into a request; the next SIGINT ends the process.

    Python handles signals in the main thread only; in any other thread the block does not change
    their handlers. The first signal prints `message`, unless it is empty; `on_second` handles the second SIGINT
    (`signal.default_int_handler` raises KeyboardInterrupt, which the process survives).
    """
    request = StopRequest()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if request.signum is None:
            request.signum = signum
            STOP_SIGNAL.raise_now(signum)
            # os.write, because a signal may come in the middle of a print
            # the live display hides the cursor, and the process may end before it shows it again
            cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
            text = f"\n{signal.Signals(signum).name}: {message}\n" if message else ""
            os.write(2, f"{cursor}{text}".encode())
        signal.signal(signal.SIGINT, on_second)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    STOP_SIGNAL.clear()
    previous_handlers = {
        signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield request
    finally:
        STOP_SIGNAL.clear()
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)
