"""Linear layers whose weights lie in the order in which the processor's matmul reads them.

A decode step multiplies few rows by every weight of the model. An ordinary matmul first brings each weight into blocks,
which at 64 rows takes about as long as the arithmetic. Weights change once a training step and are read at every token:
so they are put into blocks when they are loaded (oneDNN's layout, for a given number of rows; any other number works).
"""

import torch
from torch import Tensor, nn

PROBE = (5, 24, 40)
"""Rows, inputs and outputs of the product that tells whether this processor and this torch can do it."""


class PackedLinear(nn.Module):
    """In place of an `nn.Linear`, for inference on a CPU. The plain weight is not kept, unless it is tied to another.

    `weight` has the shape, type and device of the weight, and no memory: `load` is how values come in.
    """

    def __init__(self, linear: nn.Linear, *, rows: int, tied: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._rows, self._tied = rows, tied
        plain = linear.weight
        self.weight = plain if tied else nn.Parameter(plain.new_zeros(()).expand(plain.shape), requires_grad=False)
        self._packed = _pack(plain, rows)

    def load(self, weight: Tensor) -> None:
        """Take new values `[out, in]` of any floating type, from any device."""
        if self._tied:
            self.weight.copy_(weight)
        self._packed = _pack(weight.to(self.weight), self._rows)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return _multiply(inputs, self._packed, self.bias)

    def extra_repr(self) -> str:
        """As of an `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: nn.Module, *, rows: int) -> int:
    """Replace every plain linear layer, for products of about `rows` rows; returns how many: 0 where it cannot be done.

    Of a layer in float64, on another device, or of a class of its own nothing is changed.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    parameters = [p for module in model.modules() for p in module.parameters(recurse=False)]
    uses = {id(p): sum(p is other for other in parameters) for p in (m.weight for m in linears.values())}
    suited = {name: m for name, m in linears.items() if can_pack(m.weight.dtype, m.weight.device)}
    for name, linear in suited.items():
        parent, _, attribute = name.rpartition(".")
        packed = PackedLinear(linear, rows=rows, tied=uses[id(linear.weight)] > 1)
        setattr(model.get_submodule(parent), attribute, packed)
    return len(suited)


def packed_weights(model: nn.Module) -> dict[int, PackedLinear]:
    """The layers that take a weight's values instead of its parameter, by that parameter's identity."""
    return {id(module.weight): module for module in model.modules() if isinstance(module, PackedLinear)}


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Are the operators there, and do they multiply as they should?"""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    rows, inputs, outputs = PROBE
    x = torch.linspace(-1, 1, rows * inputs).view(rows, inputs).to(dtype)
    weight = torch.linspace(-1, 1, outputs * inputs).view(outputs, inputs).to(dtype)
    bias = torch.linspace(-1, 1, outputs).to(dtype)
    try:
        product = _multiply(x, _pack(weight, rows), bias)
    except (AttributeError, NotImplementedError, RuntimeError):  # another processor, or a torch without them
        return False
    expected = nn.functional.linear(x.double(), weight.double(), bias.double())
    return bool((product.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * inputs)


def _pack(weight: Tensor, rows: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)


def _multiply(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
