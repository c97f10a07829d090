"""One place to tell a run's news: every sink and the display."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dapo.telemetry.sinks import Sink


class Display(Protocol):
    """What shows progress to a person."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Hands each step's metrics to all sinks and the display."""

    def __init__(self, sinks: Sequence[Sink], display: Display) -> None:
        self._sinks = sinks
        self._display = display

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A finished step."""
        for sink in self._sinks:
            sink.log(step, metrics)
        self._display.log(step, metrics)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """What is going on now, and how far it is."""
        self._display.phase(name, done, total)

    def message(self, text: str) -> None:
        """Something a person should know."""
        self._display.message(text)

    def close(self) -> None:
        """Flush and close everything."""
        for sink in self._sinks:
            sink.close()
        self._display.close()
