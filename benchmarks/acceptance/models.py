"""Random models of real geometries, and the groups of responses that the checks compute on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.geometries import GEOMETRIES
from dapo.config import Config
from dapo.config.load import build_config
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.policy.model import LoadedModel, load_model
from dapo.types import Sample

WINDOW = 48
"""Window of the geometries with windows; the responses below are longer."""


@dataclass(frozen=True)
class Geometry:
    """A decoder's sizes; `options` are those of its family's configuration."""

    family: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int
    window: int | None = None
    """Keys that a query of a sliding-window layer sees, itself included."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of all layers in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_width

    def config(self) -> Any:
        """For transformers. Nothing ends a response, and head and embedding are one weight."""
        make = {"qwen2": Qwen2Config, "mistral": MistralConfig, "gemma3": Gemma3TextConfig}[
            self.family
        ]
        return make(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_width,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **({} if self.window is None else {"sliding_window": self.window}),
            **self.options,
        )


def _qwen2(
    width: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int
) -> Geometry:
    return Geometry("qwen2", width, layers, heads, kv_heads, width // heads, inner, vocabulary)


def _sizes(name: str) -> dict[str, int]:
    return {key: value for key, value in GEOMETRIES[name].items() if key != "is_tied"}


HALF = _sizes("qwen2-0.5b")
ONE_AND_A_HALF = _sizes("qwen2-1.5b")
QWEN_HALF = _qwen2(**HALF)
QWEN_ONE_AND_A_HALF = _qwen2(**ONE_AND_A_HALF)
"""Heads of width 64 and of width 128."""

COMPARED = {
    "heads of 64": _qwen2(**HALF | {"layers": 4}),
    "heads of 128": _qwen2(**ONE_AND_A_HALF | {"layers": 4}),
    "windows in every layer": Geometry("mistral", 1024, 4, 8, 2, 128, 3584, 32000, WINDOW),
    "windows in most layers": Geometry("gemma3", 1152, 6, 4, 1, 256, 6912, 262144, WINDOW),
}
"""Models compared with float32 on the CPU: real widths and vocabularies, and few layers to keep the
CPU fast.
"""

COMPARED_TINY = {
    "heads of 64": _qwen2(256, 2, 4, 2, 192, 307),
    "heads of 128": _qwen2(256, 2, 2, 1, 192, 307),
    "windows in every layer": Geometry("mistral", 128, 2, 2, 1, 64, 192, 307, WINDOW),
    "windows in most layers": Geometry("gemma3", 128, 6, 2, 1, 64, 192, 307, WINDOW),
}
"""The same families at sizes that a CPU computes in a second."""


def compared_geometries(*, on_gpu: bool) -> dict[str, Geometry]:
    """The models of the comparisons, by what is special about them."""
    return COMPARED if on_gpu else COMPARED_TINY


def random_model(
    geometry: Geometry, *, device: str, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """A model with weights of the variance that keeps a layer's outputs as large as its inputs.

    Distributions over tokens are then far from uniform, and a wrong mask far from harmless.
    """
    make = {"qwen2": Qwen2ForCausalLM, "mistral": MistralForCausalLM, "gemma3": Gemma3ForCausalLM}[
        geometry.family
    ]
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model: PreTrainedModel = make(geometry.config())
        finally:
            torch.set_default_dtype(previous)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def as_loaded(model: PreTrainedModel, name: str) -> LoadedModel:
    """With a tokenizer that nothing reads, and a stop token that no check samples on purpose."""
    return LoadedModel(model, load_model("tiny-random", dtype=torch.float32).tokenizer, (1,), name)


def token_ids(count: int, *key: int | str, vocabulary: int) -> tuple[int, ...]:
    """Keyed random tokens; the first two of the vocabulary, padding and end, are not among them."""
    return tuple(
        2 + int(u * (vocabulary - 2)) for u in keyed_uniforms(keyed_seed("acceptance", *key), count)
    )


LENGTHS = ((1, (3, 70, 20)), (37, (1, 64, 130)), (90, (9, 100, 33)))
"""Prompt length and response lengths of each group: some of one token, some far longer than
`WINDOW`.
"""


def ragged_samples(
    vocabulary: int, lengths: Sequence[tuple[int, Sequence[int]]] = LENGTHS
) -> list[Sample]:
    """Groups that share a prompt, with advantages of both signs; every third token from the second
    on is masked.
    """
    return [
        Sample(
            group_id=group,
            prompt_ids=token_ids(prompt, "prompt", group, vocabulary=vocabulary),
            response_ids=token_ids(length, "response", group, i, vocabulary=vocabulary),
            reward=0.0,
            advantage=(-1) ** (group + i) * (0.5 + 0.25 * i),
            engine_logprobs=(),
            old_logprobs=None,
            mask=tuple(t % 3 != 1 for t in range(length)),
            index=i,
        )
        for group, (prompt, responses) in enumerate(lengths)
        for i, length in enumerate(responses)
    ]


def policy_config(device: str, *, microbatch_tokens: int, max_response_tokens: int) -> Config:
    """Full steps from the first update on, and a gradient that is not clipped."""
    return build_config(
        {
            "model": {"name": "tiny-random", "dtype": "bfloat16"},
            "data": {"train": "builtin:sums"},
            "rollout": {"max_response_tokens": max_response_tokens},
            "overlong": {"mode": "off"},
            "optim": {"lr": 1e-6, "warmup_steps": 0, "max_grad_norm": 1e9},
            "train": {"microbatch_tokens": microbatch_tokens, "recompute": False, "device": device},
        }
    )
