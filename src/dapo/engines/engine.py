"""The contract of every rollout engine, whether it runs in this process or elsewhere: submit, poll,
abort.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from dapo.types import Generation, GenerationRequest, Problem, WeightLayout

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """A complete set of weights that can be read any number of times."""

    def layout(self) -> WeightLayout:
        """The names, shapes and types of `named_tensors`, without computing or copying a tensor."""

    def named_tensors(self) -> "Iterable[tuple[str, torch.Tensor]]":
        """Every parameter by its Hugging Face name, tied ones under each of their names."""


class RolloutEngine(Protocol):
    """A streaming sampler. Requests finish in any order; each is answered exactly once."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Sample from these weights from now on.

        Only while nothing is in flight; raises EngineError otherwise.
        """

    def drop_weights(self) -> None:
        """Free the weights' memory until `load_weights`, if the engine can.

        Only with nothing in flight.
        """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, served first come first served.

        The G requests of a group are adjacent.
        """

    def poll(self) -> list[Generation]:
        """Advance, and return the finished responses, if any.

        In process: one token for every running sequence.
        """

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these requests and return their partial responses (`finish="aborted"`, no tokens if
        never started).

        A response that had ended before the abort, but was not yet returned, keeps its finish:
        nothing may continue it.
        """

    def close(self) -> None:
        """Free everything. Afterwards every other call raises EngineError."""


def episode_problem(engine: RolloutEngine, problem: Problem) -> Problem | None:
    """The problem that a request to this engine has: engines that play episodes need it, others
    never get it.
    """
    return problem if getattr(engine, "plays_episodes", False) else None


def float_array(values: Sequence[float]) -> "array[float]":
    """The values as float32 where that changes none of them (float32 log-probabilities), otherwise
    as float64.
    """
    exact = array("d", values)
    narrow = array("f", values)
    return narrow if narrow == exact else exact
