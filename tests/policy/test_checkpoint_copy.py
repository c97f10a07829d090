"""Laws of the copy in main memory that a checkpoint is written from: exact, and not much larger
than the state.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dapo.policy import checkpoint
from dapo.policy.checkpoint import State, StateCopy

SCALE = 32  # the shapes below are those of the models, divided by it
MODELS = {
    "Qwen2.5-1.5B": (1536, 8960, 28, 151936, 256, 1),
    "Qwen2.5-7B on 8 ranks": (3584, 18944, 28, 152064, 512, 8),
    "Qwen2.5-32B on 64 ranks": (5120, 27648, 64, 152064, 1024, 64),
}


def shards(name: str) -> dict[str, Tensor]:
    """Of a rank, with numbers of their own."""
    *sizes, ranks = MODELS[name]
    hidden, inner, layers, vocabulary, keys = (
        size // SCALE if i != 2 else size for i, size in enumerate(sizes)
    )
    of_layer = (
        [(hidden, hidden)] * 2 + [(keys, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
    )
    of_layer += [(hidden,)] * 3 + [(keys,)] * 2
    shapes = [(vocabulary, hidden), *of_layer * layers, (hidden,)]
    generator = torch.Generator().manual_seed(0)
    return {
        f"{i}": torch.randn(-(-first // ranks), *others, generator=generator)
        for i, (first, *others) in enumerate(shapes)
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_copy_is_exact_and_takes_a_tenth_more_than_the_state_at_most(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(checkpoint, "BUFFER_BYTES", 2**30 // SCALE**2)
    make = torch.empty
    allocated = list[int]()

    def empty(num_bytes: int, **options: Any) -> Tensor:
        allocated.append(num_bytes)
        return make(num_bytes, **options)

    copy = StateCopy()
    weights = shards(name)
    before = State({"weights": weights}, {})
    after = State(dict.fromkeys(("weights", "exp_avg", "exp_avg_sq"), weights), {})
    monkeypatch.setattr(torch, "empty", empty)
    copy.take(before)  # the moments come with the first update
    copied = copy.take(after)
    size = sum(tensor.nbytes for tensor in weights.values()) * 3
    # what torch would allocate for page-locked memory
    assert sum(2 ** (each - 1).bit_length() for each in allocated) <= 1.1 * size
    assert copied.tensors.keys() == after.tensors.keys()
    for kind in copied.tensors.values():
        for key, tensor in weights.items():
            assert torch.equal(kind[key], tensor)
            assert kind[key].untyped_storage().nbytes() == tensor.nbytes
    pointers = [tensor.data_ptr() for kind in copied.tensors.values() for tensor in kind.values()]
    assert all(pointer % 64 == 0 for pointer in pointers)
    num_allocated = len(allocated)
    weights["0"].add_(1)
    again = copy.take(after)
    assert len(allocated) == num_allocated  # the memory is used again
    assert [
        tensor.data_ptr() for kind in again.tensors.values() for tensor in kind.values()
    ] == pointers
    assert torch.equal(again.tensors["exp_avg"]["0"], weights["0"])


def test_empty_shards_and_numbers_of_other_types_are_copied_as_they_are() -> None:
    tensors = {
        "none": torch.empty(0, 3),
        "one": torch.tensor(1.5, dtype=torch.float64),
        "half": torch.ones(3).bfloat16(),
    }
    copied = StateCopy().take(State({"weights": tensors}, {})).tensors["weights"]
    for name, tensor in tensors.items():
        assert (copied[name].dtype, copied[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copied[name], tensor)
