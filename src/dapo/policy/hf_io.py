"""Hugging Face formats: named weights, safetensors files, and complete model directories."""

import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dapo.core.loading import quiet_hub, reading_hub
from dapo.types import WeightLayout

SHARD_BYTES = 5 * 10**9
"""The largest file of weights: readers map one at a time, and uploads begin again with the file that failed."""


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers and the hub within the block."""
    with quiet_hub(), contextlib.ExitStack() as stack:
        stack.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
        if transformers_logging.is_progress_bar_enabled():
            stack.callback(transformers_logging.enable_progress_bar)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        yield


def reading_model(path: str | Path) -> AbstractContextManager[None]:
    """Return the context in which a model is read, from a directory or by its Hugging Face id."""
    if isinstance(path, Path):
        return contextlib.nullcontext()
    return reading_hub()


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Map each other name of a tied weight to its first name, under which it is stored."""
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != first_names[parameter]:
            tied[name] = first_names[parameter]
    return tied


def stored_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model's files hold beside its weights, such as a router's bias.

    No gradient reaches them. A model on the meta device has not read them.
    """
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in weights}


def layout_of(
    weights: Mapping[str, Tensor], tied: Mapping[str, str], dtype: torch.dtype | None = None
) -> WeightLayout:
    """Return the layout of weights in their own types, or all in `dtype`, with `tied_names`."""
    entries = {}
    for name, weight in weights.items():
        type_name = str(dtype or weight.dtype).removeprefix("torch.")
        entries[name] = (type_name, tuple(weight.shape))
    return WeightLayout(entries, tied)


@dataclass(frozen=True)
class NamedWeights:
    """A `WeightSource` of weights by their Hugging Face names, read again at each iteration."""

    read: Callable[[], Iterable[tuple[str, Tensor]]]  # every stored weight by name
    stored: WeightLayout

    def layout(self) -> WeightLayout:
        return self.stored

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight by its Hugging Face name, tied ones under each of their names."""
        return with_tied(self.read(), self.stored.tied)


def with_tied(
    weights: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each stored weight under its name, then under its other names."""
    for name, tensor in weights:
        yield name, tensor
        for other_name, source in tied.items():
            if source == name:
                yield other_name, tensor


def config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of the configuration with the model's class, which a config.json needs."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    return config


def write_model_directory(
    weights: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write weights, configuration, generation settings and tokenizer.

    Args:
        weights: the weights by name, of one type; at most a file of them is in memory.
        model: has the configuration and the generation settings; its weights are not read.
        tokenizer: the model's tokenizer.
        out: a directory that is absent or empty.
        files: further files by name, with their text.
    """
    with appearing_directory(out) as temporary:
        write_texts(files, temporary)
        config = config_of(model)
        config.dtype = write_shards_of_weights(weights, temporary)
        config.save_pretrained(temporary)
        if model.generation_config is not None:
            # save_pretrained refuses settings that some published models contain
            model.generation_config.to_json_file(temporary / "generation_config.json")
        with quiet_transformers():
            tokenizer.save_pretrained(temporary)


def write_shards_of_weights(
    weights: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> torch.dtype | None:
    """Write `model.safetensors`, or files of at most `shard_bytes` with an index; return the type.

    The type is that of the first weight. One larger weight is a file of its own. Raises OSError if
    writing fails.
    """
    dtype = None
    total = 0
    shards: list[list[str]] = []
    for shard in _shards(weights, shard_bytes):
        if dtype is None:
            dtype = next(iter(shard.values())).dtype
        total += sum(tensor.nbytes for tensor in shard.values())
        write_tensors(shard, folder / f"{len(shards)}.safetensors")
        shards.append(list(shard))
        shard.clear()  # before the next one fills
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / SAFE_WEIGHTS_NAME)
        return dtype
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards):
        # the names that transformers and the hub give to shards
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file_name)
        file_of |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
    return dtype


def _shards(weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in their order, as many at a time as a file holds."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def write_texts(files: Mapping[str, str] | None, folder: Path) -> None:
    """Write texts by the name of their file."""
    for name, text in (files or {}).items():
        (folder / name).write_text(text, encoding="utf-8")


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that transformers and peft read. Raises OSError if writing fails."""
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(dense, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # the library tells a full disk or a missing folder in its message alone
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(0o644)  # the library lets only the owner read it


@contextlib.contextmanager
def appearing_directory(out: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes `out` at the end of the block, unless it fails.

    A killed process leaves it behind; its name ends in .tmp, as those of all temporary files do.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp lets only the owner read it
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class StoredWeights:
    """The file of each weight of a model, with the name and shape that it has in the model."""

    files: Mapping[str, Path]

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read only these rows of a weight, along its first dimension."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_slice(name)[rows]


def find_stored_weights(name_or_path: str | Path, model: PreTrainedModel) -> StoredWeights | None:
    """Return the files of `model`, or None if only transformers can read them.

    That is the case without safetensors files, if names or shapes differ from the model's, if there
    are buffers, and if transformers would change more of a weight than its number format: quantised
    weights, weights that are kept in float32, and tied weights that are stored twice and may
    differ.
    """
    wide_modules = (
        getattr(model, "_keep_in_fp32_modules", None),
        getattr(model, "_keep_in_fp32_modules_strict", None),
    )
    tied = tied_names(model)
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    is_quantised = bool(getattr(model.config, "quantization_config", None))
    if is_quantised or any(wide_modules) or stored_buffers(model):
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    files_by_name: dict[str, Path] = {}
    for path in _weight_files(name_or_path):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
                files_by_name[name] = path
    if any(shapes.get(name) != shape for name, shape in expected.items()):
        return None
    if tied.keys() & files_by_name.keys():
        return None
    return StoredWeights({name: files_by_name[name] for name in expected})


def _weight_files(name_or_path: str | Path) -> list[Path]:
    """Return the safetensors files that transformers would load, downloaded if necessary."""

    def find(name: str) -> Any:
        return cached_file(str(name_or_path), name, _raise_exceptions_for_missing_entries=False)

    single = find(SAFE_WEIGHTS_NAME)
    if single:
        return [Path(single)]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if not index:
        return []
    paths, _ = get_checkpoint_shard_files(str(name_or_path), index)
    return [Path(path) for path in paths]


def rows_of_rank(size: int, rank: int, ranks: int) -> slice:
    """Return a rank's rows of a weight of `size` rows, divided like torch.chunk does."""
    height = -(-size // ranks)
    # the last ranks may have fewer rows, or none
    first = min(rank * height, size)
    last = min((rank + 1) * height, size)
    return slice(first, last)
