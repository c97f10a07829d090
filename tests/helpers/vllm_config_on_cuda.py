"""A program that makes vLLM's configuration as on a node of four GPUs, with the wheel for CPUs, and
prints it.

Usage: `python -m helpers.vllm_config_on_cuda FOLDER ARGUMENTS`, with the arguments of
`vllm.EngineArgs` as JSON.
"""

import json
import sys
from types import ModuleType
from typing import Any


def pretend_to_have_gpus() -> None:
    """Replace what vLLM asks the driver: the platform, and the devices' number, kind and memory."""
    from vllm import platforms

    # kernels of the wheel for CUDA
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FourGpus(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * 2**30

        @classmethod
        def device_count(cls) -> int:
            return 4

        def is_cumem_allocator_available(self) -> bool:
            return True

    platforms._current_platform = FourGpus()


def main(folder: str, arguments: str) -> None:
    pretend_to_have_gpus()
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    made = EngineArgs(**json.loads(arguments) | {"model": folder}).create_engine_config(
        UsageContext.LLM_CLASS
    )
    found = {
        "executor": made.parallel_config.distributed_executor_backend,
        "tensor_parallel": made.parallel_config.tensor_parallel_size,
        "uses_ray": made.parallel_config.use_ray,
        "max_num_seqs": made.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": made.scheduler_config.max_num_batched_tokens,
        "async_scheduling": made.scheduler_config.async_scheduling,
        "max_model_len": made.model_config.max_model_len,
        "dtype": str(made.model_config.dtype),
        "eager": made.model_config.enforce_eager,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "seed": made.model_config.seed,
        "cache_bytes": made.cache_config.kv_cache_memory_bytes,
        "transfer": made.weight_transfer_config and made.weight_transfer_config.backend,
        "sleeps": made.model_config.enable_sleep_mode,
        "memory": made.cache_config.gpu_memory_utilization,
        "prefix_caching": made.cache_config.enable_prefix_caching,
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
