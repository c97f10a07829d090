"""The layers around an engine, and what an engine can do beside the methods of its protocol."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.errors import EngineError
from dapo.distributed.engine_worker import EngineWorker
from dapo.engines.checked import CheckedEngine
from dapo.engines.continuation import ContinuingEngine
from dapo.engines.engine import (
    Capabilities,
    EngineLayer,
    RolloutEngine,
    capabilities_of,
    episode_problem,
)
from dapo.start.build import stack_engine
from dapo.types import Generation, GenerationRequest, Problem
from helpers.fake_rollout import random_script

PROBLEM = Problem("1", "2 + 3 =", "5")


class ForeignEngine:
    """An engine of another package: it has the methods, and names no capabilities."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def load_weights(self, *arguments: Any) -> None:
        self.calls.append(("load_weights", *arguments))

    def drop_weights(self) -> None:
        self.calls.append(("drop_weights",))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.calls.append(("submit", requests))

    def poll(self) -> list[Generation]:
        self.calls.append(("poll",))
        return []

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        self.calls.append(("abort", request_ids))
        return []

    def close(self) -> None:
        self.calls.append(("close",))


class PlayingEngine(ForeignEngine):
    """An engine that plays episodes."""

    capabilities = Capabilities(turns=ScriptedEngine(random_script))


def finish(engine: RolloutEngine) -> list[Generation]:
    """Poll as often as the longest response has tokens."""
    return [generation for _ in range(4) for generation in engine.poll()]


def test_a_layer_passes_every_method_of_the_protocol_on():
    engine = ForeignEngine()
    layer = EngineLayer(engine)  # type: ignore[arg-type]
    methods = inspect.getmembers(RolloutEngine, inspect.isfunction)
    arguments = {
        name: [
            f"{name} {parameter}" for parameter in list(inspect.signature(method).parameters)[1:]
        ]
        for name, method in methods
        if not name.startswith("_")
    }
    for name, values in arguments.items():
        getattr(layer, name)(*values)
    assert engine.calls == [(name, *values) for name, values in arguments.items()]
    assert len(engine.calls) == 6


@pytest.mark.parametrize("engine", [ForeignEngine(), ScriptedEngine(random_script)])
def test_an_engine_that_names_no_capabilities_has_none(engine: RolloutEngine):
    assert capabilities_of(engine) == Capabilities()
    assert episode_problem(engine, PROBLEM) is None


def test_a_layer_has_the_capabilities_of_its_engine():
    inner = PlayingEngine()
    layer = ContinuingEngine(CheckedEngine(inner, vocabulary=10))  # type: ignore[arg-type]
    assert capabilities_of(layer) is inner.capabilities
    assert episode_problem(layer, PROBLEM) is PROBLEM


def test_the_stack_checks_an_engine_before_it_continues_responses():
    engine = ScriptedEngine(random_script)
    stack = stack_engine(engine, 10, None, print)
    request = GenerationRequest("a", (1,), 4, 1.0, 1.0, 0, ())
    stack.load_weights(None, 0)  # type: ignore[arg-type]
    stack.submit([request])
    part = stack.suspend(["a"])
    assert not engine.in_flight
    stack.resume([request], part)  # type: ignore[arg-type]
    engine._version = 7
    with pytest.raises(EngineError, match="expected weights of version 0, got version 7"):
        finish(stack)


def test_a_worker_whose_engine_cannot_receive_weights_says_so():
    worker = EngineWorker(f"{__name__}:ForeignEngine", {})
    for call in (
        lambda: worker.connect_weights({}),
        lambda: worker.receive_weights({}, None, 1),
    ):
        with pytest.raises(EngineError, match="cannot receive weights from GPU to GPU"):
            call()
