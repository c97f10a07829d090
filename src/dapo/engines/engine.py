"""The contract of every rollout engine, in this process or elsewhere: submit, poll, abort."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dapo.types import Generation, GenerationRequest, Problem, WeightLayout

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """A complete set of weights that can be read any number of times."""

    def layout(self) -> WeightLayout:
        """Return the layout of `named_tensors`, without computing or copying a tensor."""

    def named_tensors(self) -> "Iterable[tuple[str, torch.Tensor]]":
        """Return every parameter by its Hugging Face name, tied ones under each name."""


@dataclass(frozen=True)
class Unfinished:
    """A suspended response, and what an engine needs beside its request to continue it."""

    generation: Generation
    """The tokens so far."""
    lag: int | None = None
    """Polls until the answer of an environment counts; None: a token is to be sampled next."""
    handle: Any = None
    """The open episode in this process; None: an episode is rebuilt from its turns."""
    num_calls: int = 0
    """The episode's number of calls; if `handle` has another, it has left this response."""

    def close(self) -> None:
        """Give up the response."""
        if self.handle is not None and self.handle.num_calls == self.num_calls:
            self.handle.close()


class WeightReceiver(Protocol):
    """Receives weights from GPU to GPU, as `libs/vllm_weights` sends them."""

    def connect_weights(self, init_info: Mapping[str, Any]) -> None:
        """Join the trainer's transfer of weights; the old weights stay in use."""

    def receive_weights(
        self, update: Mapping[str, Any], layout: WeightLayout | None, version: int | None
    ) -> None:
        """Receive a chunk: the first with the layout of all, the last with the version."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do beside the methods of `RolloutEngine`: nothing, by default."""

    turns: "RolloutEngine | None" = None
    """Samples the turns of the episodes that the engine plays, or single responses while it plays
    none; None: it plays no episodes.
    """
    receiver: WeightReceiver | None = None
    """Takes weights that are sent from GPU to GPU; None: they must be loaded."""
    partial: Callable[[], Mapping[str, Sequence[int]]] | None = None
    """Returns the tokens so far of the responses that are being sampled, by request id; None: only
    whole responses can be seen.
    """


class RolloutEngine(Protocol):
    """A streaming sampler. Requests finish in any order; each is answered exactly once."""

    @property
    def capabilities(self) -> Capabilities:
        """Return what else the engine can do. It is read by `capabilities_of`."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Sample from these weights from now on.

        Raises EngineError while requests are in flight.
        """

    def drop_weights(self) -> None:
        """Free the weights' memory until `load_weights`, if the engine can.

        Raises EngineError while requests are in flight.
        """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, served first come first served.

        The G requests of a group are adjacent.
        """

    def poll(self) -> list[Generation]:
        """Advance, and return the finished responses, if any.

        An engine in this process samples one token for every running sequence.
        """

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these requests and return their partial responses, with `finish="aborted"`.

        A request that never started has no tokens. A response that had ended before the abort, but
        was not yet returned, keeps its finish and must not be continued.
        """

    def close(self) -> None:
        """Free everything. Afterwards every other call raises EngineError."""


class SuspendableEngine(RolloutEngine, Protocol):
    """What `ContinuingEngine` makes of any engine: responses stop, and continue later."""

    def suspend(self, request_ids: Sequence[str]) -> list[Generation | Unfinished]:
        """Stop these requests; a response that has just ended is returned whole.

        Afterwards the engine has none of them in flight.
        """

    def resume(self, requests: Sequence[GenerationRequest], parts: Sequence[Unfinished]) -> None:
        """Continue suspended responses, each with its request as it was submitted."""


def capabilities_of(engine: RolloutEngine) -> Capabilities:
    """Return what an engine can do; one of another package may not say, and then has none."""
    return getattr(engine, "capabilities", Capabilities())


def episode_problem(engine: RolloutEngine, problem: Problem) -> Problem | None:
    """Return the problem for a request to this engine; None unless the engine plays episodes."""
    return None if capabilities_of(engine).turns is None else problem


class EngineLayer:
    """An engine around another one, to which it passes every call that a subclass leaves alone."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self._engine)

    def load_weights(self, weights: WeightSource, version: int) -> None:
        self._engine.load_weights(weights, version)

    def drop_weights(self) -> None:
        self._engine.drop_weights()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._engine.submit(requests)

    def poll(self) -> list[Generation]:
        return self._engine.poll()

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return self._engine.abort(request_ids)

    def close(self) -> None:
        self._engine.close()


def float_array(values: Sequence[float]) -> "array[float]":
    """Return the values as float32 if that changes none of them, otherwise as float64."""
    exact = array("d", values)
    narrow = array("f", values)
    return narrow if narrow == exact else exact
