"""A model's weights in its safetensors files, of which a process reads the rows that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from dapo.policy.hf_io import tied_names


@dataclass(frozen=True)
class StoredWeights:
    """Where each weight of a model lies, under the name and in the shape that it has in the model."""

    files: Mapping[str, Path]

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of a weight, counted along its first dimension; nothing else is read."""
        with safe_open(self.files[name], framework="pt") as file:
            found: Tensor = file.get_slice(name)[rows]
        return found


def find_stored_weights(name_or_path: str | Path, model: PreTrainedModel) -> StoredWeights | None:
    """The files of `model`, or None where it takes transformers to read them.

    That is so without safetensors files, where names or shapes differ from the model's, where more is stored than
    weights, and where a weight would be changed by more than its number format: quantised ones, those that are kept in
    float32, tied ones that are stored twice and may differ.
    """
    kept = [getattr(model, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")]
    tied, wanted = tied_names(model), {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    has_buffers = bool(model.state_dict().keys() - wanted.keys() - tied.keys())
    if getattr(model.config, "quantization_config", None) or any(kept) or has_buffers:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, Path] = {}
    for path in _weight_files(name_or_path):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                shapes[name], found[name] = tuple(file.get_slice(name).get_shape()), path
    if any(shapes.get(name) != shape for name, shape in wanted.items()) or tied.keys() & found.keys():
        return None
    return StoredWeights({name: found[name] for name in wanted})


def _weight_files(name_or_path: str | Path) -> list[Path]:
    """The safetensors files that transformers would load; those of a Hugging Face id are downloaded."""

    def find(name: str) -> Any:
        return cached_file(str(name_or_path), name, _raise_exceptions_for_missing_entries=False)

    if single := find(SAFE_WEIGHTS_NAME):
        return [Path(single)]
    if index := find(SAFE_WEIGHTS_INDEX_NAME):
        paths, _ = get_checkpoint_shard_files(str(name_or_path), index)
        return [Path(path) for path in paths]
    return []


def rows_of_rank(size: int, rank: int, ranks: int) -> slice:
    """The rows of a weight with `size` of them that a rank holds: as torch.chunk divides them."""
    each = -(-size // ranks)
    return slice(min(rank * each, size), min((rank + 1) * each, size))
