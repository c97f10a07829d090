"""Dimensions of published models, from the sizes in their config.json."""

from functools import cache
from typing import Any

from dapo.config import ModelConfig
from dapo.policy.model_dimensions import ModelDimensions, dimensions_from_sizes, find_dimensions

KNOWN = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "smollm2-135m": "smollm2-135m-instruct",
    "tiny-random": "tiny-random",
}
# family, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied, positions
SIZES: dict[str, tuple[Any, ...]] = {
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 131072),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 131072),
    "qwen2.5-72b": ("qwen2", 8192, 29568, 80, 64, 8, 152064, False, 131072),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 151936, True, 40960),
    "qwen3-1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 151936, True, 40960),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128256, False, 131072),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128256, True, 131072),
}


@cache
def sizes_of(name: str) -> ModelDimensions:
    """The dimensions of a published model, by its short name in lower case."""
    if name in KNOWN:
        found = find_dimensions(ModelConfig(name=KNOWN[name]))
    else:
        head_dim = {"head_dim": 128} if name.startswith("qwen3") else {}
        found = dimensions_from_sizes(*SIZES[name], **head_dim)
    assert found is not None
    return found
