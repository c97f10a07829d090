"""The second step of a start: `auto` becomes its value on this machine, for this model and data."""

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from dapo.config import Config
from dapo.config.load import resolve_auto_verifier
from dapo.config.run_options import START_TIMEOUT_S
from dapo.core.errors import ConfigError
from dapo.core.memory import GIB
from dapo.core.processor import BFLOAT16_CAPABILITY, cpu_model, vector_extensions
from dapo.distributed.launch import gpus_per_worker
from dapo.distributed.protocol import WorkerSpec
from dapo.engines.vllm.package import TESTED
from dapo.engines.vllm.version import installed_version, untested_version, vllm_version
from dapo.policy.memory_model import (
    FreeMemory,
    ResponseLengths,
    TrainerMemory,
    resolve_microbatches,
    trainer_bytes,
)
from dapo.policy.model import device_of
from dapo.policy.model_dimensions import ModelDimensions, find_dimensions
from dapo.start.check import Checked, UserCode
from dapo.start.engine_choice import choose_engine
from dapo.start.idle_gpus import idle_gpus


@dataclass(frozen=True)
class ComputeDevice:
    """The device of a trainer process, on the machine where it computes."""

    type: str  # cuda or cpu
    name: str
    # in hardware; without it bfloat16 is several times slower than float32
    multiplies_bfloat16: bool
    memory: float = 0.0  # bytes of a GPU
    vllm: str | None = None  # the version of vLLM in the process's environment

    @classmethod
    def of_this_process(cls, device: str) -> "ComputeDevice":
        """Return the device of `train.device` here: of several GPUs the least capable."""
        if device_of(device) == "cpu":
            return cls("cpu", cpu_model(), _has_bfloat16_instructions(), vllm=installed_version())
        capability, index = min(
            (torch.cuda.get_device_capability(i), i) for i in range(torch.cuda.device_count())
        )
        gpu = torch.cuda.get_device_properties(index)
        name = f"{gpu.name}, compute capability {capability[0]}.{capability[1]}"
        return cls(
            "cuda",
            name,
            capability >= BFLOAT16_CAPABILITY,
            gpu.total_memory,
            vllm=installed_version(),
        )

    def report(self) -> "ComputeDevice":
        """Return itself: the answer of a process that was started to describe its device."""
        return self


ASSUMED_GPU = ComputeDevice(
    "cuda", "assumed: this machine has no GPU", True, memory=80.0 * GIB, vllm=TESTED
)


@dataclass(frozen=True)
class Resolved:
    """Options for this machine, without `auto` but in the engine's section, and the user's code."""

    config: Config
    code: UserCode
    training: bool
    notes: Sequence[str]


def resolve(checked: Checked, *, training: bool = True) -> Resolved:
    """Replace `auto` by its value on this machine. Raises ConfigError if it lacks hardware."""
    notes = list(checked.notes)
    require_hardware(checked.config, training=training)
    if not training:
        return Resolved(resolve_sampling(checked.config), checked.code, training, [])
    config = resolve_auto(checked.config, log=notes.append)
    return Resolved(config, checked.code, training, [*notes, *machine_notes(config)])


def resolve_sampling(config: Config) -> Config:
    """Replace `auto` for an evaluation on this machine, whose engines have it for themselves."""
    return resolve_auto(config.without_trainer(torch.cuda.device_count()), training=False)


def require_hardware(config: Config, *, training: bool = True) -> None:
    """Raise ConfigError if this machine lacks GPUs, or a requirement of the engine."""
    ranks = config.distributed.trainer_ranks if training else 1
    gpus = torch.cuda.device_count()
    if not config.uses_ray and device_of(config.train.device) == "cuda" and ranks > gpus:
        raise ConfigError(
            f"distributed.trainer_ranks={ranks}: expected at most {gpus}, the number of GPUs here,"
            f" because NCCL takes one rank per GPU; set distributed.trainer_ranks={gpus}, or"
            " launcher=ray:HOST:PORT for a cluster with more"
        )
    wanted = config.gpus_per_engine
    if not config.uses_ray and device_of(config.train.device) == "cuda" and wanted > gpus:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel={wanted}: expected at most {gpus}, the number of GPUs"
            f" here; set rollout.vllm.tensor_parallel={gpus}"
        )
    if (require := config.rollout.engine_kind.require) is not None:
        pkgutil.resolve_name(require)(config)


