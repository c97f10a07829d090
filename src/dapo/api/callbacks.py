"""The caller's side of a run: functions called after each step, sinks for metrics, and errors as Python raises them."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from dapo.training.signals import Interrupted, ListenerFailed

if TYPE_CHECKING:
    from dapo.api.run import Run

OnStep: TypeAlias = Callable[["Run", dict[str, Any]], object]


class StepSink(Protocol):
    """What metrics are written to besides the run directory."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> object: ...


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C has stopped a run, whose state is saved: `run` is it, and `dapo.resume(run.path)` goes on with it."""

    def __init__(self, run: "Run", reason: str) -> None:
        super().__init__(f"{reason}; look at it with dapo.load({str(run.path)!r}), go on with dapo.resume(...)")
        self.run = run


@contextmanager
def translate_errors(run: "Run") -> Iterator[None]:
    """Translate errors for Python callers: Ctrl-C becomes KeyboardInterrupt; other errors stay."""
    try:
        yield
    except Interrupted as error:
        if error.exit_code - 128 == signal.SIGINT:
            raise TrainingInterrupted(run, str(error)) from None
        raise
    except ListenerFailed as error:
        raise error.__cause__ or error from None
