"""Worker specs of a run's engine processes: which engine each of them creates, and its CPU threads and GPUs."""

import hashlib
import importlib.util
import os
import pkgutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from math import ceil
from pathlib import Path

import torch
from transformers import PreTrainedModel

import dapo
from dapo.config import Config, RolloutConfig
from dapo.core.errors import ConfigError
from dapo.core.files import cache_folder
from dapo.distributed.launch import allocator_environment, threads_on_cluster
from dapo.distributed.protocol import Node, WorkerSpec
from dapo.engines.engine import RolloutEngine
from dapo.engines.vllm.start import INSTALL, VllmOptions
from dapo.policy.hf_io import config_of
from dapo.policy.model import load_meta_model, load_model


def engine_specs(config: Config, nodes: Sequence[Node] = ()) -> list[WorkerSpec]:
    """One spec for each of the `config.engine_processes`; `auto` must be resolved.

    `nodes` are the launcher's. If it has none, the processes see this machine's GPUs, which are divided here.
    """
    count, gpus_per_engine = config.engine_processes, config.gpus_per_engine
    if config.uses_ray:
        gpus = config.distributed.gpus_per_process
        if gpus is None:
            gpus = float(gpus_per_engine) if any(node.gpus for node in nodes) else 0.0
        given = config.train.threads or threads_on_cluster(config, nodes, gpus=gpus)
        threads = given or engine_threads(config, torch.get_num_threads())
        return [replace(_engine_spec(config, threads=threads, gpus=0), gpus=gpus)] * count
    trainers, visible = config.distributed.trainer_ranks, visible_gpus()
    threads = engine_threads(config, torch.get_num_threads())
    spec = _engine_spec(config, threads=threads, gpus=len(visible))
    assignments = gpu_assignments(visible, trainers=trainers, engines=count, gpus_per_engine=gpus_per_engine)
    return [
        replace(spec, environment={**spec.environment, "CUDA_VISIBLE_DEVICES": gpu_ids}) if gpu_ids else spec
        for gpu_ids in assignments
    ]


def _engine_spec(config: Config, *, threads: int, gpus: int) -> WorkerSpec:
    """The spec of each engine on a machine with `gpus` GPUs, of which it uses any; Ray assigns them later."""
    make = pkgutil.resolve_name(config.rollout.engine_kind.worker_spec)
    spec: WorkerSpec = make(config, threads=threads, gpu_processes=processes_per_gpu(config, gpus))
    return spec


def processes_per_gpu(config: Config, gpus: int) -> float:
    """How many trainer ranks and engines share a GPU; at least 1."""
    if config.uses_ray:
        return 1 / min(1.0, config.distributed.gpus_per_process or 1.0)
    engines = config.engine_processes * config.gpus_per_engine
    return max(1, ceil((config.distributed.trainer_ranks + engines) / max(1, gpus)))


def engine_spec(config: Config, *, threads: int, gpu_processes: float = 1) -> WorkerSpec:
    """The spec of a process that loads the model by its name and opens the engine around it.

    The policy's weights are loaded later. `gpu_processes` share its GPU, this one included.
    """
    environment = {"OMP_NUM_THREADS": str(threads)} | allocator_environment(config)
    options = {"config": config, "threads": threads, "gpu_processes": gpu_processes}
    return WorkerSpec("dapo.distributed.engine_specs:open_engine", options, environment=environment, cpus=threads)


def open_engine(*, config: Config, threads: int, gpu_processes: float = 1) -> RolloutEngine:
    """Open the engine in its process. Raises ConfigError and EngineError for a model that it cannot load or serve."""
    torch.set_num_threads(threads)
    model, device = config.model, config.train.device
    if device == "auto":  # on the machine of this process, which need not be the controller's
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, model.dtype)
    loaded = load_model(model.name, dtype=dtype, device=device, trust_remote_code=model.trust_remote_code)
    return open_in_process(config.rollout, loaded.model, gpu_processes)


def open_in_process(rollout: RolloutConfig, model: PreTrainedModel, gpu_processes: float = 1) -> RolloutEngine:
    """Open the engine around a model, which becomes its own."""
    assert rollout.engine_kind.open is not None, f"rollout.engine={rollout.engine} needs a process of its own"
    engine: RolloutEngine = pkgutil.resolve_name(rollout.engine_kind.open)(rollout, model, gpu_processes)
    return engine


