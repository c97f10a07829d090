"""The worker spec of a vLLM engine: its options and the environment it starts in."""

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

import dapo
from dapo.config import Config, GpuShares
from dapo.core.errors import ConfigError
from dapo.core.files import cache_folder
from dapo.core.secrets import HUB_VARIABLES
from dapo.distributed.protocol import WorkerSpec
from dapo.engines.vllm.package import interpreter, require_vllm_package
from dapo.engines.vllm.start import VllmOptions
from dapo.policy.hf_io import config_of
from dapo.policy.memory_model import ResponseLengths, TrainerMemory
from dapo.policy.model import load_meta_model
from dapo.policy.model_dimensions import find_dimensions


def vllm_engine_spec(config: Config, *, threads: int, shares: GpuShares) -> WorkerSpec:
    """Return the spec of a vLLM engine for the model; the policy's weights are loaded later.

    The processes of `rollout.vllm.tensor_parallel` divide the threads. Raises ConfigError for a
    model with tensors other than weights, and for a missing interpreter.
    """
    vllm = config.rollout.vllm
    options = vllm_options(config)
    options = replace(
        options, gpu_processes=shares.processes, sleeps=shares.alternates, transfer=shares.transfer
    )
    options = replace(options, on_one_machine=config.ray_address is None)
    if shares.alternates:
        dimensions = find_dimensions(config.model)
        if dimensions is not None:
            memory = TrainerMemory(config, dimensions, ResponseLengths.expected(config))
            options = replace(
                options,
                gpu_processes=shares.engines,
                trainer_bytes=shares.trainers * memory.kept_bytes(),
            )
    return WorkerSpec(
        "dapo.engines.vllm.start:open_vllm_engine",
        {"options": options},
        environment=vllm_environment(threads=max(1, threads // vllm.tensor_parallel))
        | _import_path(vllm.python),
        secrets=HUB_VARIABLES if config.model.trust_remote_code else (),
        python=None if vllm.python is None else interpreter(vllm.python),
        cpus=threads,
    )


def require_vllm(config: Config) -> None:
    """Raise ConfigError if vLLM is not installed or `vllm_engine_spec` would raise it."""
    require_vllm_package(config)
    gpus = torch.cuda.device_count()
    vllm = config.rollout.vllm
    if vllm.cache_gib is None and (gpus or config.uses_ray):
        count = config.gpu_shares(gpus).engines
        if count > 1:
            raise ConfigError(
                "rollout.vllm.cache_gib=auto needs a GPU for each engine, but here"
                f" {count:g} engines share one; set rollout.vllm.cache_gib=NUMBER, or lower"
                " rollout.engines to one per GPU"
            )
    vllm_options(config)


def vllm_options(config: Config) -> VllmOptions:
    """Return the engine's options, from the model's configuration; no weights are loaded."""
    model = config.model
    rollout = config.rollout
    meta_model = load_meta_model(model.name, trust_remote_code=model.trust_remote_code)
    response_tokens = max(rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    tokens = config.data.max_prompt_tokens + response_tokens + config.max_observed_tokens
    return VllmOptions(
        model=model.name,
        model_config=config_of(meta_model).to_json_string(use_diff=False),
        weight_shapes=weight_shapes(meta_model),
        dtype="float32" if model.dtype == "float64" else model.dtype,  # vLLM has nothing wider
        max_tokens=min(
            tokens, getattr(meta_model.config, "max_position_embeddings", None) or tokens
        ),
        reproducible=rollout.is_reproducible,
        trust_remote_code=model.trust_remote_code,
        temperatures=rollout.engine_kind.temperatures,
        cache_gib=rollout.vllm.cache_gib,
        tensor_parallel=rollout.vllm.tensor_parallel,
        arguments=rollout.vllm.options,
    )


def weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Shapes by name, tied weights under each of their names.

    Raises ConfigError if the model has other tensors.
    """
    shapes = {
        name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)
    }
    if buffers := sorted(model.state_dict().keys() - shapes):
        raise ConfigError(
            f"rollout.engine=vllm cannot serve a {type(model).__name__}: it holds {len(buffers)}"
            f" tensors other than weights, which engines do not get ({buffers[0]} first); use"
            " rollout.engine=native"
        )
    return shapes


def vllm_environment(*, threads: int) -> dict[str, str]:
    """Variables that vLLM reads when it is imported."""
    return {
        # the process that answers calls also steps the engine
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise it binds every core
        "VLLM_HOST_IP": "127.0.0.1",  # no access from other machines
        # the processes of tensor_parallel; a fork cannot use CUDA
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        # at INFO it logs every weight update
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "OMP_NUM_THREADS": str(threads),
    }


def _import_path(python: str | None) -> dict[str, str]:
    """Return the path of this package alone: this environment's torch would hide vLLM's."""
    if python is None:
        return {}
    package = Path(dapo.__file__).parent
    folder = cache_folder() / "import" / hashlib.sha256(str(package).encode()).hexdigest()[:16]
    link = folder / package.name
    folder.mkdir(parents=True, exist_ok=True)
    # its name has the package's path, so that it points there already
    with suppress(FileExistsError):
        link.symlink_to(package, target_is_directory=True)
    return {"PYTHONPATH": str(folder)}
