"""Models of Qwen2.5's geometries with random weights and a tokenizer of bytes, made on the spot: no
download, and no package with a model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dapo.policy.hf_io import write_model_directory

SPECIAL_TOKENS = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, three special ones, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *SPECIAL_TOKENS.values()])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def write_random_model(directory: str | Path, geometry: dict[str, Any], *, seed: int = 0) -> int:
    """Write a Qwen2 in bfloat16, a weight at a time; returns the number of its parameters.

    The weights have the variance that keeps a layer's outputs as large as its inputs.
    """
    tokenizer = byte_tokenizer()
    model = model_without_weights(geometry, tokenizer)
    write_model_directory(_random_weights(model, seed), model, tokenizer, Path(directory))
    return sum(weight.numel() for weight in model.parameters())


def model_without_weights(
    geometry: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """A Qwen2 of this geometry on the meta device."""
    config = Qwen2Config(
        hidden_size=geometry["width"],
        intermediate_size=geometry["inner"],
        num_hidden_layers=geometry["layers"],
        num_attention_heads=geometry["heads"],
        num_key_value_heads=geometry["kv_heads"],
        vocab_size=geometry["vocabulary"],
        max_position_embeddings=32768,
        tie_word_embeddings=geometry["is_tied"],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model.tie_weights()
    return model


def _random_weights(model: PreTrainedModel, seed: int) -> Iterator[tuple[str, Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        drawn = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
        if weight.ndim > 1:
            drawn.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        else:
            drawn.fill_(0.0 if name.endswith("bias") else 1.0)
        yield name, drawn.cpu()
