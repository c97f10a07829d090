"""vLLM engines for tests: one process for each model, and engines in it that start without starting
vLLM anew.
"""

import atexit
import functools
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import dapo
from dapo.config.engines import ENGINES
from dapo.distributed.local import LocalLauncher, LocalWorker
from dapo.distributed.protocol import WeightsHandle, WorkerSpec
from dapo.distributed.vllm_spec import vllm_environment, weight_shapes
from dapo.engines.engine import WeightSource
from dapo.engines.vllm.engine import VllmEngine
from dapo.engines.vllm.start import VllmOptions, open_vllm_engine
from dapo.policy.hf_io import config_of
from dapo.types import Generation, GenerationRequest
from helpers.paths import ROOT, TESTS
from helpers.tiny_models import wide_model

AVAILABLE = importlib.util.find_spec("vllm") is not None
MISSING = "needs an environment with vLLM: make test-vllm"
LARGEST_SLOTS = 512
BLOCK_TOKENS = 32
CACHE_BLOCKS = 640
"""Enough for a short sequence in every slot; not for 256 of a hundred tokens."""
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""Of the tiny models: layers x (keys, values) x heads x head width x float32."""
START_S = 240.0
CALL_S = 240.0


def options_for(model: PreTrainedModel, **changes: Any) -> VllmOptions:
    """Of a small engine in float32."""
    settings: dict[str, Any] = {
        "model": type(model).__name__,
        "model_config": config_of(model).to_json_string(use_diff=False),
        "weight_shapes": weight_shapes(model),
        "dtype": "float32",
        "cache_gib": CACHE_BLOCKS * BLOCK_TOKENS * TOKEN_BYTES / 2**30,
        "max_tokens": 256,
        "temperatures": ENGINES["vllm"].temperatures,
    }
    changes.setdefault("arguments", {"max_num_seqs": LARGEST_SLOTS})
    return VllmOptions(**(settings | changes))


class ReusableVllmWorker:
    """In the worker: the engine of `open_vllm_engine`, and fresh ones on the same vLLM."""

    def __init__(self, options: VllmOptions) -> None:
        self._first = open_vllm_engine(options)
        self._engine = self._first

    def renew(self, slots: int) -> None:
        """An engine as it is after a start, with so many slots."""
        first = self._first
        if self._engine is not first:
            self._engine.close()
        self._engine = VllmEngine(
            first._engine,
            sampling_params=first._sampling_params,
            weight_shapes=first._weight_shapes,
            temperatures=first._temperatures,
        )
        self._engine._max_sequences = slots

    def load_weights(self, handle: WeightsHandle) -> None:
        with handle.open() as weights:
            self._engine.load_weights(weights, handle.version)

    def cached_tokens(self, request: GenerationRequest) -> list[int]:
        """Of a request's prompt, how many positions vLLM did not compute: at first, and when it is
        asked again.
        """
        counts = []
        for label in ("first", "again"):
            vllm = self._engine._engine
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            vllm.add_request(f"{request.id} {label}", prompt, self._first._sampling_params(request))
            outputs: list[Any] = []
            while not (outputs and outputs[-1].finished):
                outputs += vllm.step()
            counts.append(outputs[-1].num_cached_tokens)
        return counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class VllmStartWorker:
    """In a worker: tries to start vLLM, several times over."""

    def open(self, options: VllmOptions) -> None:
        open_vllm_engine(options).close()


class RemoteEngine:
    """A `ReusableVllmWorker` behind a worker, as a RolloutEngine."""

    def __init__(self, worker: LocalWorker, launcher: LocalLauncher) -> None:
        self.worker = worker
        self._launcher = launcher

    def call(self, method: str, *arguments: Any) -> Any:
        """And wait for the answer."""
        return self.worker.call(method, *arguments).result(CALL_S)

    def load_weights(self, weights: WeightSource, version: int) -> None:
        self.call("load_weights", self._launcher.publish_weights(weights, version))

    def drop_weights(self) -> None:
        self.call("drop_weights")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.call("submit", list(requests))

    def poll(self) -> list[Generation]:
        return self.call("poll")

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return self.call("abort", list(request_ids))

    def close(self) -> None:
        self.call("close")


@functools.cache
def launcher() -> LocalLauncher:
    """One for the whole session; ended with it."""
    folder = Path(tempfile.mkdtemp(prefix="dapo-test-vllm-"))
    launcher = LocalLauncher(folder, timeout_s=START_S)
    atexit.register(launcher.close)
    return launcher


@functools.cache
def process(name: str) -> RemoteEngine:
    """vLLM with one of the tiny models, started once for the whole session."""
    return start(name.replace(" ", "-"), options_for(wide_model(name)))


def fresh(name: str, *, slots: int = 64) -> RemoteEngine:
    """An engine on one of the tiny models that has no weights yet."""
    engine = process(name)
    engine.call("renew", slots)
    return engine


def start(name: str, options: VllmOptions) -> RemoteEngine:
    """vLLM with this model in a process of its own. Raises what starting it raised."""
    return RemoteEngine(start_worker(name, "ReusableVllmWorker", options=options), launcher())


def start_worker(name: str, factory: str, **options: Any) -> LocalWorker:
    """A process with something of this module."""
    environment = vllm_environment(threads=int(os.environ.get("OMP_NUM_THREADS", "2")))
    path = os.pathsep.join([str(TESTS), str(ROOT), str(Path(dapo.__file__).parents[1])])
    spec = WorkerSpec(
        f"helpers.vllm_engines:{factory}", options, environment | {"PYTHONPATH": path}
    )
    [worker] = launcher().start([name], [spec])
    return worker
