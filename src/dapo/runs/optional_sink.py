"""Feeds a tracker that may fail or hang: the run continues, and the steps it has missed are sent when
it works again.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dapo.core.loading import describe
from dapo.core.secrets import mask_text
from dapo.runs.sinks import EndingSink, Metrics, Sink

OpenSink: TypeAlias = Callable[[int], Sink]
"""Opens a tracker whose first values will be those of this step."""
OPEN_S = 120.0
"""Seconds that the run waits for the first delivery, in which the tracker is opened: W&B itself
gives up after 90.
"""
LOG_S = 30.0
"""Seconds that the run waits for the delivery of a step."""
CLOSE_S = 300.0
"""Seconds that the end of the run waits for pending uploads."""
_SLOW_S = 1.0
"""Seconds that the run waits for a tracker that did not answer in time."""
MAX_KEPT = 10_000
"""Undelivered calls that are kept in memory; the oldest are dropped."""


_REOPENED_AFTER = 2  # failures in a row
_MAX_REFUSALS = 3  # of the same metrics: with the tracker as it was, and opened again


@dataclass
class _Entry:
    """Metrics of a step that are not delivered yet."""

    step: int
    metrics: Metrics
    failures: int = 0


class OptionalSink:
    """A sink whose failures, of any type, never end the run.

    A thread of its own opens the tracker and calls it, so that a call that hangs delays the run by
    a bounded time. What could not be delivered is kept, and sent in order, each with its own step,
    by the next call. A tracker that has failed twice in a row is opened again. Metrics that it
    refuses then too are left out if it takes the ones behind.
    """

    def __init__(
        self,
        name: str,
        open_sink: OpenSink,
        warn: Callable[[str], None],
        *,
        first_step: int,
        open_s: float = OPEN_S,
        log_s: float = LOG_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """Open nothing yet: the first `log` does.

        Args:
            name: the tracker, for messages.
            open_sink: opens it.
            warn: gets one message for each kind of failure.
            first_step: the step of the first metrics.
            open_s: the seconds that the run waits for the first delivery.
            log_s: the seconds that it waits for a later one.
            close_s: the seconds that its end waits.
        """
        self._name = name
        self._open_sink = open_sink
        self._warn = warn
        self._open_s = open_s
        self._log_s = log_s
        self._close_s = close_s
        self._first_step = first_step
        self._sink: Sink | None = None
        self._entries: deque[_Entry] = deque()
        self._lost_steps: set[int] = set()
        self._failures_in_a_row = 0
        self._warned: set[tuple[str, str]] = set()
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._interrupt: KeyboardInterrupt | None = None
        self._state: str | None = None  # of the run at its end
        self._unfinished: threading.Event | None = None
        self._has_opened = False
        self._is_slow = False
        threading.Thread(target=self._work, name=f"dapo-{name}", daemon=True).start()

    def log(self, step: int, metrics: Metrics) -> None:
        """Deliver these metrics after those that are still kept; wait a bounded time."""
        self._entries.append(_Entry(step, dict(metrics)))
        limit_s = self._log_s if self._has_opened else self._open_s
        self._has_opened = True
        if self._is_slow:
            limit_s = min(limit_s, _SLOW_S)
        self._call(self._deliver, limit_s, doing="log")

    def end(self, state: str) -> None:
        self._state = state

    def close(self) -> None:
        """Try once more to deliver stored entries, close the tracker, and warn of lost steps."""
        if self._unfinished is not None:
            self._unfinished.wait(self._log_s)
        if self._entries:
            self._call(self._deliver, self._log_s, doing="log")
        self._call(self._close, self._close_s, doing="finish")
        self._calls.put(None)
        lost_steps = self._lost_steps | {entry.step for entry in list(self._entries)}
        if lost_steps:
            steps = "1 step was" if len(lost_steps) == 1 else f"{len(lost_steps)} steps were"
            self._warn(
                f"{self._name}: {steps} not delivered, the first is {min(lost_steps)};"
                " metrics.jsonl has all of them"
            )

    def _call(self, function: Callable[[], None], limit_s: float, *, doing: str) -> None:
        """Let the thread call `function`, and wait for it unless an earlier call hangs."""
        done = threading.Event()
        self._calls.put((function, done))
        is_behind = self._unfinished is not None and not self._unfinished.is_set()
        if is_behind:
            return
        self._unfinished = done
        self._is_slow = not done.wait(limit_s)
        if self._is_slow:
            self._note(doing, "TimeoutError", f"no answer within {limit_s:g} s")
        while not self._messages.empty():
            self._warn(self._messages.get())
        if self._interrupt is not None:
            interrupt = self._interrupt
            self._interrupt = None
            raise interrupt

    def _work(self) -> None:
        """In the thread: call what `_call` hands over, until `close`."""
        while (call := self._calls.get()) is not None:
            function, done = call
            function()
            done.set()

    def _deliver(self) -> None:
        """In the thread: send what is kept, the oldest first, up to a failure."""
        while len(self._entries) > MAX_KEPT:
            self._lost_steps.add(self._entries.popleft().step)
        was_failing = self._failures_in_a_row > 0
        newest = self._entries[-1].step if self._entries else 0
        while self._entries:
            if self._send(self._entries[0]):
                self._entries.popleft()
                continue
            is_refused = self._entries[0].failures >= _MAX_REFUSALS and len(self._entries) > 1
            # metrics that the tracker refuses must not hold up those behind
            if not is_refused or not self._send(self._entries[1]):
                return
            self._lost_steps.add(self._entries.popleft().step)
            self._entries.popleft()
        if was_failing:
            self._messages.put(f"{self._name} works again, and has got the steps up to {newest}")

    def _send(self, entry: _Entry) -> bool:
        """In the thread: send one entry, and return whether that has worked."""
        doing = "open"
        try:
            if self._failures_in_a_row >= _REOPENED_AFTER and self._sink is not None:
                self._discard()
            if self._sink is None:
                self._sink = self._open_sink(self._first_step)
            doing = "log"
            self._sink.log(entry.step, entry.metrics)
        except BaseException as error:  # also SystemExit, by which a login gives up
            self._failures_in_a_row += 1
            if doing == "log":
                entry.failures += 1
            self._fail(doing, error)
            return False
        self._failures_in_a_row = 0
        self._first_step = entry.step + 1
        return True

    def _close(self) -> None:
        sink = self._sink
        self._sink = None
        if sink is None:
            return
        try:
            if self._state is not None and isinstance(sink, EndingSink):
                sink.end(self._state)
            sink.close()
        except BaseException as error:
            self._fail("finish", error)

    def _discard(self) -> None:
        """Close a tracker that has failed; what it says to that is of no interest."""
        sink = self._sink
        self._sink = None
        try:
            if sink is not None:
                sink.close()
        except BaseException as error:
            self._keep_interrupt(error)

    def _fail(self, doing: str, error: BaseException) -> None:
        self._keep_interrupt(error)
        self._note(doing, type(error).__name__, describe(error))

    def _keep_interrupt(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):  # it is the user's, who waits in another thread
            self._interrupt = error

    def _note(self, doing: str, kind: str, reason: str) -> None:
        """Keep a warning for the thread that trains, unless it is the second of its kind."""
        if (doing, kind) in self._warned:
            return
        self._warned.add((doing, kind))
        does = {
            "open": "cannot be opened",
            "log": "has not taken a step",
            "finish": "did not finish",
        }[doing]
        again = "; the next step tries again"
        if doing == "finish":
            again = ""
        self._messages.put(
            f"{self._name} {does} ({mask_text(reason)}); the run continues, and metrics.jsonl has"
            f" all metrics{again}"
        )
