"""Sizes of Qwen2.5's models, which benchmarks make with random weights: no download. Standard library
only.
"""

from typing import Any

GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {
        "width": 896,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "inner": 4864,
        "vocabulary": 151936,
        "is_tied": True,
    },
    "qwen2-1.5b": {
        "width": 1536,
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
        "inner": 8960,
        "vocabulary": 151936,
        "is_tied": True,
    },
    "qwen2-7b": {
        "width": 3584,
        "layers": 28,
        "heads": 28,
        "kv_heads": 4,
        "inner": 18944,
        "vocabulary": 152064,
        "is_tied": False,
    },
}
NAMES = tuple(GEOMETRIES)
