"""Worker specs of a run's engine processes: the engine, its CPU threads and GPUs."""

import os
import pkgutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch
from transformers import PreTrainedModel

from dapo.config import Config, GpuShares, RolloutConfig
from dapo.core.secrets import HUB_VARIABLES
from dapo.distributed.launch import allocator_environment, gpus_per_worker, threads_on_cluster
from dapo.distributed.protocol import Node, WorkerSpec
from dapo.engines.engine import RolloutEngine
from dapo.policy.model import device_of, load_model


def engine_specs(config: Config, nodes: Sequence[Node] = ()) -> list[WorkerSpec]:
    """Return a spec per engine process; without `nodes`, this machine's GPUs are divided."""
    count = config.engine_processes
    gpus_per_engine = config.gpus_per_engine
    if config.uses_ray:
        is_paired = config.gpu_shares(0).is_paired
        gpus = gpus_per_worker(config, nodes, default=float(gpus_per_engine)) * (
            gpus_per_engine if is_paired else 1
        )
        num_threads = config.train.threads or threads_on_cluster(config, nodes, gpus=gpus)
        spec = _engine_spec(
            config, threads=num_threads or engine_threads(config, torch.get_num_threads()), gpus=0
        )
        reserves = 2 if is_paired else 1  # an engine reserves what its ranks take as well
        return [replace(spec, cpus=reserves * spec.cpus, gpus=reserves * gpus)] * count
    trainers = config.distributed.trainer_ranks
    visible = visible_gpus()
    threads = engine_threads(config, torch.get_num_threads())
    spec = _engine_spec(config, threads=threads, gpus=len(visible))
    assignments = gpu_assignments(
        visible, trainers=trainers, engines=count, gpus_per_engine=gpus_per_engine
    )
    return [_with_gpus(spec, gpu_ids) for gpu_ids in assignments]


def _with_gpus(spec: WorkerSpec, gpu_ids: str | None) -> WorkerSpec:
    if not gpu_ids:
        return spec
    return replace(spec, environment={**spec.environment, "CUDA_VISIBLE_DEVICES": gpu_ids})


def _engine_spec(config: Config, *, threads: int, gpus: int) -> WorkerSpec:
    """Return the spec of engines that share `gpus` GPUs, none of them assigned yet."""
    make = pkgutil.resolve_name(config.rollout.engine_kind.worker_spec)
    return make(config, threads=threads, shares=config.gpu_shares(gpus))


def engine_spec(config: Config, *, threads: int, shares: GpuShares) -> WorkerSpec:
    """Return the spec of a process that loads the model by name and opens its engine.

    The policy's weights are loaded later.
    """
    environment = {"OMP_NUM_THREADS": str(threads)} | allocator_environment(config)
    options = {"config": config, "threads": threads, "gpu_processes": shares.sampling}
    return WorkerSpec(
        "dapo.distributed.engine_specs:open_engine",
        options,
        environment,
        HUB_VARIABLES,
        cpus=threads,
    )


def open_engine(*, config: Config, threads: int, gpu_processes: float = 1) -> RolloutEngine:
    """Open the engine in its process.

    Raises ConfigError and EngineError for a model that it cannot load or serve.
    """
    torch.set_num_threads(threads)
    model = config.model
    dtype = getattr(torch, config.model.dtype)
    device = device_of(config.train.device, f"an engine on {socket.gethostname()}")
    loaded = load_model(
        model.name, dtype=dtype, device=device, trust_remote_code=model.trust_remote_code
    )
    return open_in_process(config.rollout, loaded.model, gpu_processes)


def open_in_process(
    rollout: RolloutConfig, model: PreTrainedModel, gpu_processes: float = 1
) -> RolloutEngine:
    """Open the engine around a model, which it owns from then on."""
    assert rollout.engine_kind.open is not None, (
        f"rollout.engine={rollout.engine} needs a process of its own"
    )
    return pkgutil.resolve_name(rollout.engine_kind.open)(rollout, model, gpu_processes)


def engine_threads(config: Config, available: int) -> int:
    """Return threads per engine: `train.threads`, or a share equal to that of busy trainers."""
    if config.train.threads is not None:
        return config.train.threads
    trainers = config.distributed.trainer_ranks if config.samples_ahead else 0
    return max(1, available // (config.engine_processes + trainers))


def gpu_assignments(
    visible: Sequence[str], *, trainers: int, engines: int, gpus_per_engine: int
) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each engine; None with at most one GPU.

    Args:
        visible: the GPUs of this process.
        trainers: the number of trainer ranks, which come first.
        engines: the number of engines.
        gpus_per_engine: the number of GPUs of an engine.

    Engines get the GPUs after the trainers' if there are enough for all; otherwise they share all
    of them in turn.
    """
    if len(visible) < 2:
        return [None] * engines
    gpus = visible
    if len(visible) >= trainers + engines * gpus_per_engine:
        gpus = visible[trainers:]
    endless = cycle(gpus)
    return [",".join(islice(endless, gpus_per_engine)) for _ in range(engines)]


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, named as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]
