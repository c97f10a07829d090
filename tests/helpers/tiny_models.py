"""Tiny random language models of the families that the engines serve, and of some that they refuse.

Weights are larger than an initialisation's, so that the laws over tokens are far from flat.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dapo.policy.hf_io import layout_of, tied_names
from dapo.policy.model import export_model, load_model
from dapo.types import WeightLayout

VOCABULARY = 197
WINDOW = 6

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(**options: Any) -> PreTrainedModel:
    """Three query heads to a key-value head."""
    return LlamaForCausalLM(LlamaConfig(**(COMMON | options)))


def tied_llama() -> PreTrainedModel:
    """The head is the embedding."""
    return llama(tie_word_embeddings=True)


def qwen2() -> PreTrainedModel:
    """Biases on queries, keys and values."""
    return Qwen2ForCausalLM(Qwen2Config(**COMMON))


def qwen2_windows() -> PreTrainedModel:
    """The first layer sees everything, the second a window."""
    options = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, **options))


def qwen3() -> PreTrainedModel:
    """Queries and keys are normalised."""
    return Qwen3ForCausalLM(Qwen3Config(**COMMON))


def mistral_window() -> PreTrainedModel:
    """Every layer sees a window."""
    return MistralForCausalLM(MistralConfig(**COMMON, sliding_window=WINDOW))


def smollm3() -> PreTrainedModel:
    """One layer in two has no positions."""
    return SmolLM3ForCausalLM(SmolLM3Config(**COMMON, no_rope_layer_interval=2))


def gemma() -> PreTrainedModel:
    """Scaled embeddings."""
    return GemmaForCausalLM(GemmaConfig(**COMMON))


def gemma3() -> PreTrainedModel:
    """Windows and full attention in turn, each with its own rotary base, and another attention
    scale.
    """
    options = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **options, query_pre_attn_scalar=16))


SERVED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "tied llama": tied_llama,
    "qwen2": qwen2,
    "qwen2 with windows": qwen2_windows,
    "qwen3": qwen3,
    "mistral with a window": mistral_window,
    "smollm3": smollm3,
    "gemma": gemma,
    "gemma3": gemma3,
}


WIDE = {"head_dim": 32}
"""vLLM's attention on CPUs takes no narrower heads."""

SERVED_BY_VLLM: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(**WIDE),
    "tied llama": lambda: llama(**WIDE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**(COMMON | WIDE | {"hidden_size": 192}))),
    "tied qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**(COMMON | WIDE | {"tie_word_embeddings": True}))
    ),
}


UNSHARED: dict[str, dict[str, Any]] = {
    "diffllama": {},
    "hrm_text": {"H_cycles": 1, "L_cycles": 2},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Options of models that would not read a prompt outside of the rows as they should, by type."""


def unshared_model(model_type: str) -> PreTrainedModel:
    """One of `UNSHARED`, by its type, which not every version of transformers has."""
    sizes = dict(COMMON)
    if model_type == "jetmoe":
        # it names the width of a head otherwise, and multiplies its heads by the experts
        sizes["kv_channels"] = sizes.pop("head_dim")
        del sizes["num_attention_heads"]
    config = AutoConfig.for_model(model_type, **sizes, **UNSHARED[model_type])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


def gemma2() -> PreTrainedModel:
    """Soft-capped logits and attention."""
    return Gemma2ForCausalLM(Gemma2Config(**COMMON))


def gpt_oss() -> PreTrainedModel:
    """Attention sinks."""
    options = {"num_local_experts": 2, "num_experts_per_tok": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return GptOssForCausalLM(GptOssConfig(**COMMON, **options, rope_parameters=rope))


def granite() -> PreTrainedModel:
    """Divides the logits after the head; no name in the configuration is checked for it."""
    return GraniteForCausalLM(GraniteConfig(**COMMON, logits_scaling=8.0))


def cohere() -> PreTrainedModel:
    """Multiplies the logits after the head."""
    return CohereForCausalLM(CohereConfig(**COMMON, logit_scale=0.0625))


def mamba() -> PreTrainedModel:
    """A recurrent state, no keys and values."""
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    )


def t5() -> PreTrainedModel:
    """An encoder-decoder."""
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    )


def qwen2_moe_window() -> PreTrainedModel:
    """A window that is in the mask alone, and longer than every sequence of a check."""
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    window = {"use_sliding_window": True, "sliding_window": 64}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**COMMON, **experts, **window))


def longrope() -> PreTrainedModel:
    """A rotary embedding that follows the longest sequence of the batch."""
    return llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


def modernbert_decoder() -> PreTrainedModel:
    """A layer between the last states and the head, which alone is the output embedding."""
    sizes = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 6}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    special |= {"cls_token_id": 1, "sep_token_id": 2}
    return ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**sizes, **special))


def scaled_queries() -> PreTrainedModel:
    """The option with which Llama 4 scales queries by their place in the batch."""
    model = llama()
    model.config.attn_temperature_tuning = True
    return model


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gemma2": (gemma2, "soft-capped"),
    "gpt-oss": (gpt_oss, "sinks"),
    "granite": (granite, "differ"),
    "cohere": (cohere, "differ"),
    "mamba": (mamba, "recurrent"),
    "t5": (t5, "encoder-decoder"),
    "dynamic rope": (longrope, "rotary"),
    "qwen2 moe with a window": (qwen2_moe_window, "sliding_window=64"),
    "modernbert decoder": (modernbert_decoder, "between its layers and its head, such as lm_head."),
    "scaled queries": (scaled_queries, "attn_temperature_tuning=True"),
}


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """One of `SERVED` with random weights that depend on `seed`."""
    return randomised(SERVED[name](), seed).to(dtype).eval()


def wide_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """The same of `SERVED_BY_VLLM`."""
    return randomised(SERVED_BY_VLLM[name](), seed).eval()


def randomised(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Every parameter drawn anew: matrices wide enough for peaked laws, norms near what they
    were.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * 0.1)
    return model


@dataclass(frozen=True)
class ModelWeights:
    """A `WeightSource`: a model's parameters, tied ones under each of their names."""

    model: PreTrainedModel

    def layout(self) -> WeightLayout:
        """Of the parameters."""
        return layout_of(dict(self.model.named_parameters()), tied_names(self.model))

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every parameter by name."""
        return self.model.named_parameters(remove_duplicate=False)


def model_with_template(path: Path, chat_template: str, *, has_eos: bool = True) -> Path:
    """The tiny random model with a chat template, as a directory."""
    loaded = load_model("tiny-random", dtype=torch.float32)
    loaded.tokenizer.chat_template = chat_template
    if not has_eos:
        config: Any = loaded.model.config
        config.eos_token_id = loaded.tokenizer.eos_token = None
        assert loaded.model.generation_config is not None
        loaded.model.generation_config.eos_token_id = None
    export_model(loaded.named_tensors(), loaded, path)
    return path
