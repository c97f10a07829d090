"""Blueprints of a run's engine processes: what each makes, and its share of the machine."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from dapo.config.options import Config
from dapo.distributed.worker import Blueprint
from dapo.engines.native.engine import NativeEngine
from dapo.engines.native.graphs import recorder
from dapo.policy.model import load_model


def engine_blueprints(config: Config, *, cluster_gpus: float = 0.0) -> list[Blueprint]:
    """One for each of the `config.engine_processes`; `model.dtype` is settled.

    `cluster_gpus`: those that the launcher gives out. Without any the processes see this machine's, divided here.
    """
    threads = engine_threads(config, torch.get_num_threads())
    if config.rollout.engine == "vllm":
        from dapo.distributed.vllm_blueprint import vllm_blueprint

        blueprint = vllm_blueprint(config, threads=threads)
        gpus_each = config.rollout.vllm.tensor_parallel
    else:
        blueprint = native_blueprint(config, threads=threads)
        gpus_each = 1
    count = config.engine_processes
    if config.launcher != "local":
        gpus = config.distributed.engine_gpus
        return [replace(blueprint, gpus=float(gpus_each if cluster_gpus else 0) if gpus is None else gpus)] * count
    places = gpu_places(visible_gpus(), trainers=config.distributed.trainer_ranks, engines=count, gpus_each=gpus_each)
    return [
        replace(blueprint, environment={**blueprint.environment, "CUDA_VISIBLE_DEVICES": place}) if place else blueprint
        for place in places
    ]


def native_blueprint(config: Config, *, threads: int) -> Blueprint:
    """A native engine that loads the model by its name; the policy's weights come later."""
    return Blueprint(
        "dapo.distributed.engines:native_engine",
        {
            "model": config.model.name,
            "dtype": config.model.dtype,
            "device": config.train.device,
            "trust_remote_code": config.model.trust_remote_code,
            "slots": config.rollout.slots,
            "cache_tokens": config.rollout.cache_tokens,
            "cuda_graphs": config.rollout.cuda_graphs,
            "threads": threads,
        },
        environment={"OMP_NUM_THREADS": str(threads)},
        cpus=threads,
    )


def native_engine(
    *,
    model: str,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    slots: int,
    cache_tokens: int | None,
    cuda_graphs: bool,
    threads: int,
) -> NativeEngine:
    """In the engine's process. Raises ConfigError and EngineError as loading and serving a model do."""
    torch.set_num_threads(threads)
    if device == "auto":  # of the machine that this process runs on, which need not be the controller's
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(model, dtype=getattr(torch, dtype), device=device, trust_remote_code=trust_remote_code)
    record = recorder(loaded.model.device, wanted=cuda_graphs)
    return NativeEngine(loaded.model, slots=slots, cache_tokens=cache_tokens, record=record)


def engine_threads(config: Config, available: int) -> int:
    """CPU threads of each engine: as asked, or an equal share of those that this process would use.

    Where the policy updates while the engines sample, its processes have a share as well.
    """
    if config.rollout.engine_threads is not None:
        return config.rollout.engine_threads
    updates_meanwhile = config.schedule == "one_step_off"
    sharers = config.engine_processes + (config.distributed.trainer_ranks if updates_meanwhile else 0)
    return max(1, available // sharers)


def gpu_places(visible: Sequence[str], *, trainers: int, engines: int, gpus_each: int) -> list[str | None]:
    """For each engine the GPUs that it is to see; None where there is nothing to choose.

    Engines take the GPUs after the trainers' where there are enough for all; else they share all of them in turn.
    """
    if len(visible) < 2:
        return [None for _ in range(engines)]
    own = visible[trainers:] if len(visible) >= trainers + engines * gpus_each else visible
    return [",".join(own[(engine * gpus_each + i) % len(own)] for i in range(gpus_each)) for engine in range(engines)]


def visible_gpus() -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES would choose among this process's GPUs."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]
