"""Dealings with transformers that loading and writing share: silence, and a model directory that appears whole."""

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dapo.core.errors import ConfigError


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or advice from transformers inside; errors still raise."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Further names of weights that have several -> the first, under which they are stored."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in names if first[parameter] != name}


def config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """A copy of the configuration that names the model's own class, as a config.json must."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    return config


def write_model_directory(
    tensors: dict[str, Tensor], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path
) -> None:
    """Write weights, configuration, generation settings and tokenizer beside `out`, then rename.

    `out` must be absent or empty. Weights keep their type. An error leaves nothing behind.
    """
    with appearing_directory(out) as temporary:
        config = config_of(model)
        config.dtype = next(iter(tensors.values())).dtype
        config.save_pretrained(temporary)
        if model.generation_config is not None:
            # not save_pretrained: it refuses settings that published models do contain
            model.generation_config.to_json_file(temporary / "generation_config.json")
        with quiet_transformers():
            tokenizer.save_pretrained(temporary)
        write_tensors(tensors, temporary / "model.safetensors")


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """As transformers and peft read them."""
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(dense, path, metadata={"format": "pt"})
    path.chmod(0o644)  # it was made for its owner alone


@contextlib.contextmanager
def appearing_directory(out: Path) -> Iterator[Path]:
    """A directory to fill beside `out`, which takes that name at the end; an error leaves nothing behind.

    `out` must be absent or empty.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # it was made for its owner alone
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_new(out: Path) -> None:
    """Raise ConfigError where `out` is there already and no empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists and is not an empty directory; choose another place for the model")
