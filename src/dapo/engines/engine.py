"""What every rollout engine promises, in process or far away: submit, poll, abort."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dapo.types import Generation, GenerationRequest

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """A complete set of weights that can be read any number of times."""

    def named_tensors(self) -> "Iterable[tuple[str, torch.Tensor]]":
        """Every parameter by its Hugging Face name, tied ones under each of their names."""


class RolloutEngine(Protocol):
    """A streaming sampler. Requests finish in any order; each is answered exactly once."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Sample from these weights from now on. Only while nothing is in flight; raises EngineError otherwise."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, served first come first served. The G requests of a group are adjacent."""

    def poll(self) -> list[Generation]:
        """Advance, and return what has finished (maybe nothing). In process: one token for every live sequence."""

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """Stop these and return their partial responses (`finish="aborted"`, no tokens if never started)."""

    def close(self) -> None:
        """Free everything. Afterwards every other call raises EngineError."""


@runtime_checkable
class DropsWeights(Protocol):
    """An engine that can do without its weights between two phases of sampling."""

    def drop_weights(self) -> None:
        """Free their memory; until the next `load_weights` nothing can be submitted. Only with nothing in flight."""


def drop_weights(engine: RolloutEngine) -> None:
    """Have an engine that can, give its weights' memory back; any other keeps them."""
    if isinstance(engine, DropsWeights):
        engine.drop_weights()
