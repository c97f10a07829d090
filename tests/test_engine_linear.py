"""Linear layers in the processor's own order: the same products, new weights taken in, nothing kept twice."""

import pytest
import torch
from torch import Tensor, nn

from dapo.engines.native.linear import PackedLinear, can_pack, pack_linears, packed_weights

CPU = torch.device("cpu")
FLOAT32 = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="this torch has no packed matmul for float32")


def keyed(*shape: int) -> Tensor:
    """Numbers that are a function of the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and a layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.inner = nn.Linear(24, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)


@FLOAT32
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 200])
def test_any_number_of_rows_gives_the_plain_product(rows: int) -> None:
    plain = nn.Linear(48, 33)
    packed = PackedLinear(plain, rows=16, tied=False)
    inputs = keyed(rows, 48)
    with torch.inference_mode():
        assert torch.allclose(packed(inputs), plain(inputs), atol=1e-5, rtol=1e-5)
        assert torch.allclose(packed(inputs[None]), plain(inputs)[None], atol=1e-5, rtol=1e-5)


@FLOAT32
def test_new_weights_are_used_and_old_ones_are_gone() -> None:
    packed = PackedLinear(nn.Linear(48, 32, bias=False), rows=8, tied=False)
    weight, inputs = keyed(32, 48), keyed(8, 48)
    packed.load(weight.double())
    with torch.inference_mode():
        assert torch.allclose(packed(inputs), inputs @ weight.T, atol=1e-5, rtol=1e-5)


@FLOAT32
def test_a_packed_weight_has_its_shape_and_takes_no_memory_of_its_own() -> None:
    packed = PackedLinear(nn.Linear(48, 32), rows=8, tied=False)
    assert packed.weight.shape == (32, 48)
    assert packed.weight.untyped_storage().nbytes() == 4


@FLOAT32
def test_a_tied_weight_stays_whole_for_its_other_user() -> None:
    model = Tied()
    assert pack_linears(model, rows=8) == 2
    weight, inputs = keyed(40, 24), keyed(8, 24)
    packed_weights(model)[id(model.embedding.weight)].load(weight)
    assert torch.equal(model.embedding.weight, weight)
    with torch.inference_mode():
        assert torch.allclose(model.head(inputs), inputs @ weight.T, atol=1e-5, rtol=1e-5)
    assert sorted(name for name, _ in model.named_parameters()) == ["embedding.weight", "inner.bias", "inner.weight"]


def test_float64_layers_and_layers_of_another_class_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4).double(), Own(4, 4))
    assert pack_linears(model, rows=8) == 0
    assert [type(module) for module in model] == [nn.Linear, Own]
