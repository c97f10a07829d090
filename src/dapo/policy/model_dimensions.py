"""How large a model is, from its configuration alone: parameters, and bytes of cache per token. No weights are read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class ModelDimensions:
    """A decoder of the Llama kind: attention with grouped heads, a gated feed-forward layer, RMSNorm.

    `qk_norm`: queries and keys are normalised per head (Qwen3, Gemma3). `post_norms`: attention and feed-forward layer
    have a norm behind them too, and `wide_norms`: norms multiply by their weights in float32 (Gemma3).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    wide_norms: bool = False
    max_positions: int | None = None

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """A layer's products by name: (inputs, outputs)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        bias = dict.fromkeys(ATTENTION, self.qkv_bias) | {"o_proj": self.output_bias}
        products = sum(
            inputs * outputs + outputs * bias.get(name, self.mlp_bias)
            for name, (inputs, outputs) in self.linears.items()
        )
        return products + (4 if self.post_norms else 2) * self.hidden + 2 * self.head_dim * self.qk_norm

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding and the head, once where they are tied."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All, tied ones once."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    def cache_bytes(self, element_bytes: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def lora_parameters(self, rank: int) -> int:
        """Parameters of the adapters: `rank` times inputs plus outputs of each linear layer."""
        return rank * self.layers * sum(map(sum, self.linears.values()))


# layers, hidden, intermediate, heads, kv heads, head dim, vocabulary, tied, positions: from the published config.json
_QWEN25 = {
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64, 151936, True, 32768),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, 151936, True, 131072),
    "qwen2.5-3b": (36, 2048, 11008, 16, 2, 128, 151936, True, 32768),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 128, 152064, False, 131072),
    "qwen2.5-14b": (48, 5120, 13824, 40, 8, 128, 152064, False, 131072),
    "qwen2.5-32b": (64, 5120, 27648, 40, 8, 128, 152064, False, 131072),
    "qwen2.5-72b": (80, 8192, 29568, 64, 8, 128, 152064, False, 131072),
}
_QWEN3 = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936, True, 40960),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128, 151936, True, 40960),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 128, 151936, True, 40960),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936, False, 40960),
    "qwen3-14b": (40, 5120, 17408, 40, 8, 128, 151936, False, 40960),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936, False, 40960),
}
_LLAMA = {
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, 128256, True, 131072),
    "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128, 128256, True, 131072),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256, False, 131072),
    "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128, 128256, False, 131072),
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    "smollm2-360m": (32, 960, 2560, 15, 5, 64, 49152, True, 8192),
    "smollm2-1.7b": (24, 2048, 8192, 32, 32, 64, 49152, True, 8192),
    "tiny-random": (2, 32, 64, 2, 1, 16, 100, True, 4096),
}
KNOWN_DIMENSIONS: Mapping[str, ModelDimensions] = (
    {name: ModelDimensions(*row[:8], qkv_bias=True, max_positions=row[8]) for name, row in _QWEN25.items()}
    | {name: ModelDimensions(*row[:8], qk_norm=True, max_positions=row[8]) for name, row in _QWEN3.items()}
    | {name: ModelDimensions(*row[:8], max_positions=row[8]) for name, row in _LLAMA.items()}
)
_VARIANTS = ("-instruct", "-base", "-math", "-coder")  # of one shape with the plain model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text")
"""Values of `model_type` whose parameters are counted exactly."""
TIED_BY_DEFAULT = ("smollm3", "gemma3_text")
"""Those whose head is the embedding where the configuration does not say."""


def find_dimensions(name: str) -> ModelDimensions | None:
    """Of a model by directory, Hugging Face id or alias; None where neither its configuration nor its name is known.

    A configuration that lies on this machine counts first: in a directory, or in the cache of the hub. Nothing is
    fetched.
    """
    path: Any = Path(name).expanduser() / "config.json"
    if not path.is_file() and name.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache  # not at import: it takes a while

        path = try_to_load_from_cache(name, "config.json")
    if isinstance(path, str) or (isinstance(path, Path) and path.is_file()):
        try:
            return dimensions_from_config(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError):
            return None
    plain = name.rstrip("/").rsplit("/", 1)[-1].lower()
    for variant in _VARIANTS:
        plain = plain.replace(variant, "")
    return KNOWN_DIMENSIONS.get(plain)


def dimensions_from_config(config: Mapping[str, Any]) -> ModelDimensions | None:
    """From the content of a config.json; None for a family that is not among FAMILIES. Raises KeyError."""
    family = config["model_type"]
    if family not in FAMILIES:
        return None
    heads = config["num_attention_heads"]
    has_bias = bool(config.get("attention_bias", False))
    return ModelDimensions(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", family in TIED_BY_DEFAULT)),
        qkv_bias=family == "qwen2" or has_bias,
        output_bias=family != "qwen2" and has_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3_text"),
        post_norms=family == "gemma3_text",
        wide_norms=family == "gemma3_text",
        max_positions=config.get("max_position_embeddings"),
    )
