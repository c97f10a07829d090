"""The sizes of a model, from its configuration on the meta device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dapo.config import ModelConfig
from dapo.core.errors import ConfigError
from dapo.policy.lora import adapted_layers
from dapo.policy.model import load_meta_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text")
"""Values of `model_type` whose memory is modelled."""
_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)
PUBLISHED: Mapping[str, tuple[Any, ...]] = {
    "smollm2-135m-instruct": ("llama", 576, 1536, 30, 9, 3, 49152, True, 8192),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 131072),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False, 131072),
}
"""The sizes in the config.json of shipped configurations' models, to check them offline."""


@dataclass(frozen=True)
class ModelDimensions:
    """The sizes of a Llama-like decoder: grouped heads, a gated feed-forward layer, RMSNorm."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # whether the head is the embedding
    parameters: int  # the number of parameters, tied ones counted once
    layer_parameters: int  # the number of parameters of one layer
    # the number of parameters of embedding and head, tied ones counted once
    embedding_parameters: int
    linears: int  # the number of linear layers with LoRA adapters
    linear_widths: int  # the sum of inputs and outputs of those linear layers
    qk_norm: bool  # whether queries and keys are normalised per head (Qwen3, Gemma 3)
    # whether norms also follow attention and feed-forward layer, and scale in float32 (Gemma 3)
    gemma_norms: bool
    max_positions: int | None

    def cache_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def lora_parameters(self, rank: int) -> int:
        """Return the number of adapter parameters: `rank` times all inputs and outputs."""
        return rank * self.linear_widths


def find_dimensions(model: ModelConfig, *, local_files_only: bool = True) -> ModelDimensions | None:
    """Return the sizes of a model by alias, directory or Hugging Face id, from its config.json.

    Returns None if there is no configuration, or if its family is not in FAMILIES. Unless
    `local_files_only`, a missing config.json is downloaded.
    """
    if model.name in PUBLISHED:
        return dimensions_from_sizes(*PUBLISHED[model.name])
    try:
        meta = load_meta_model(
            model.name, trust_remote_code=model.trust_remote_code, local_files_only=local_files_only
        )
    except ConfigError:
        return None
    return dimensions_of(meta)


def dimensions_from_sizes(*sizes: Any, **fields: Any) -> ModelDimensions | None:
    """Return a model's sizes from the values of _FIELDS and further fields of its config.json."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**dict(zip(_FIELDS, sizes, strict=True)), **fields)
        return dimensions_of(AutoModelForCausalLM.from_config(config))


def dimensions_of(model: PreTrainedModel) -> ModelDimensions | None:
    """Return the sizes of a model; None if its family is not in FAMILIES."""
    if model.config.model_type not in FAMILIES:
        return None
    decoder: Any = model.base_model
    config = decoder.config
    layer = decoder.layers[0]
    shapes = [model.get_parameter(f"{name}.weight").shape for name in adapted_layers(model)]
    embedding: Any = model.get_input_embeddings().weight
    heads = config.num_attention_heads
    is_tied = embedding is model.get_output_embeddings().weight
    return ModelDimensions(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        tied=is_tied,
        parameters=sum(weight.numel() for weight in model.parameters()),
        layer_parameters=sum(weight.numel() for weight in layer.parameters()),
        embedding_parameters=embedding.numel() * (1 if is_tied else 2),
        linears=len(shapes),
        linear_widths=sum(map(sum, shapes)),
        qk_norm=hasattr(layer.self_attn, "q_norm"),
        gemma_norms=hasattr(layer, "post_feedforward_layernorm"),
        max_positions=config.max_position_embeddings,
    )
