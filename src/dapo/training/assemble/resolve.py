"""Resolves `auto`: the options that depend on this machine, this model and this data."""

import pkgutil
from collections.abc import Callable

import torch
from torch import nn

from dapo.config import Config
from dapo.config.load import resolve_auto_verifier
from dapo.core.processor import vector_extensions
from dapo.distributed.engine_specs import processes_per_gpu
from dapo.policy.memory_model import GIB, FreeMemory, resolve_microbatches
from dapo.policy.model import device_of
from dapo.policy.model_dimensions import find_dimensions

ASSUMED_GIB = 80.0  # memory of a GPU that is not visible from here: an H100's or an A100's


def resolve_auto(
    config: Config, *, cuda: bool | None = None, training: bool = True, log: Callable[[str], None] = lambda text: None
) -> Config:
    """Replace `auto` by its value on this machine, for this model and this data.

    On Ray the device stays `auto`: each process resolves it on its own machine.

    `cuda` tells whether there is a GPU, maybe on another machine; None: whether this machine has one. With `training`
    the options that only an update needs are resolved, too (`train.microbatch_tokens` and `train.recompute`): `log`
    gets a line with the reason, and ConfigError is raised if an update does not fit on the GPU.
    """
    cuda = torch.cuda.is_available() if cuda is None else cuda
    device = config.train.device if config.train.device != "auto" else "cuda" if cuda else "cpu"
    if not config.uses_ray:
        config = config.changed("train", device=device)
    if config.model.dtype == "auto":
        config = config.changed("model", dtype="bfloat16" if multiplies_bfloat16_fast(device) else "float32")
    config = resolve_auto_verifier(config)
    if training:
        gpu = trainer_gpu(config, device)
        dimensions = None
        if gpu is not None and None in (config.train.microbatch_tokens, config.train.recompute):
            # the run needs the model's files soon, so a missing config.json may be downloaded
            dimensions = find_dimensions(config.model) or find_dimensions(config.model, local_files_only=False)
        config, reason = resolve_microbatches(config, dimensions, gpu)
        if reason is not None:
            log(reason)
    return config


def resolve_engine(config: Config, model: nn.Module) -> Config:
    """Resolve `auto` in the engine's own section, for a model whose weights may be on `meta`."""
    rollout, resolve = config.rollout, config.rollout.engine_kind.resolve
    if resolve is None:
        return config
    on_gpu = config.train.device == "cuda" or (config.train.device == "auto" and torch.cuda.is_available())
    dtype, device = getattr(torch, config.model.dtype), "cuda" if on_gpu else "cpu"
    options = pkgutil.resolve_name(resolve)(rollout.engine_options, model, dtype=dtype, device=device)
    return config.changed("rollout", **{rollout.engine: options})


def trainer_gpu(config: Config, device: str) -> FreeMemory | None:
    """Return the memory of the GPU that a process trains on; None if processes train on a CPU.

    Processes that share a GPU get equal parts of it. If the controller sees no GPU of the cluster, ASSUMED_GIB holds.
    """
    if not torch.cuda.is_available():
        is_elsewhere = device == "cuda" or (config.ray_address is not None and config.train.device == "auto")
        return FreeMemory(ASSUMED_GIB * GIB, "assumed: this machine has no GPU") if is_elsewhere else None
    if device == "cpu":
        return None
    sharing = processes_per_gpu(config, torch.cuda.device_count())
    name = torch.cuda.get_device_name() + (f", which {sharing:g} processes share" if sharing > 1 else "")
    capacity = torch.cuda.get_device_properties(0).total_memory / sharing
    if config.uses_trainer_group:  # its free memory is not queried: that would take memory from the rank
        return FreeMemory(capacity, f"of {name}")
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return FreeMemory(min(free, capacity), f"free on {name}")


def multiplies_bfloat16_fast(device: str) -> bool:
    """Whether the processor has bfloat16 instructions; without them it is several times slower than float32."""
    # where the system does not report the flags, torch does since 2.12
    flags = vector_extensions() or [name for name, has in getattr(torch.cpu, "get_capabilities", dict)().items() if has]
    return device == "cuda" or not {"avx512_bf16", "amx_bf16", "bf16", "arm_bf16"}.isdisjoint(flags)


def require_hardware(config: Config) -> None:
    """Raise ConfigError if this machine lacks the GPU of the configuration, or a requirement of its engine."""
    if not config.uses_ray:
        device_of(config.train.device)
    if (require := config.rollout.engine_kind.require) is not None:
        pkgutil.resolve_name(require)(config)
