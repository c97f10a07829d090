"""The seam between the controller and every other process of a run: an object somewhere else that answers calls."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dapo.core.errors import WorkerDied

if TYPE_CHECKING:
    from dapo.engines.engine import WeightSource

CALL_TIMEOUT_S = 1800.0
"""Seconds without an answer to a call after which a worker counts as lost."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker makes in its own process: `factory(**options)`, and the surroundings it needs."""

    factory: str
    """`module:function`; imported in the worker."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Picklable."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set before the worker's interpreter starts."""
    python: str | None = None
    """Another interpreter, which can import this package; none: the controller's own."""
    cpus: float = 1.0
    gpus: float = 0.0


class Worker(Protocol):
    """One object in a process of its own. Calls are carried out one after the other, in their order."""

    @property
    def name(self) -> str:
        """For messages and the name of its log: `engine-0`, `trainer-1`."""

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        """Have a method called. The future raises what the method raised, or WorkerDied if the process is gone."""

    def kill(self) -> None:
        """End the process at once. Calls that wait for an answer fail with WorkerDied."""

    def close(self) -> None:
        """Have the process end by itself, and make sure that it does."""


class WeightsHandle(Protocol):
    """Weights on their way to workers: picklable, and readable wherever a worker of the same launcher runs."""

    @property
    def version(self) -> int: ...

    def open(self) -> "WeightSource":
        """In a worker: the weights. Raises EngineError where they are gone or are not of this version."""


class Launcher(Protocol):
    """Where workers come from."""

    @property
    def gpus(self) -> float:
        """GPUs that it has to give to workers by `Blueprint.gpus`; 0 where every worker sees what there is."""

    def start(self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False) -> Sequence[Worker]:
        """Start one worker for each blueprint and wait until every object is made.

        `together`: all of them or none, placed side by side as far as the launcher can. Raises LaunchError after its
        timeout, with what was asked for and what there is, and WorkerDied or what a factory raised.
        """

    def publish_weights(self, weights: "WeightSource", version: int) -> WeightsHandle:
        """Make weights readable for workers by the cheapest path there is. The version before the last is forgotten."""

    def close(self) -> None:
        """End all workers, and leave nothing behind."""


def wait_for_result(future: "Future[Any]", *, timeout_s: float, what: str, since: float | None = None) -> Any:
    """The result of a call. Raises WorkerDied, which names `what`, if none came in time; the worker is still there.

    `since`: when it was asked for, by `time.monotonic`; none: now.
    """
    try:
        return future.result(timeout_s if since is None else max(0.0, since + timeout_s - time.monotonic()))
    except FutureTimeoutError:
        if future.done():  # the method itself raised it
            raise
        raise WorkerDied(f"{what} gave no answer within {timeout_s:g} s") from None
