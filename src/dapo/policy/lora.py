"""Low-rank adapters (LoRA): a weight W is frozen, and a product of two factors is trained.

An adapted layer computes W x + s B A x with s = alpha / rank. B starts at zero, so training starts
at the loaded model. Engines and exports receive the merged weights W + s B A under the model's own
names. With its adapters disabled, the model is the initial one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.config import LoraConfig
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.model_files import require_new_folder
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.policy.checkpoint import SavedWeights
from dapo.policy.hf_io import (
    NamedWeights,
    appearing_directory,
    layout_of,
    tied_names,
    write_tensors,
    write_texts,
)
from dapo.policy.model import LoadedModel

ADAPTER = "default"  # peft's name of the adapter, which is part of its parameters' names
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapters:
    """The adapters that `add_adapters` put into a model."""

    settings: Mapping[str, float]  # rank and alpha; those of a checkpoint must be equal
    # the model's own weights by their Hugging Face names, tied ones once
    frozen: Mapping[str, Tensor]
    tied: Mapping[str, str]  # from `tied_names`
    layers: Sequence[Any]  # peft's layers, each around a linear layer
    seed: int

    def initial_factor(self, name: str) -> Tensor:
        """Return the initial value of a factor, by its name in the model."""
        layer = name.partition(".lora_")[0]
        rows, columns = self.frozen[f"{layer}.weight"].shape
        rank = int(self.settings["rank"])
        if name == factor_names(layer)[1]:
            return torch.zeros(rows, rank)
        # uniform numbers of variance 1 / (3 columns)
        uniforms = keyed_uniforms(keyed_seed("lora", self.seed, layer), rank * columns)
        return torch.from_numpy((2 * uniforms - 1).reshape(rank, columns) / math.sqrt(columns))

    def merged(
        self,
        factors: Mapping[str, Tensor],
        dtype: torch.dtype,
        *,
        full: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> NamedWeights:
        """Return every weight: W + s B A if it has factors, else W.

        They are computed one at a time, in float32 or better.

        Args:
            factors: A and B by their names in the model.
            dtype: the type of the results.
            full: gathers a sharded tensor.
        """

        @torch.no_grad()
        def read() -> Iterator[tuple[str, Tensor]]:
            scale = self.settings["alpha"] / self.settings["rank"]
            gathered = {name: full(factor).detach() for name, factor in factors.items()}
            for name, weight in self.frozen.items():
                wide = full(weight).detach().to(torch.promote_types(weight.dtype, torch.float32))
                a_name, b_name = factor_names(name.removesuffix(".weight"))
                if a_name in gathered:
                    a = gathered[a_name].to(wide)
                    b = gathered[b_name].to(wide)
                    wide = torch.addmm(wide, b, a, alpha=scale)
                yield name, wide.to(dtype)

        return NamedWeights(read, layout_of(self.frozen, self.tied, dtype))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the block the model computes without adapters.

        Do not enter it between a forward and its backward.
        """
        for layer in self.layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.enable_adapters(True)


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> Adapters:
    """Put adapters into `model` in place, and freeze all its own weights.

    A is uniform in +-1 / sqrt(inputs), keyed by `seed` and the layer's name; B is zero. Raises
    ConfigError if peft is not installed.
    """
    peft = _peft()
    names = adapted_layers(model)
    frozen = dict(model.named_parameters())
    tied = tied_names(model)
    settings = {"rank": config.rank, "alpha": config.alpha}
    # peft draws initial factors, which are replaced below: leave the caller's generator unchanged
    with torch.random.fork_rng(devices=[]):
        config_of_peft = _peft_config(model, names, settings)
        peft.inject_adapter_in_model(config_of_peft, model, adapter_name=ADAPTER)
    layers: list[Any] = [model.get_submodule(name) for name in names]
    adapters = Adapters(settings, frozen, tied, layers, seed)
    for name, layer in zip(names, layers, strict=True):
        for factor, linear in zip(factor_names(name), (layer.lora_A, layer.lora_B), strict=True):
            linear[ADAPTER].weight = nn.Parameter(
                adapters.initial_factor(factor).to(frozen[f"{name}.weight"])
            )
    return adapters


