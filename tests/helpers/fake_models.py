"""Models on fake CUDA tensors: tiny ones of six families, and the layers of a real one.

Call inside `fake_cuda()`.
"""

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

QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 2,  # of 28
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
"""Qwen2.5-1.5B."""

CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, TINY),
    "mistral": (MistralConfig, TINY | {"sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, TINY),
    "qwen3": (Qwen3Config, TINY),
    "smollm3": (SmolLM3Config, TINY | {"no_rope_layer_interval": 2}),
    "gemma3": (Gemma3TextConfig, TINY | {"sliding_window": WINDOW}),
    "qwen2.5-1.5b": (Qwen2Config, QWEN),
}

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3")


def fake_model(
    name: str, *, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> PreTrainedModel:
    """A model of CONFIGS on the fake device; `options` replace fields of its configuration.

    Buffers (rotary frequencies) keep their own type, as when weights are read from files.
    """
    kind, fields = CONFIGS[name]
    fields = fields | options
    if name == "gemma3":
        fields["layer_types"] = ["sliding_attention", "full_attention"] * (
            fields["num_hidden_layers"] // 2
        )
    config = kind(**fields)
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
