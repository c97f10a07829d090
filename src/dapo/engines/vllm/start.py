"""Starts vLLM in a process of its own: the only file that imports it.

vLLM changes its process permanently (threads, process groups, generators, torch itself), so
`open_vllm_engine` runs in a worker, whose environment `dapo.distributed.vllm_spec` sets.
"""

import hashlib
import importlib
import os
import secrets
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dapo.core.errors import EngineError
from dapo.core.files import atomic_file, cache_folder
from dapo.core.interfaces import use_loopback_interface
from dapo.core.memory import explain_out_of_memory
from dapo.core.rng import keyed_seed
from dapo.core.terminal import print_text
from dapo.core.text import shorten
from dapo.engines.engine import WeightSource
from dapo.engines.vllm.engine import VllmEngine
from dapo.engines.vllm.package import INSTALL
from dapo.types import GenerationRequest

LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
CPU_CACHE_GIB = 2.0  # the value of `rollout.vllm.cache_gib: auto` on a CPU
# the fraction of a GPU's memory that its processes divide where `rollout.vllm.cache_gib` is `auto`
GPU_MEMORY = 0.9
_GIB = 2**30
# prefix caching shares whole blocks only: vLLM's default for CPUs, 128, is longer than most prompts
_CPU_BLOCK_TOKENS = 32
# on a CPU; a GPU has vLLM's own for its memory
_CPU_SEQUENCES = 256
# positions that a step computes at most: vLLM's default of 2048 lets prompts wait
_CPU_BATCH_TOKENS = 8192
# vLLM's own defaults of `max_num_seqs`, the higher one from this memory on (`get_batch_defaults`)
_GPU_SEQUENCES = (256, 1024)
_LARGE_GPU_BYTES = 70 * 2**30
_CAUSE_CHARS = 600


@dataclass(frozen=True)
class VllmOptions:
    """Everything that a vLLM engine needs to start, picklable."""

    model: str  # the name of the model, for messages
    model_config: str  # the text of the model's config.json. Weights come with `load_weights`.
    weight_shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all weights by their Hugging Face names, tied ones under each of them."""
    dtype: str
    cache_gib: float | None  # None: what the device has room for
    max_tokens: int  # the longest prompt and response together
    temperatures: tuple[float, float]  # the lowest and the highest besides 0
    tensor_parallel: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs."""
    # every request has a seed of its own, and a step ends before the next is scheduled
    reproducible: bool = True
    gpu_processes: float = 1  # processes that divide the memory of each GPU while this one samples
    trainer_bytes: float = 0  # memory of each GPU that trainer ranks keep meanwhile
    # how a trainer sends it weights from GPU to GPU; None: as files
    transfer: Literal["nccl", "ipc"] | None = None
    on_one_machine: bool = True  # whether trainer and engines are
    # whether it gives weights and cache back to the GPU while the policy updates
    sleeps: bool = False
    trust_remote_code: bool = False


