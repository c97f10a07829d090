"""The contract of every rollout engine, in this process or elsewhere: submit, poll, abort."""

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from dapo.types import Generation, GenerationRequest, Problem, WeightLayout

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """A complete set of weights that can be read any number of times."""

    def layout(self) -> WeightLayout:
        """Return the layout of `named_tensors`, without computing or copying a tensor."""

    def named_tensors(self) -> "Iterable[tuple[str, torch.Tensor]]":
        """Return every parameter by its Hugging Face name, tied ones under each name."""


class RolloutEngine(Protocol):
    """A streaming sampler. Requests finish in any order; each is answered exactly once."""

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


def episode_problem(engine: RolloutEngine, problem: Problem) -> Problem | None:
    """Return the problem for a request to this engine; None unless the engine plays episodes."""
    return problem if getattr(engine, "plays_episodes", False) else None


def float_array(values: Sequence[float]) -> "array[float]":
    """Return the values as float32 if that changes none of them, otherwise as float64."""
    exact = array("d", values)
    narrow = array("f", values)
    return narrow if narrow == exact else exact
