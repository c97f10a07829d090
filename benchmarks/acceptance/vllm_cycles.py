"""An engine in a process of its own over several loads of weights: on one GPU vLLM sleeps while the
policy updates, wakes, and gets the new weights from GPU to GPU.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Protocol

import torch

from benchmarks.acceptance.check import Measurement, Setting, Skipped
from benchmarks.acceptance.correctness import SMALL_MODEL_GAP_NATS
from benchmarks.acceptance.engines import engine_gap, sampled, sampling_requests
from benchmarks.acceptance.models import ragged_samples
from benchmarks.acceptance.observed import LastLoad, Observed, ObservedVllm
from benchmarks.acceptance.processes import (
    START_S,
    ObservingLauncher,
    loaded_model,
    run_config,
    vocabulary_of,
)
from dapo.engines.engine import RolloutEngine
from dapo.libs.vllm_weights import chunks
from dapo.policy.policy import Policy
from dapo.start.build import build_engine
from dapo.types import GenerationRequest, Sample

CYCLES = 3
"""The first transfer connects, the second is the first of a connected pair, the third repeats it."""
CHUNK_BYTES = 2**26
"""Weights of .27 GB are then several chunks, as those of a large model are."""
ASLEEP_GIB = 4.0
"""The most that an engine may keep of the GPU: its context, its graphs, and what libraries hold."""
GIVEN_BACK = 0.5
"""The smallest part of the GPU that sleep gives back: `cache_gib: auto` takes nearly all."""
SLEEP_S = 10.0
WAKE_S = 10.0
TRANSFER_S = 10.0
"""Bounds far above what these take, and far below a new start of vLLM."""
_GIB = 2**30


class GpuObserver(Protocol):
    """What can be seen of an engine that shares a GPU with this process."""

    def free_gib(self) -> float:
        """Memory of the GPU that nobody has."""

    def held_gib(self) -> float:
        """Memory that other processes have had since the observer was made."""

    def last_load(self) -> LastLoad:
        """How the engine's weights came."""

    def wake_s(self) -> float:
        """Seconds of all wakes so far."""

    def starts(self) -> int:
        """Processes that have been the engine."""


@dataclass
class OneGpu:
    """Looks at the first GPU, which this process shares with the engine of a launcher."""

    launcher: ObservingLauncher

    def __post_init__(self) -> None:
        torch.zeros(1, device="cuda")  # this process's context is not the engine's
        self._before = self._of_others()

    def free_gib(self) -> float:
        """Memory of the GPU that nobody has."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] / _GIB

    def held_gib(self) -> float:
        """Memory that other processes have had since the observer was made."""
        return self._of_others() - self._before

    def _of_others(self) -> float:
        free_gib = self.free_gib()
        total = torch.cuda.mem_get_info()[1]
        return (total - torch.cuda.memory_reserved()) / _GIB - free_gib

    def last_load(self) -> LastLoad:
        """How the engine's weights came."""
        found: LastLoad = self.launcher.started[-1].call("last_load").result(START_S)
        return found

    def wake_s(self) -> float:
        """Seconds of all wakes so far."""
        return float(self.launcher.started[-1].call("wake_s").result(START_S))

    def starts(self) -> int:
        """Processes that have been the engine."""
        return len(self.launcher.started)


def check_vllm(setting: Setting) -> Iterator[Measurement]:
    """VLLM as a run on one GPU uses it, with graphs: weights are loaded, sampled from, given up, and
    loaded again.
    """
    if setting.vllm_python is None and find_spec("vllm") is None:
        raise Skipped(
            "no vLLM in this environment, and none named: VLLM_PYTHON=PATH of another one's"
            " interpreter"
        )
    if setting.on_gpu:
        # on several GPUs the engine would have one of its own
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = first
    cache_gib = "auto" if setting.on_gpu else 1.0
    vllm = {"python": setting.vllm_python, "cache_gib": cache_gib}
    rollout = {"engine": "vllm", "engines": 1, "clock": "load", "vllm": vllm}
    return _cycles_of(setting, rollout, CYCLES, small=False)


def check_engine_process_bfloat16(setting: Setting) -> Iterator[Measurement]:
    """A native engine in another process in bfloat16, where a GPU attends by lengths, over two
    loads of weights.
    """
    return _cycles_of(setting, {"engines": 1}, 1)


