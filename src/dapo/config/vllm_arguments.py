"""The arguments of vLLM's EngineArgs that `rollout.vllm.options` cannot have, and what to set."""

from collections.abc import Mapping

_MODEL = "the model and its weights are those that train: set model.name"
_LENGTH = "set data.max_prompt_tokens and rollout.max_response_tokens"
_ADAPTERS = "adapters are merged into the weights that an engine gets: set model.lora"
_PLACE = (
    "the launcher places engines: set rollout.engines, rollout.vllm.tensor_parallel or launcher"
)
_SAMPLER = (
    "the log-probabilities that train must be those of the model at rollout.temperature, from which"
    " tokens are sampled: leave it out"
)
_WEIGHTS = "it belongs to the way in which the trainer's weights reach an engine: leave it out"
_STALE_CACHE = "keys and values must not outlive the weights that computed them: leave it out"

REFUSED: Mapping[str, str] = {
    "model": _MODEL,
    "model_weights": _MODEL,
    "served_model_name": _MODEL,
    "hf_config_path": _MODEL,
    "hf_overrides": _MODEL,
    "model_class_overrides": _MODEL,
    "revision": _MODEL,
    "code_revision": _MODEL,
    "tokenizer": _MODEL,
    "tokenizer_revision": _MODEL,
    "skip_tokenizer_init": _MODEL,
    "runner": _MODEL,
    "convert": _MODEL,
    "trust_remote_code": "set model.trust_remote_code",
    "hf_token": "set the environment variable HF_TOKEN",
    "dtype": "set model.dtype",
    "seed": "each request has its own, from the run's: set train.seed",
    "max_model_len": _LENGTH,
    "gpu_memory_utilization": "set rollout.vllm.cache_gib",
    "kv_cache_memory_bytes": "set rollout.vllm.cache_gib",
    "num_gpu_blocks_override": "set rollout.vllm.cache_gib",
    "tensor_parallel_size": "set rollout.vllm.tensor_parallel",
    "pipeline_parallel_size": "set rollout.vllm.tensor_parallel",
    "data_parallel_size": "set rollout.engines",
    "data_parallel_size_local": "set rollout.engines",
    "data_parallel_backend": "set rollout.engines",
    "distributed_executor_backend": _PLACE,
    "device_ids": _PLACE,
    "nnodes": _PLACE,
    "node_rank": _PLACE,
    "master_addr": _PLACE,
    "master_port": _PLACE,
    "async_scheduling": "set rollout.clock: load schedules steps ahead, history does not",
    "enable_lora": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "logprobs_mode": _SAMPLER,
    "logits_processors": _SAMPLER,
    "generation_config": _SAMPLER,
    "override_generation_config": _SAMPLER,
    "watermark_config": _SAMPLER,
    "load_format": _WEIGHTS,
    "model_loader_extra_config": _WEIGHTS,
    "worker_cls": _WEIGHTS,
    "worker_extension_cls": _WEIGHTS,
    "weight_transfer_config": _WEIGHTS,
    "enable_sleep_mode": _WEIGHTS,
    "sleep_preserve_parameter_names": _WEIGHTS,
    "kv_transfer_config": _STALE_CACHE,
    "ec_transfer_config": _STALE_CACHE,
    "kv_offloading_size": _STALE_CACHE,
    "kv_offloading_backend": _STALE_CACHE,
}
"""Arguments that other options set or that would make log-probabilities wrong, with advice."""


def checked_arguments(arguments: dict[str, object]) -> dict[str, object]:
    """Return the value of `rollout.vllm.options`. Raises ValueError for an argument in `REFUSED`."""
    for name in arguments:
        advice = REFUSED.get(name)
        if advice is not None:
            raise ValueError(f"rollout.vllm.options.{name} cannot be set; {advice}")
    return arguments
