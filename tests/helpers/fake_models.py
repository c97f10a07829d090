"""Models on fake CUDA tensors: tiny ones of six families, and the layers of a real one. Call inside `fake_cuda()`."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

TINY: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

WINDOW = 8

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen3": lambda: Qwen3Config(**TINY),
    "smollm3": lambda: SmolLM3Config(**TINY, no_rope_layer_interval=2),
    "gemma3": lambda: Gemma3TextConfig(
        **TINY, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    # two layers of 28
    "qwen2.5-1.5b": lambda: Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
}

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3")


def fake_model(
    name: str, *, dtype: torch.dtype = torch.bfloat16, num_layers: int | None = None, **options: Any
) -> PreTrainedModel:
    """A model of CONFIGS on the fake device; `options` replace fields of its configuration.

    Buffers (rotary frequencies) keep their own type, as when weights are read from files.
    """
    config = CONFIGS[name]()
    for key, value in (options | ({} if num_layers is None else {"num_hidden_layers": num_layers})).items():
        setattr(config, key, value)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:  # a tied weight is one tensor under two names
                empty = torch.empty(weight.shape, dtype=weight.dtype, device="cuda")
                module._parameters[key] = moved.setdefault(id(weight), torch.nn.Parameter(empty))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    return model
