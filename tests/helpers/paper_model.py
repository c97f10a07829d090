"""The paper's model without its weights: a directory with the configuration of Qwen2.5-32B."""

import json
from pathlib import Path

from dapo.config import Config, load_config
from dapo.distributed.protocol import Node
from helpers.paths import CONFIGS

QWEN_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "dtype": "bfloat16",
}
PARAMETERS = 32_763_876_352
NODES = [Node(cpus=96, gpus=8)] * 16
"""The cluster of configs/dapo_32b.yaml: 128 GPUs."""


def paper_config(folder: Path, *overrides: str) -> Config:
    """configs/dapo_32b.yaml with a model in `folder` that has a configuration and empty files."""
    (folder / "config.json").write_text(json.dumps(QWEN_32B))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return load_config(
        CONFIGS / "dapo_32b.yaml", [f"model.name={folder}", "model.dtype=bfloat16", *overrides]
    )