def resolve_auto(
    config: Config,
    *,
    cuda: bool | None = None,
    training: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> Config:
    """Replace `auto` by its value on this machine, for this model and this data.

    On Ray the device stays `auto`: each process resolves it on its own machine.

    With `launcher: ray:ADDRESS` a process of the cluster describes the device. `cuda` replaces
    that: it tells whether to assume a GPU. With `training` the options that only an update needs
    are resolved, too (`train.microbatch_tokens` and `train.recompute`). `log` gets a line per
    choice that needs a reason; ConfigError is raised if an update does not fit on the GPU.
    """
    if config.rollout.engine == "auto" and config.train.device == "cpu":
        config = config.changed("rollout", engine="native")
    has_sizes = not training or None not in (config.train.microbatch_tokens, config.train.recompute)
    chooses_order = config.rollout.engine == "vllm" and config.rollout.clock is None
    is_open = (
        config.model.dtype == "auto"
        or config.rollout.engine == "auto"
        or not has_sizes
        or (config.train.device == "auto" and not config.uses_ray)
    )
    if not (is_open or chooses_order):
        # nothing else depends on the device, which may be elsewhere
        config = resolve_auto_verifier(config)
        is_known = config.train.device != "auto"
        return _with_slots(config, config.train.device) if is_known else config
    device = _compute_device(config, cuda)
    if not config.uses_ray:
        config = config.changed("train", device=device.type)
    config = _with_dtype(config, device, log)
    config = _with_engine(config, device, log, training=training)
    config = resolve_auto_verifier(config)
    if not has_sizes:
        dimensions = None
        if device.type == "cuda":
            # the run needs the model's files soon, so a missing config.json may be downloaded
            dimensions = find_dimensions(config.model) or find_dimensions(
                config.model, local_files_only=False
            )
        gpu = trainer_gpu(config, device, dimensions)
        config, reason = resolve_microbatches(config, dimensions, gpu)
        if reason is not None:
            log(reason)
    return config


def _with_dtype(config: Config, device: ComputeDevice, log: Callable[[str], None]) -> Config:
    """Resolve `model.dtype`."""
    if config.model.dtype != "auto":
        return config
    if device.type == "cuda" and not device.multiplies_bfloat16:
        log(
            f"auto: model.dtype=float32: the GPU ({device.name}) has no bfloat16 units, which"
            " need compute capability 8.0"
        )
    return config.changed("model", dtype="bfloat16" if device.multiplies_bfloat16 else "float32")


def _with_engine(
    config: Config, device: ComputeDevice, log: Callable[[str], None], *, training: bool
) -> Config:
    """Resolve `rollout.engine`, and of the engine `rollout.native.slots` or `rollout.clock`."""
    if config.rollout.engine == "auto" and device.type == "cpu":
        config = config.changed("rollout", engine="native")
    elif config.rollout.engine == "auto":
        dimensions = find_dimensions(config.model)
        choice = choose_engine(
            config,
            has_vllm=device.vllm is not None or config.rollout.vllm.python is not None,
            parameters=None if dimensions is None else dimensions.parameters,
            training=training,
            is_here=device is not ASSUMED_GPU and not config.uses_ray,
        )
        config = config.changed("rollout", engine=choice.engine)
        log(choice.reason)
    config = _with_slots(config, device.type)
    if config.rollout.engine != "vllm" or config.rollout.clock is not None:
        return config
    if device.type == "cuda":
        log(
            "auto: rollout.clock=load: runs on a GPU are not equal, and vLLM schedules the next"
            " step ahead"
        )
    return config.changed("rollout", clock="history" if device.type == "cpu" else "load")


def _with_slots(config: Config, device_type: str) -> Config:
    """Resolve `rollout.native.slots`."""
    if config.rollout.engine != "native":
        return config
    native = config.rollout.native
    slots = native.slots_on(device_type)
    return config.changed("rollout", native=native.model_copy(update={"slots": slots}))


def machine_notes(config: Config) -> list[str]:
    """Return lines on what of this machine a run leaves idle, and on an untested engine."""
    notes = []
    if config.train.device == "cuda" and not config.uses_ray:
        notes += idle_gpus(config, torch.cuda.device_count())
    if config.rollout.engine == "vllm" and not config.uses_ray:
        version = untested_version(vllm_version(config))
        notes += [] if version is None else [version]
    return notes


def _compute_device(config: Config, cuda: bool | None) -> ComputeDevice:
    """Return the device that options are resolved for."""
    device = config.train.device
    if cuda is not None and device == "auto":
        device = "cuda" if cuda else "cpu"
    if device == "cuda" and cuda is not None and not torch.cuda.is_available():
        return ASSUMED_GPU
    if cuda is not None or config.ray_address is None:
        return ComputeDevice.of_this_process(device)
    from dapo.distributed.ray.launcher import RayLauncher

    with (
        TemporaryDirectory(prefix="dapo-logs-") as logs,
        closing(
            RayLauncher(Path(logs), timeout_s=START_TIMEOUT_S, address=config.ray_address)
        ) as launcher,
    ):
        factory = f"{__name__}:ComputeDevice.of_this_process"
        spec = WorkerSpec(
            factory,
            {"device": device},
            gpus=gpus_per_worker(config, launcher.nodes, default=device != "cpu"),
        )
        (worker,) = launcher.start(["device"], [spec])
        reported: ComputeDevice = worker.call("report").result(START_TIMEOUT_S)
        return reported


def resolve_engine(config: Config, model: nn.Module) -> Config:
    """Resolve `auto` in the engine's own section, for a model whose weights may be on `meta`."""
    rollout = config.rollout
    resolve = config.rollout.engine_kind.resolve
    if resolve is None:
        return config
    on_gpu = config.train.device == "cuda" or (
        config.train.device == "auto" and torch.cuda.is_available()
    )
    dtype = getattr(torch, config.model.dtype)
    device = "cuda" if on_gpu else "cpu"
    options = pkgutil.resolve_name(resolve)(
        rollout.engine_options, model, dtype=dtype, device=device
    )
    return config.changed("rollout", **{rollout.engine: options})


def trainer_gpu(
    config: Config, device: ComputeDevice, dimensions: ModelDimensions | None = None
) -> FreeMemory | None:
    """Return the memory of the GPU that a process trains on, its own or shared; None on a CPU."""
    if device.type == "cpu":
        return None
    shares = config.gpu_shares(torch.cuda.device_count())
    shared = (
        f", which {shares.processes:g} processes {'use in turn' if shares.alternates else 'share'}"
    )
    name = device.name + (shared if shares.is_shared else "")
    if dimensions is None:
        memory = None
    else:
        memory = TrainerMemory(config, dimensions, ResponseLengths.expected(config))
    capacity = trainer_bytes(shares, device.memory, memory)
    # the memory of a rank's GPU is not queried here: that would take some of it
    if config.uses_trainer_group or config.uses_ray or not torch.cuda.is_available():
        return FreeMemory(capacity, f"of {name}")
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return FreeMemory(min(free, capacity), f"free on {name}")


def _has_bfloat16_instructions() -> bool:
    """Return True if this machine's processor multiplies bfloat16."""
    # where the system does not report the flags, torch does since 2.12
    flags = vector_extensions() or [
        name for name, has in getattr(torch.cpu, "get_capabilities", dict)().items() if has
    ]
    return not {"avx512_bf16", "amx_bf16", "bf16", "arm_bf16"}.isdisjoint(flags)


def device_for_inputs(config: Config, *, training: bool) -> str:
    """Return the device for the controller's copy of the weights; on `meta` they take no memory.

    With engines in separate processes the controller samples nothing: in an evaluation it only
    sends the weights, and in training the policy may be elsewhere too.
    """
    if not config.engine_processes:
        return device_of(config.train.device)
    if not training:
        return "cpu"
    return "meta" if config.uses_trainer_group else device_of(config.train.device)
