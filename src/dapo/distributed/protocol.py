"""The interface between controller and processes of a run: remote objects answer calls."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from dapo.engines.engine import WeightSource

ENGINE_NAME = "engine-{}"  # of the engine with a number
CALL_TIMEOUT_S = 1800.0  # seconds after which a worker without an answer counts as lost


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process creates, `factory(**options)`, its environment and resources."""

    factory: str  # `module:function`, imported in the worker
    options: Mapping[str, Any] = field(default_factory=dict)  # picklable
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before the worker's interpreter starts."""
    secrets: Collection[str] = ()
    """The only secret variables of the controller or its node that the worker gets."""
    # another interpreter, which can import this package; None: the controller's own
    python: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    # the worker with which this one shares a GPU on Ray, and which of its GPUs
    shares: tuple[str, int] | None = None


class Worker(Protocol):
    """One object in its own process.

    Calls are executed one at a time, in the order in which they were made.
    """

    @property
    def name(self) -> str:
        """Identifies the worker in messages and names its log: `engine-0`, `trainer-1`."""

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        """Call a method of the object. The future raises the method's error, or WorkerDied."""

    def kill(self) -> None:
        """End the process at once. Pending calls fail with WorkerDied."""

    def close(self) -> None:
        """Let the process end by itself, and kill it if it does not."""


class WeightsHandle(Protocol):
    """A picklable reference to published weights for every worker of the same launcher."""

    @property
    def version(self) -> int: ...

    def open(self) -> "AbstractContextManager[WeightSource]":
        """Give the weights, readable in the block.

        Raises EngineError if they are gone or of another version.
        """


class Node(NamedTuple):
    """The resources of a machine of a cluster, used and free together."""

    cpus: float
    gpus: float


class Launcher(Protocol):
    """Starts workers and publishes weights to them."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Return the machines that reserve resources; none if workers see this whole machine."""

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> Sequence[Worker]:
        """Start one worker for each spec and wait until every object exists.

        With `together` all of them are placed or none, on as few nodes as possible. Raises
        LaunchError after the timeout, with the requested and the available resources; WorkerDied if
        a process ends during the start; and the error of a factory.
        """

    def publish_weights(self, weights: "WeightSource", version: int) -> WeightsHandle:
        """Make weights readable for workers by the cheapest path.

        Only the last two versions are kept.
        """

    def close(self) -> None:
        """End all workers and remove published weights."""
