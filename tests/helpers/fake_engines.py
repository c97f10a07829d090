"""Engines for processes of a pool in tests.

Nothing here imports torch before it must: most processes start at once.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.scripted_engine import Script, ScriptedEngine
from dapo.core.errors import EngineError
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.distributed.engine_worker import EngineWorker
from dapo.engines.engine import RolloutEngine, WeightSource
from dapo.types import Finish, Generation, GenerationRequest

VOCABULARY = 197


class ReusableEngineWorker:
    """Holds one engine after the other, in a process that has imported what takes long."""

    def __init__(self) -> None:
        import dapo.distributed.engine_specs  # noqa: F401

        self.host: EngineWorker | None = None

    def replace_engine(self, factory: str, options: Mapping[str, Any]) -> None:
        self.host = EngineWorker(factory, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)


def native(model: bytes, slots: int) -> RolloutEngine:
    from dapo.config.rollout_options import NativeConfig
    from dapo.engines.native.engine import NativeEngine

    return NativeEngine(pickle.loads(model), NativeConfig(slots=slots))


def keyed_script(vocabulary: int = VOCABULARY) -> Script:
    """As a model's answer would be, a function of the seed alone."""
    return lambda request: ([int(u * vocabulary) for u in keyed_uniforms(request.seed, 64)], "stop")


def scripted(slots: int | None = None) -> ScriptedEngine:
    return ScriptedEngine(keyed_script(), slots=slots)


class HistoryDependentEngine(ScriptedEngine):
    """Its log-probabilities are a function of everything that it was ever asked, as rounding is of
    a batch: an engine that was not brought to the very state of another gives other answers.
    """

    def __init__(self, slots: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__(keyed_script(vocabulary), slots=slots)
        self._trace = 0

    def load_weights(self, weights: WeightSource, version: int) -> None:
        super().load_weights(weights, version)
        self._trace = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit(requests)
        self._mix("submit", *(request.id for request in requests))

    def poll(self) -> list[Generation]:
        self._mix("poll")
        return super().poll()

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        found = super().abort(request_ids)
        self._mix("abort", *request_ids)
        return found

    def _mix(self, *words: str) -> None:
        self._trace = keyed_seed(self._trace, *words)

    def _generation(
        self, request: GenerationRequest, token_ids: tuple[int, ...], finish: Finish
    ) -> Generation:
        logprobs = (-1.0 - self._trace % 1000 / 1000,) * len(token_ids)
        return replace(super()._generation(request, token_ids, finish), logprobs=logprobs)


class FaultyEngine(ScriptedEngine):
    """Breaks its contract: `corrupt` is given what `poll` and `abort` would return, and may change
    it or raise.
    """

    def __init__(
        self,
        script: Script,
        corrupt: Callable[[list[Generation]], list[Generation]],
        **options: Any,
    ) -> None:
        super().__init__(script, **options)
        self._corrupt = corrupt

    def poll(self) -> list[Generation]:
        return self._corrupt(super().poll())

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return self._corrupt(super().abort(request_ids))


class UnreproducibleEngine(ScriptedEngine):
    """Every response takes another time in every process, as on a device whose rounding varies."""

    def __init__(self) -> None:
        super().__init__(keyed_script(), delay=lambda request: 1 + (request.seed ^ os.getpid()) % 7)


class HangingEngine(ScriptedEngine):
    """Hangs in its third poll, but only in the first process that gets there: that one leaves a
    mark.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(keyed_script())
        self._mark = Path(mark)

    def poll(self) -> list[Generation]:
        if self.polls == 2 and not self._mark.exists():
            self._mark.touch()
            time.sleep(600)
        return super().poll()


class SlowPollEngine(ScriptedEngine):
    """Takes its time for a poll."""

    def __init__(self, seconds: float) -> None:
        super().__init__(keyed_script())
        self._seconds = seconds

    def poll(self) -> list[Generation]:
        time.sleep(self._seconds)
        return super().poll()


class DroppingEngine(ScriptedEngine):
    """Its only token is the number of times that it has dropped its weights."""

    def __init__(self) -> None:
        super().__init__(lambda request: ([self._drops], "stop"))
        self._drops = 0

    def drop_weights(self) -> None:
        super().drop_weights()
        self._drops += 1


class UnloadableEngine(ScriptedEngine):
    """Fails to load a version as vLLM's engine does, and closes itself; with a mark, which it
    leaves, only once.
    """

    def __init__(self, mark: str | None = None, first: int = 2) -> None:
        super().__init__(keyed_script())
        self._mark = None if mark is None else Path(mark)
        self._first = first

    def load_weights(self, weights: WeightSource, version: int) -> None:
        if version >= self._first and (self._mark is None or not self._mark.exists()):
            if self._mark is not None:
                self._mark.touch()
            self.close()
            raise EngineError("the device refuses")
        super().load_weights(weights, version)


class FailingEngine(ScriptedEngine):
    """Breaks down in its first poll."""

    def __init__(self) -> None:
        super().__init__(keyed_script())

    def poll(self) -> list[Generation]:
        raise ZeroDivisionError("by zero")


class FullEngine(ScriptedEngine):
    """Finds no memory in its first poll, as the engines that compute do."""

    def __init__(self) -> None:
        super().__init__(keyed_script())

    def poll(self) -> list[Generation]:
        import torch

        from dapo.core.memory import explain_out_of_memory

        with explain_out_of_memory(
            torch.OutOfMemoryError, "generation", "lower rollout.native.slots"
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")


@dataclass(frozen=True)
class EmptyWeightsHandle:
    """A handle that needs no torch to be read."""

    version: int

    @contextmanager
    def open(self) -> "Iterator[EmptyWeightsHandle]":
        yield self

    def named_tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()


def answers(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[str, Generation]:
    """The generations of these requests, by name."""
    engine.submit(requests)
    done: dict[str, Generation] = {}
    while engine.in_flight:
        done |= {generation.request_id: generation for generation in engine.poll()}
    return done
