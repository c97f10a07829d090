"""Blueprints of a run's engine processes: what each makes, and its share of the machine."""

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

import dapo
from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.distributed.protocol import WorkerSpec
from dapo.engines.native.engine import NativeEngine
from dapo.engines.vllm.start import INSTALL, VllmOptions
from dapo.policy.hf_io import config_of
from dapo.policy.model import load_meta_model, load_model


def vllm_engine_spec(config: Config, *, threads: int) -> WorkerSpec:
    """An engine with the model of `config` (whose `model.dtype` is settled); the policy's weights come later.

    Raises ConfigError for a model that is more than its weights, and for an interpreter that does not exist.
    """
    vllm = config.rollout.vllm
    return WorkerSpec(
        "dapo.engines.vllm.start:open_vllm_engine",
        {"options": vllm_options(config)},
        environment=vllm_environment(threads=threads, eager=vllm.eager) | _import_path(vllm.python),
        python=None if vllm.python is None else _interpreter(vllm.python),
        cpus=threads,
    )


def require_vllm(config: Config) -> None:
    """What can be known before anything is started. Raises ConfigError as `vllm_engine_spec` does, and where vLLM is to
    run in this very environment, which does not have it.
    """
    if config.rollout.vllm.python is not None:
        _interpreter(config.rollout.vllm.python)
    elif config.launcher == "local" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"rollout.engine=vllm needs the Python package vllm, which is not installed here; {INSTALL}")
    vllm_options(config)


def vllm_options(config: Config) -> VllmOptions:
    """What the engine is started with. Nothing of the model is loaded for it but its configuration."""
    meta_model = load_meta_model(config.model.name, trust_remote_code=config.model.trust_remote_code)
    rollout = config.rollout
    tokens = config.data.max_prompt_tokens + max(
        rollout.max_response_tokens, config.eval.max_response_tokens or rollout.max_response_tokens
    )
    positions = getattr(meta_model.config, "max_position_embeddings", None)
    return VllmOptions(
        model=config.model.name,
        model_config=config_of(meta_model).to_json_string(use_diff=False),
        weight_shapes=weight_shapes(meta_model),
        dtype="float32" if config.model.dtype == "float64" else config.model.dtype,  # vLLM has nothing wider
        cache_gib=rollout.vllm.cache_gib,
        max_sequences=rollout.vllm.max_sequences,
        max_tokens=tokens if positions is None else min(tokens, positions),
        tensor_parallel=rollout.vllm.tensor_parallel,
        eager=rollout.vllm.eager,
        trust_remote_code=config.model.trust_remote_code,
    )


def weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """By name, tied weights under each of their names. Raises ConfigError for a model that is more than its weights."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    if buffers := sorted(model.state_dict().keys() - shapes):
        raise ConfigError(
            f"rollout.engine=vllm cannot serve a {type(model).__name__}: it holds {len(buffers)} tensors that are no "
            f"weights, and that engines are not given ({buffers[0]} first); use rollout.engine=native"
        )
    return shapes


def vllm_environment(*, threads: int, eager: bool) -> dict[str, str]:
    """Variables that vLLM reads when it is imported."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is stepped here, in the process that answers calls
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it takes every core for itself
        "VLLM_HOST_IP": "127.0.0.1",  # nobody outside has business with it
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),  # or it tells of every new version
        "OMP_NUM_THREADS": str(threads),
    }
    return variables | ({"TORCH_COMPILE_DISABLE": "1"} if eager else {})


def _interpreter(python: str) -> str:
    path = Path(python).expanduser()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(f"rollout.vllm.python={python}: expected the path of a Python interpreter that has vLLM")
    return str(path.absolute())