def _cycles_of(
    setting: Setting, rollout: dict[str, Any], count: int, *, small: bool | None = None
) -> Iterator[Measurement]:
    config = run_config(setting, dtype="bfloat16", rollout=rollout, small=small)
    loaded = loaded_model(config)
    policy = Policy(config, loaded)
    shares = config.gpu_shares(torch.cuda.device_count())
    observed = ObservedVllm if rollout.get("engine") == "vllm" else Observed
    with closing(ObservingLauncher(setting.folder / "logs", observed)) as launcher:
        observer = OneGpu(launcher) if shares.transfer is not None else None
        with closing(build_engine(config, loaded, launcher)) as engine, small_chunks():
            yield from measure_cycles(
                engine,
                policy,
                sampling_requests(vocabulary_of(loaded)),
                ragged_samples(vocabulary_of(loaded)),
                count=count,
                observer=observer,
            )


@contextmanager
def small_chunks() -> Iterator[None]:
    """Weights go in chunks of CHUNK_BYTES within the block."""
    before = chunks.CHUNK_BYTES
    chunks.CHUNK_BYTES = CHUNK_BYTES
    try:
        yield
    finally:
        chunks.CHUNK_BYTES = before


def measure_cycles(
    engine: RolloutEngine,
    policy: Policy,
    requests: Sequence[GenerationRequest],
    samples: Sequence[Sample],
    *,
    count: int,
    observer: GpuObserver | None,
    total_gib: float | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Measurement]:
    """A first load, then cycles of: the engine drops its weights, the policy updates, the engine
    gets the new ones and samples.

    The engine's log-probabilities are compared with the policy's, in bfloat16.

    Args:
        engine: gets the weights.
        policy: has them.
        requests: what the engine samples, each time.
        samples: what the policy trains on, each time.
        count: the number of cycles.
        observer: looks at the GPU that both share; None: nothing is said of memory and ways.
        total_gib: the memory of the GPU; None: of the first one here.
        clock: gives seconds.
    """
    engine.load_weights(policy.weights(version=1), 1)
    previous = sampled(engine, requests)
    yield _mean_gap("first load", engine_gap(policy, requests, previous)[0])
    for cycle in range(1, count + 1):
        name = f"cycle {cycle}"
        awake = 0.0 if observer is None else observer.held_gib()
        started = clock()
        engine.drop_weights()
        if observer is not None:
            yield from _asleep(name, clock() - started, awake, observer, total_gib)
        policy.update(samples, step=cycle)
        woken_s = 0.0 if observer is None else observer.wake_s()
        started = clock()
        engine.load_weights(policy.weights(version=1 + cycle), 1 + cycle)
        seconds = clock() - started
        if observer is not None:
            yield from _awake(name, seconds, woken_s, observer)
        stale = engine_gap(policy, requests, previous)[0]
        previous = sampled(engine, requests)
        mean, largest = engine_gap(policy, requests, previous)
        yield _mean_gap(name, mean)
        yield Measurement(f"{name}: largest gap", largest, "nats")
        yield Measurement(
            f"{name}: mean gap if the weights before had stayed",
            stale,
            "nats",
            at_least=2 * SMALL_MODEL_GAP_NATS,
        )
    if observer is not None:
        yield Measurement("engine processes that were needed", observer.starts(), at_most=1)


def _mean_gap(name: str, gap: float) -> Measurement:
    return Measurement(f"{name}: mean gap", gap, "nats", at_most=SMALL_MODEL_GAP_NATS)


def _asleep(
    name: str, seconds: float, awake: float, observer: GpuObserver, total_gib: float | None
) -> Iterator[Measurement]:
    if total_gib is None:
        total_gib = torch.cuda.mem_get_info()[1] / _GIB
    held = observer.held_gib()
    yield Measurement(f"{name}: sleep", seconds, "s", at_most=SLEEP_S)
    yield Measurement(f"{name}: free after sleep", observer.free_gib(), "GiB")
    yield Measurement(f"{name}: kept by the engine asleep", held, "GiB", at_most=ASLEEP_GIB)
    yield Measurement(
        f"{name}: given back by sleep", awake - held, "GiB", at_least=GIVEN_BACK * total_gib
    )


def _awake(
    name: str, seconds: float, woken_s: float, observer: GpuObserver
) -> Iterator[Measurement]:
    load = observer.last_load()
    wake_s = observer.wake_s() - woken_s
    yield Measurement(
        f"{name}: weights went from GPU to GPU (ipc)",
        load.way == "ipc",
        at_least=1,
        detail=load.way,
    )
    yield Measurement(f"{name}: chunks of weights", load.chunks, at_least=2)
    yield Measurement(f"{name}: wake", wake_s, "s", at_most=WAKE_S)
    yield Measurement(f"{name}: transfer", seconds - wake_s, "s", at_most=TRANSFER_S)
    yield Measurement(f"{name}: free after wake", observer.free_gib(), "GiB")
