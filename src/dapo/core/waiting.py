"""Waits that others ask for, such as `Retry-After`: bounded, shown on the terminal, and ended by a
signal.
"""

import math
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime

from dapo.core.errors import DapoError
from dapo.core.terminal import warn

MAX_FOREIGN_WAIT_S = 300.0
"""The longest wait that a server can cause by naming a time."""
SHOWN_WAIT_S = 5.0
"""Waits from this length on are shown."""


class Interrupted(DapoError):
    """A signal has stopped the run; the exit code is 128 plus its number, as in shells."""

    def __init__(self, signum: int, advice: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}{advice}")
        self.exit_code = 128 + signum


class SignalFlag:
    """Whether a signal asks this process to stop; all waits in all threads end then."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._signum: int | None = None

    def raise_now(self, signum: int) -> None:
        """End all waits, present and later ones, until `clear`."""
        self._signum = signum
        self._came.set()

    @property
    def is_raised(self) -> bool:
        """True if a signal has come."""
        return self._signum is not None

    def clear(self) -> None:
        self._came.clear()
        self._signum = None

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._signum is not None:
            raise Interrupted(self._signum)

    def sleep(self, seconds: float) -> None:
        """Wait so long. Raises Interrupted as soon as a signal comes."""
        # not time.sleep, which a signal does not end in other threads
        self._came.wait(seconds)
        self.check()


STOP_SIGNAL = SignalFlag()
"""Set by the handlers of `training/signals.py`."""


@dataclass
class SystemClock:
    """The time and the waits of a client; tests hand in another one."""

    stop: SignalFlag = field(default_factory=lambda: STOP_SIGNAL)

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        """Seconds since 1970, for dates that a server names."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait so long. Raises Interrupted as soon as a signal comes."""
        self.stop.sleep(seconds)

    def show(self, text: str) -> None:
        """Say on the terminal that somebody waits."""
        warn(text)


def wished_wait_s(headers: Mapping[str, str], now: float) -> float:
    """Return the seconds that a server wants a client to wait, 0 without a valid wish, up to inf.

    It is the longest of `retry-after-ms` (milliseconds) and `Retry-After` (seconds, or a date,
    which is compared with `now`, the seconds since 1970). The caller must not wait that long
    without `clamped_wait_s`.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    text = headers.get("Retry-After")
    seconds = _number(text)
    if seconds is None:
        seconds = _seconds_until(text, now)
    if milliseconds is None:
        return max(0.0, seconds)
    return max(0.0, milliseconds / 1000, seconds)


def clamped_wait_s(wished_s: float) -> float | None:
    """Return a duration named by others as this process may wait for it; None if it is too long."""
    if math.isnan(wished_s) or wished_s < 0:
        return 0.0
    if wished_s > MAX_FOREIGN_WAIT_S:
        return None
    return wished_s


def describe_wait(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `5.0 h`, `11.6 days`."""
    if not math.isfinite(seconds):
        return "endless time"
    for unit, length in (("days", 86_400.0), ("h", 3600.0)):
        if seconds >= length:
            if seconds < 1e12:
                return f"{seconds / length:,.1f} {unit}"
            return f"{seconds / length:.3g} {unit}"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"


def _number(text: str | None) -> float | None:
    """Return a header that is a decimal number, or None."""
    if text is None or not text.isascii():
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _seconds_until(date: str | None, now: float) -> float:
    """Return the seconds from `now` to a date of HTTP; 0 for what is none."""
    try:
        moment = parsedate_to_datetime(date or "")
        # dates of HTTP are in UTC, whether they say so or not
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp() - now
    except (ValueError, TypeError, OverflowError, IndexError):
        return 0.0