def _import_path(python: str | None) -> dict[str, str]:
    """For another interpreter, a place to import this package from that holds nothing else.

    The package's own folder will not do: installed, it stands among this environment's packages, and its torch would
    hide the one that vLLM needs.
    """
    if python is None:
        return {}
    package = Path(dapo.__file__).parent
    cache = Path(os.environ.get("DAPO_CACHE") or Path.home() / ".cache" / "dapo")
    folder = cache / "import" / hashlib.sha256(str(package).encode()).hexdigest()[:16]
    link = folder / package.name
    if not link.is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder)) / package.name
        temporary.symlink_to(package, target_is_directory=True)
        os.replace(temporary, link)  # another process may be at it as well
        temporary.parent.rmdir()
    return {"PYTHONPATH": str(folder)}


def engine_specs(config: Config, *, cluster_gpus: float = 0.0) -> list[WorkerSpec]:
    """One for each of the `config.engine_processes`; `model.dtype` is settled.

    `cluster_gpus`: those that the launcher gives out. Without any the processes see this machine's, divided here.
    """
    threads = engine_threads(config, torch.get_num_threads())
    if config.rollout.engine == "vllm":
        from dapo.distributed.engine_specs import vllm_engine_spec

        spec = vllm_engine_spec(config, threads=threads)
        gpus_per_engine = config.rollout.vllm.tensor_parallel
    else:
        spec = native_engine_spec(config, threads=threads)
        gpus_per_engine = 1
    count = config.engine_processes
    if config.launcher != "local":
        gpus = config.distributed.gpus_per_process
        return [replace(spec, gpus=float(gpus_per_engine if cluster_gpus else 0) if gpus is None else gpus)] * count
    assignments = gpu_assignments(
        visible_gpus(), trainers=config.distributed.trainer_ranks, engines=count, gpus_per_engine=gpus_per_engine
    )
    return [
        replace(spec, environment={**spec.environment, "CUDA_VISIBLE_DEVICES": gpu_ids}) if gpu_ids else spec
        for gpu_ids in assignments
    ]


def native_engine_spec(config: Config, *, threads: int) -> WorkerSpec:
    """A native engine that loads the model by its name; the policy's weights come later."""
    return WorkerSpec(
        "dapo.distributed.engine_specs:native_engine",
        {
            "model": config.model.name,
            "dtype": config.model.dtype,
            "device": config.train.device,
            "trust_remote_code": config.model.trust_remote_code,
            "slots": config.rollout.native.slots,
            "cache_tokens": config.rollout.native.cache_tokens,
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
    threads: int,
) -> NativeEngine:
    """In the engine's process. Raises ConfigError and EngineError as loading and serving a model do."""
    torch.set_num_threads(threads)
    if device == "auto":  # of the machine that this process runs on, which need not be the controller's
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(model, dtype=getattr(torch, dtype), device=device, trust_remote_code=trust_remote_code)
    return NativeEngine(loaded.model, slots=slots, cache_tokens=cache_tokens)


def engine_threads(config: Config, available: int) -> int:
    """CPU threads of each engine: as asked, or an equal share of those that this process would use.

    Where the policy updates while the engines sample, its processes have a share as well.
    """
    if config.rollout.engine_threads is not None:
        return config.rollout.engine_threads
    updates_meanwhile = config.schedule == "one_step_off"
    num_processes = config.engine_processes + (config.distributed.trainer_ranks if updates_meanwhile else 0)
    return max(1, available // num_processes)


def gpu_assignments(visible: Sequence[str], *, trainers: int, engines: int, gpus_per_engine: int) -> list[str | None]:
    """For each engine the GPUs that it is to see; None where there is nothing to choose.

    Engines take the GPUs after the trainers' where there are enough for all; else they share all of them in turn.
    """
    if len(visible) < 2:
        return [None for _ in range(engines)]
    own = visible[trainers:] if len(visible) >= trainers + engines * gpus_per_engine else visible
    return [
        ",".join(own[(engine * gpus_per_engine + i) % len(own)] for i in range(gpus_per_engine))
        for engine in range(engines)
    ]


def visible_gpus() -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES would choose among this process's GPUs."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]
