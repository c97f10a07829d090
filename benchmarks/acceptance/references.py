"""The float32 numbers that a GPU's are compared with: from a file made on a CPU, or computed here.

`python -m benchmarks.make_references` makes the file. An entry is of one model and of what it was
given; where either differs, and where the weights that are drawn here differ from those of the
file, the numbers are computed here as before.
"""

import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.acceptance.models import Geometry, random_model

FILE = Path(__file__).with_name("references.safetensors")
METHOD = 1
"""Raised when the numbers are computed in another way."""
Numbers: TypeAlias = dict[str, Tensor]
SKETCH = 53
"""Numbers that stand for a gradient: a prime, so that no column of a weight falls into one of
them. The norm of a difference is known to a tenth.
"""
_PART = SKETCH * 2**18
_ODD = (-7046029254386353131, -4658895280553007687)  # two well mixing 64-bit factors


@dataclass(frozen=True)
class Reference:
    """Float32 numbers of a random model, on a CPU."""

    name: str
    geometry: Geometry
    given: Any
    """What the model computes on; its text is a part of the key."""
    compute: Callable[[PreTrainedModel], Numbers]
    """The numbers, of the model in float32 on the CPU."""
    dtype: torch.dtype = torch.bfloat16
    """That of the drawn weights."""

    @property
    def key(self) -> str:
        """A hash of the model's sizes, of what it is given, and of the method."""
        text = repr((METHOD, self.geometry, self.given, str(self.dtype)))
        return f"{self.name}/{sha256(text.encode()).hexdigest()[:16]}"

    def model(self) -> PreTrainedModel:
        """The model with its drawn weights, on the CPU."""
        return random_model(self.geometry, device="cpu", dtype=self.dtype)

    def numbers(self, model: PreTrainedModel, file: Path | None) -> Numbers:
        """The stored numbers of these weights, or newly computed ones; the model is unchanged."""
        stored = _read(file, self.key)
        if stored and int(stored["weights"]) == checksum(model):
            return stored
        return self.made(model)

    def made(self, model: PreTrainedModel) -> Numbers:
        """Newly computed numbers, and which weights they are of."""
        plain = copy.deepcopy(model).float()
        return self.compute(plain) | {"weights": torch.tensor(checksum(model))}


def checksum(model: PreTrainedModel) -> int:
    """A number of all weights to the bit."""
    found = 0
    for weight in model.parameters():
        found = zlib.crc32(weight.detach().cpu().contiguous().view(torch.uint8).numpy(), found)
    return found


def _read(file: Path | None, key: str) -> Numbers:
    if file is None or not file.is_file():
        return {}
    with safe_open(file, framework="pt") as tensors:
        names = [name for name in tensors.keys() if name.startswith(f"{key}/")]  # noqa: SIM118
        return {name.removeprefix(f"{key}/"): tensors.get_tensor(name) for name in names}


def sketch(tensor: Tensor) -> Tensor:
    """`[SKETCH]` float32 sums of the tensor's numbers with random signs.

    The squared norm of the difference of two sketches is that of the two tensors on average. The
    signs are a function of a number's place alone, the same on every device.
    """
    sums = torch.zeros(SKETCH, dtype=torch.float64, device=tensor.device)
    for start, part in _parts(tensor.detach().reshape(-1)):
        place = torch.arange(start, start + len(part), device=tensor.device)
        mixed = place * _ODD[0]
        mixed = (mixed ^ (mixed >> 32)) * _ODD[1]
        signed = torch.where(mixed < 0, -part.double(), part.double())
        padding = -len(part) % SKETCH
        sums += torch.nn.functional.pad(signed, (0, padding)).view(-1, SKETCH).sum(0)
    return sums.float().cpu()


def _parts(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(flat), _PART):
        yield start, flat[start : start + _PART]