def engine_threads(config: Config, available: int) -> int:
    """CPU threads per engine: `train.threads`, or an equal share of the `available` ones.

    Trainer ranks count as well if they update while the engines sample.
    """
    if config.train.threads is not None:
        return config.train.threads
    trainers = config.distributed.trainer_ranks if config.schedule == "one_step_off" else 0
    return max(1, available // (config.engine_processes + trainers))


def gpu_assignments(visible: Sequence[str], *, trainers: int, engines: int, gpus_per_engine: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each engine; None with at most one GPU.

    Engines get the GPUs after the trainers' if there are enough for all; otherwise they share all of them in turn.
    """
    if len(visible) < 2:
        return [None] * engines
    own = visible[trainers:] if len(visible) >= trainers + engines * gpus_per_engine else visible
    endless = cycle(own)
    return [",".join(islice(endless, gpus_per_engine)) for _ in range(engines)]


def visible_gpus() -> list[str]:
    """The GPUs of this process, named as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def vllm_engine_spec(config: Config, *, threads: int, gpu_processes: float = 1) -> WorkerSpec:
    """A vLLM engine for the model of `config`; the policy's weights are loaded later.

    Args:
        config: The run's.
        threads: CPU threads, divided among the processes of `rollout.vllm.tensor_parallel`.
        gpu_processes: Processes that share each of its GPUs, this one included.

    Raises ConfigError for a model with tensors that are no weights, and for an interpreter that does not exist.
    """
    vllm = config.rollout.vllm
    return WorkerSpec(
        "dapo.engines.vllm.start:open_vllm_engine",
        {"options": replace(vllm_options(config), gpu_processes=gpu_processes)},
        environment=vllm_environment(threads=max(1, threads // vllm.tensor_parallel)) | _import_path(vllm.python),
        python=None if vllm.python is None else _interpreter(vllm.python),
        cpus=threads,
    )


def require_vllm(config: Config) -> None:
    """Raise ConfigError, before anything is started, as `vllm_engine_spec` does and where vLLM is not installed."""
    if config.rollout.vllm.python is not None:
        _interpreter(config.rollout.vllm.python)
    elif not config.uses_ray and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"rollout.engine=vllm needs the Python package vllm, which is not installed here; {INSTALL}")
    vllm_options(config)


def vllm_options(config: Config) -> VllmOptions:
    """The options of the engine, from the model's configuration; no weights are loaded."""
    model, rollout = config.model, config.rollout
    meta_model = load_meta_model(model.name, trust_remote_code=model.trust_remote_code)
    response_tokens = max(rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    tokens = config.data.max_prompt_tokens + response_tokens
    return VllmOptions(
        model=model.name,
        model_config=config_of(meta_model).to_json_string(use_diff=False),
        weight_shapes=weight_shapes(meta_model),
        dtype="float32" if model.dtype == "float64" else model.dtype,  # vLLM has nothing wider
        max_tokens=min(tokens, getattr(meta_model.config, "max_position_embeddings", None) or tokens),
        reproducible=rollout.reproducible,
        trust_remote_code=model.trust_remote_code,
        temperatures=rollout.engine_kind.temperatures,
        **rollout.vllm.model_dump(exclude={"python"}),
    )


def weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Shapes by name, tied weights under each of their names. Raises ConfigError if the model has other tensors."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    if buffers := sorted(model.state_dict().keys() - shapes):
        raise ConfigError(
            f"rollout.engine=vllm cannot serve a {type(model).__name__}: it holds {len(buffers)} tensors that are no "
            f"weights, and that engines are not given ({buffers[0]} first); use rollout.engine=native"
        )
    return shapes


def vllm_environment(*, threads: int) -> dict[str, str]:
    """Variables that vLLM reads when it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process that answers calls also steps the engine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise it binds every core
        "VLLM_HOST_IP": "127.0.0.1",  # no access from other machines
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the processes of tensor_parallel; a fork cannot use CUDA
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),  # at INFO it logs every weight update
        "OMP_NUM_THREADS": str(threads),
    }


def _interpreter(python: str) -> str:
    path = Path(python).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(f"rollout.vllm.python={python}: expected the path of a Python interpreter that has vLLM")
    return str(path.absolute())


def _import_path(python: str | None) -> dict[str, str]:
    """PYTHONPATH for another interpreter: a folder with a link to this package alone.

    The folder that holds this package may be this environment's site-packages, whose torch would hide the one that
    vLLM needs.
    """
    if python is None:
        return {}
    package = Path(dapo.__file__).parent
    folder = cache_folder() / "import" / hashlib.sha256(str(package).encode()).hexdigest()[:16]
    link = folder / package.name
    if not link.is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder)) / package.name
        temporary.symlink_to(package, target_is_directory=True)
        os.replace(temporary, link)  # another process may be creating it as well
        temporary.parent.rmdir()
    return {"PYTHONPATH": str(folder)}