def adapted_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that get adapters, in the model's order.

    The head and layers with a tied weight get none: an adapter would change only one of the
    weight's two uses.
    """
    head = model.get_output_embeddings()
    tied = tied_names(model)
    shared = tied.keys() | set(tied.values())
    names = []
    for name, module in model.named_modules():
        is_own = module is not head and f"{name}.weight" not in shared
        if isinstance(module, nn.Linear) and is_own:
            names.append(name)
    return names


def saved_weights(directory: str | Path, model: PreTrainedModel) -> SavedWeights | NamedWeights:
    """Return a saved policy's complete weights, whether all or only adapters were trained.

    `model` is the initial model, without adapters. Raises CheckpointError if the adapters do not
    fit it, or if the files cannot be read.
    """
    saved = SavedWeights(directory)
    if saved.lora is None:
        return saved
    adapters = Adapters(
        saved.lora, dict(model.named_parameters()), tied_names(model), layers=(), seed=0
    )
    factors = _saved_factors(saved, directory, adapters.frozen)
    return adapters.merged(factors, torch.promote_types(model.dtype, torch.float32))


def export_adapter(
    directory: str | Path,
    source: LoadedModel,
    out_dir: str | Path,
    *,
    base: str | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a saved policy's adapters in peft's format, for `peft.PeftModel.from_pretrained`.

    The directory appears complete or not at all.

    Args:
        directory: the checkpoint.
        source: the initial model.
        out_dir: the directory to make.
        base: the name of the initial model in peft's configuration; None: that of `source`.
        files: further files by name, with their text.

    Raises:
        ConfigError: the directory is not empty, peft is missing, or all weights were trained.
        CheckpointError: as `saved_weights`.
    """
    out = Path(out_dir)
    saved = SavedWeights(directory)
    require_new_folder(out)
    if saved.lora is None:
        raise ConfigError(
            f"{directory} holds all weights, not an adapter: model.lora was not set; leave out"
            " --adapter"
        )
    factors = _saved_factors(saved, directory, dict(source.model.named_parameters()))
    names = list(dict.fromkeys(name.partition(".lora_")[0] for name in factors))
    config = _peft_config(source.model, names, saved.lora, base or source.name)
    tensors = {}
    for name, factor in factors.items():
        # peft's files leave out the name of the adapter
        file_name = name.replace(f".{ADAPTER}.", ".")
        tensors[f"base_model.model.{file_name}"] = factor
    with appearing_directory(out) as temporary:
        config.save_pretrained(str(temporary))
        write_texts(files, temporary)
        write_tensors(tensors, temporary / ADAPTER_FILE)


def factor_names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's A `[rank, in]` and B `[out, rank]`."""
    return f"{layer}.lora_A.{ADAPTER}.weight", f"{layer}.lora_B.{ADAPTER}.weight"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "model.lora needs the package peft, which is not installed here; run: pip install peft"
        ) from error
    return peft


def _peft_config(
    model: PreTrainedModel,
    layers: Sequence[str],
    settings: Mapping[str, float],
    name: str | None = None,
) -> Any:
    """Return peft's configuration of adapters of these layers."""
    kinds = {layer.rpartition(".")[2] for layer in layers}
    alpha = settings["alpha"]
    matches = set()
    for module_name, _ in model.named_modules():
        if module_name.rpartition(".")[2] in kinds:
            matches.add(module_name)
    return _peft().LoraConfig(
        r=settings["rank"],
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        # full names where the last parts would match other modules too
        target_modules=sorted(kinds if matches == set(layers) else layers),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=name,
    )


def _saved_factors(
    saved: SavedWeights, directory: str | Path, frozen: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all factors of a checkpoint.

    Args:
        saved: the trained weights of the checkpoint.
        directory: the checkpoint, for messages.
        frozen: the weights of the model that the factors must fit.

    Raises:
        CheckpointError: the factors do not fit the model.
    """
    assert saved.lora is not None
    rank = int(saved.lora["rank"])
    factors = dict(saved.named_tensors())
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in sorted({name.partition(".lora_")[0] for name in factors}):
        weight = frozen.get(f"{layer}.weight")
        if weight is None or weight.ndim != 2:
            raise CheckpointError(
                f"{directory} holds adapters of another model: this one has no linear layer {layer}"
            )
        down, up = factor_names(layer)
        shapes |= {down: (rank, weight.shape[1]), up: (weight.shape[0], rank)}
    saved_shapes = {name: tuple(factor.shape) for name, factor in factors.items()}
    for name in sorted(saved_shapes.keys() | shapes.keys()):
        there = saved_shapes.get(name)
        here = shapes.get(name)
        if there != here:
            raise CheckpointError(
                f"{directory} holds adapters of another model: {name} is {there} in the checkpoint"
                f" and {here} here"
            )
    return factors