@explain_out_of_memory(
    torch.OutOfMemoryError,
    "starting vLLM",
    "lower rollout.vllm.cache_gib, or raise rollout.vllm.tensor_parallel",
    then="start again",
)
def open_vllm_engine(options: VllmOptions) -> VllmEngine:
    """Start vLLM with random weights.

    Raises EngineError where it is missing, or refuses the model or the sizes.
    """
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override rollout.vllm.cache_gib
    if not torch.cuda.is_available():  # compilation and graphs pay on a GPU only
        # read when vLLM is imported, and by its worker processes
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    try:
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
    except ImportError as error:
        raise EngineError(
            "rollout.engine=vllm needs the Python package vllm, which cannot be imported here"
            f" ({error}); {INSTALL}"
        ) from None
    if current_platform.is_unspecified():
        raise EngineError(
            "rollout.engine=vllm: this vLLM is not built for any device that it finds here."
            " `nvidia-smi` shows whether there is a GPU; `dapo show docs machines` has the steps"
            " for a CPU"
        )
    listen_on_loopback(on_one_machine=options.on_one_machine)
    try:
        # processes of tensor_parallel connect through sockets in this folder, which no other user
        # may enter
        # in /tmp, because the path of a socket has at most about a hundred characters
        parent = "/tmp" if os.path.isdir("/tmp") else None
        with tempfile.TemporaryDirectory(prefix="dapo-vllm-", dir=parent) as folder:
            os.environ["VLLM_RPC_BASE_PATH"] = folder
            model = str(_model_folder(options.model_config))
            gpu_bytes = 0
            if torch.cuda.is_available():
                gpu_bytes = torch.cuda.get_device_properties(0).total_memory
            arguments = engine_arguments(
                options, model, on_cpu=current_platform.is_cpu(), gpu_bytes=gpu_bytes
            )
            # its defaults are for many requests at a time; those of other uses are small
            engine = LLMEngine.from_engine_args(
                EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS
            )
        if current_platform.is_cpu():
            _require_heads(engine.model_config.get_head_size(), options.model)
    except (EngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # vLLM raises errors of many kinds
        print_text(traceback.format_exc(), file=sys.stderr)
        cache_gib = "auto" if options.cache_gib is None else f"{options.cache_gib:g}"
        raise EngineError(
            f"vLLM does not start with model {options.model} (sequences of up to"
            f" {options.max_tokens} tokens, rollout.vllm.cache_gib={cache_gib},"
            f" {options.dtype}): {_cause(error)}"
        ) from None
    return VllmEngine(
        engine,
        sampling_params=lambda request: SamplingParams(
            **sampling_arguments(request, seeded=options.reproducible),
            # an output for each step and sequence would cost more than the GPU's step
            output_kind=RequestOutputKind.FINAL_ONLY,
        ),
        weight_shapes=options.weight_shapes,
        temperatures=options.temperatures,
        sleeps=arguments["enable_sleep_mode"],
    )


def _model_folder(model_config: str) -> Path:
    """Return a folder with this config.json, always the same: vLLM caches compiled code by path."""
    folder = cache_folder() / "vllm" / hashlib.sha256(model_config.encode()).hexdigest()[:16]
    # engines that start at the same time write the same
    with atomic_file(folder / "config.json") as path:
        path.write_text(model_config, encoding="utf-8")
    return folder


def listen_on_loopback(*, on_one_machine: bool = True) -> None:
    """Make torch's store, which checks no secret, listen on the loopback address only."""
    libraries = ("GLOO", "NCCL") if on_one_machine else ("GLOO",)
    use_loopback_interface(*libraries)
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous.TCPStore

    def store(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *positional: Any,
        **options: Any,
    ) -> Any:
        if is_master and host_name in LOOPBACK_HOSTS:
            with socket.create_server((host_name, port)) as listener:
                options["master_listen_fd"] = listener.detach()
        return original(host_name, port, world_size, is_master, *positional, **options)

    rendezvous.TCPStore = store


def engine_arguments(
    options: VllmOptions, folder: str, *, on_cpu: bool, gpu_bytes: float = 0
) -> Mapping[str, Any]:
    """Return arguments of `vllm.EngineArgs`.

    Log-probabilities are those of the distribution that tokens are sampled from.

    Args:
        options: the options of the engine.
        folder: the folder with the model's config.json.
        on_cpu: whether this vLLM runs on a CPU.
        gpu_bytes: the memory of a GPU.
    """
    arguments: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": options.trust_remote_code,
        "dtype": options.dtype,
        "generation_config": "vllm",  # sampling parameters come from requests only
        "logprobs_mode": "processed_logprobs",
        "max_model_len": options.max_tokens,
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu,
        "tensor_parallel_size": options.tensor_parallel,
        # in a Ray actor vLLM would choose "ray", which refuses an actor with several GPUs
        "distributed_executor_backend": "mp" if options.tensor_parallel > 1 else "uni",
        # None: vLLM's own choice. It schedules a step before it knows the tokens of the one before
        "async_scheduling": False if options.reproducible else None,
        "worker_extension_cls": f"{WeightReader.__module__}.{WeightReader.__qualname__}",
        "enable_sleep_mode": options.sleeps and not on_cpu,
        # a dict, for vLLM's own class
        "weight_transfer_config": (
            None if on_cpu or not options.transfer else {"backend": options.transfer}
        ),
        "disable_log_stats": True,
        # requests without seeds of their own draw from the engine's: engines of one run must not
        # draw the same
        "seed": 0 if options.reproducible else secrets.randbits(32),
    }
    if options.cache_gib is None and not on_cpu:
        trainer_share = 0.0
        if options.trainer_bytes:
            trainer_share = options.trainer_bytes / gpu_bytes
        if trainer_share >= GPU_MEMORY:
            raise EngineError(
                f"trainer ranks keep {options.trainer_bytes / _GIB:.1f} GiB of a GPU of"
                f" {gpu_bytes / _GIB:.1f} GiB, which leaves vLLM nothing; raise"
                " distributed.trainer_ranks where there are more GPUs, or train adapters"
                " (model.lora)"
            )
        arguments["gpu_memory_utilization"] = (GPU_MEMORY - trainer_share) / options.gpu_processes
    else:
        arguments["kv_cache_memory_bytes"] = int((options.cache_gib or CPU_CACHE_GIB) * _GIB)
        # unused with a fixed cache, but vLLM requires this much free memory
        arguments["gpu_memory_utilization"] = 0.01
    if on_cpu:
        if options.arguments.get("enable_chunked_prefill"):
            raise EngineError(
                "rollout.vllm.options.enable_chunked_prefill=true: on a CPU a request with a seed"
                " ends vLLM where a prompt is computed in parts; leave it out"
            )
        sequences = options.arguments.get("max_num_seqs", _CPU_SEQUENCES)
        arguments |= {
            "block_size": _CPU_BLOCK_TOKENS,
            "enable_chunked_prefill": False,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": max(options.max_tokens, sequences, _CPU_BATCH_TOKENS),
        }
    return arguments | dict(options.arguments)


def default_slots() -> int:
    """Return vLLM's default number of sequences that an engine decodes on this machine's device.

    The engine itself has vLLM's own value; this one is for the controller, which imports no vLLM.
    """
    if not torch.cuda.is_available():
        return _CPU_SEQUENCES
    device = torch.cuda.get_device_properties(0)
    is_large = device.total_memory >= _LARGE_GPU_BYTES and "a100" not in device.name.lower()
    return _GPU_SEQUENCES[int(is_large)]


def sampling_arguments(request: GenerationRequest, *, seeded: bool) -> Mapping[str, Any]:
    """Return arguments of `vllm.SamplingParams`; without `seeded` the request's seed is not used.

    A CPU samples requests with seeds in a loop, a GPU all together. vLLM's generator cannot start
    at a later token, so a continued response gets another seed.
    """
    seed = request.seed
    if request.offset:
        seed = keyed_seed(request.seed, "offset", request.offset)
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": seed if seeded else None,
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_new_tokens,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,  # only of the sampled token
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
    }


class WeightReader:
    """Extension of vLLM's worker class, through which each worker reads the weights."""

    model_runner: Any

    def dapo_load_weights(self, weights: WeightSource) -> list[str]:
        """Replace all weights in place; return vLLM's names of those that were not set."""
        model = self.model_runner.get_model()
        left_out = {name for name, _ in model.named_parameters()}
        load = model.load_weights

        def load_and_record(pairs: Any) -> Any:
            loaded = load(pairs)
            left_out.difference_update(left_out if loaded is None else loaded)
            return loaded

        model.load_weights = load_and_record
        try:
            self.reload_weights(weights_iterator=iter(weights.named_tensors()))  # type: ignore[attr-defined]
        finally:
            del model.load_weights
        return sorted(left_out)


def _require_heads(width: int, model: str) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    served = CPUAttentionBackend.get_supported_head_sizes()
    if width not in served:
        sizes = f"vLLM on a CPU takes {', '.join(map(str, served))}"
        raise EngineError(
            f"model {model} has attention heads of {width}; {sizes}; use rollout.engine=native"
        )


def _cause(error: Exception) -> str:
    """Return the message of an error of vLLM on one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line)
    return shorten(text or type(error).__name__, _CAUSE_CHARS)
