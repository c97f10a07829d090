"""Linear layers whose weights lie in the order in which the processor's matmul reads them.

A decode step multiplies few rows by every weight of the model. An ordinary matmul first brings each weight into blocks,
which at 64 rows takes about as long as the arithmetic. Weights change once a training step and are read at every token:
so they are put into blocks when they are loaded. MKL's blocks are used for float32, oneDNN's where there is no MKL, and
for bfloat16. Either takes any number of rows; the number given is the one that the blocks suit best.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

PROBE = (5, 24, 40)
"""Rows, inputs and outputs of the product that tells whether this processor and this torch can do it."""


class PrepackedWeight(Protocol):
    """A weight `[out, in]` in blocks; products are `[..., in]` -> `[..., out]`."""

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor: ...

    def silu(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """SiLU of the product."""

    def plus(self, inputs: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        """The product and `other`, added."""

    def times(self, inputs: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        """The product and `other`, multiplied."""


class MklPrepackedWeight:
    """Float32, in MKL's blocks."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._prepacked = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        self._shape = weight.new_zeros(()).expand(weight.shape)  # asked for its sizes alone

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See PrepackedWeight."""
        rows = inputs.numel() // inputs.shape[-1]  # torch would multiply by `_shape` if it were told another number
        return torch.ops.mkl._mkl_linear(inputs, self._prepacked, self._shape, bias, rows)

    def silu(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See PrepackedWeight."""
        return silu(self.multiply(inputs, bias), inplace=True)

    def plus(self, inputs: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        """See PrepackedWeight."""
        return self.multiply(inputs, bias).add_(other)

    def times(self, inputs: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        """See PrepackedWeight."""
        return self.multiply(inputs, bias).mul_(other)


class OneDnnPrepackedWeight:
    """Float32 or bfloat16, in oneDNN's blocks; what comes after the product is done before it leaves the registers."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._prepacked = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See PrepackedWeight."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self._prepacked, bias, "none", [], "")

    def silu(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See PrepackedWeight."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self._prepacked, bias, "swish", [], "")

    def plus(self, inputs: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        """See PrepackedWeight."""
        return torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._prepacked, bias, "add")

    def times(self, inputs: Tensor, bias: Tensor | None, other: Tensor) -> Tensor:
        """See PrepackedWeight."""
        return torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._prepacked, bias, "mul")


class PrepackedLinear(nn.Module):
    """In place of an `nn.Linear`, for inference on a CPU. The plain weight is not kept, unless it is tied to another.

    `weight` has the shape, type and device of the weight, and no memory: `load` is how values come in.
    """

    def __init__(self, linear: nn.Linear, *, rows: int, tied: bool, fused_qkv: "FusedQKVLinear | None" = None) -> None:
        """`fused_qkv`: the product of several layers that this one is a part of; its own cannot be called then."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._rows, self._tied, self._fused_qkv = rows, tied, fused_qkv
        plain = linear.weight
        self.weight = plain if tied else nn.Parameter(plain.new_zeros(()).expand(plain.shape), requires_grad=False)
        self._take(plain)

    def load(self, weight: Tensor) -> None:
        """Take new values `[out, in]` of any floating type, from any device."""
        if self._tied:
            self.weight.copy_(weight)
        self._take(weight.to(self.weight))

    def drop(self) -> None:
        """Free the packed values, until new ones are loaded."""
        holder = self if self._fused_qkv is None else self._fused_qkv
        vars(holder).pop("_prepacked", None)

    def _take(self, weight: Tensor) -> None:
        if self._fused_qkv is not None:
            self._fused_qkv.take(self, weight)
        else:
            self._prepacked = prepack(weight, self._rows)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return self._prepacked.multiply(inputs, self.bias)

    def silu(self, inputs: Tensor) -> Tensor:
        """SiLU of the product."""
        return self._prepacked.silu(inputs, self.bias)

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        """The product and `other`, added."""
        return self._prepacked.plus(inputs, self.bias, other)

    def times(self, inputs: Tensor, other: Tensor) -> Tensor:
        """The product and `other`, multiplied."""
        return self._prepacked.times(inputs, self.bias, other)

    def extra_repr(self) -> str:
        """As of an `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class FusedQKVLinear:
    """Layers that share their inputs, as one product: theirs, one after the other in the last dimension.

    `layers` take the places of the given ones in the model, for their names: new values come in through them.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, rows: int) -> None:
        self._rows = rows
        self._pending_weights: dict[PrepackedLinear, Tensor] = {}
        self.layers: list[PrepackedLinear] = []
        self.layers = [PrepackedLinear(linear, rows=rows, tied=False, fused_qkv=self) for linear in linears]
        self._prepack()

    def take(self, layer: PrepackedLinear, weight: Tensor) -> None:
        """New values of one of the layers; they count when those of all have come."""
        self._pending_weights[layer] = weight
        if len(self._pending_weights) == len(self.layers):
            self._prepack()

    def _prepack(self) -> None:
        self._prepacked = prepack(torch.cat([self._pending_weights.pop(layer) for layer in self.layers]), self._rows)

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[..., in]` -> `[..., sum of out]`."""
        biases: list[Tensor] = [layer.bias for layer in self.layers]
        return self._prepacked.multiply(inputs, None if biases[0] is None else torch.cat(biases))


def prepack_linears(model: nn.Module, *, rows: int) -> int:
    """Replace every plain linear layer, for products of about `rows` rows; returns how many: 0 where it cannot be done.

    Of a layer in float64, on another device, or of a class of its own nothing is changed.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    parameters = [p for module in model.modules() for p in module.parameters(recurse=False)]
    uses = {id(p): sum(p is other for other in parameters) for p in (m.weight for m in linears.values())}
    suited = {name: m for name, m in linears.items() if can_prepack(m.weight.dtype, m.weight.device)}
    for name, linear in suited.items():
        parent, _, attribute = name.rpartition(".")
        prepacked = PrepackedLinear(linear, rows=rows, tied=uses[id(linear.weight)] > 1)
        setattr(model.get_submodule(parent), attribute, prepacked)
    return len(suited)


def prepacked_weights(model: nn.Module) -> dict[int, PrepackedLinear]:
    """The layers that take a weight's values instead of its parameter, by that parameter's identity."""
    return {id(module.weight): module for module in model.modules() if isinstance(module, PrepackedLinear)}


def drop_prepacked(model: nn.Module) -> None:
    """Free what the packed layers hold, until new values are loaded."""
    for layer in prepacked_weights(model).values():
        layer.drop()


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Are the operators there, and do they multiply as they should?"""
    return device.type == "cpu" and _kind(dtype) is not None


def prepack(weight: Tensor, rows: int) -> PrepackedWeight:
    """A weight of a type that `can_prepack`."""
    kind = _kind(weight.dtype)
    assert kind is not None, f"weights of {weight.dtype} cannot be packed here"
    return kind(weight.detach().contiguous(), rows)


@cache
def _kind(dtype: torch.dtype) -> type[MklPrepackedWeight] | type[OneDnnPrepackedWeight] | None:
    """The blocks for a type; it depends on processor and torch alone, so that equal runs compute equal bits."""
    if dtype == torch.float32 and torch.backends.mkl.is_available() and _multiplies(MklPrepackedWeight, dtype):
        return MklPrepackedWeight
    is_known = dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    return OneDnnPrepackedWeight if is_known and _multiplies(OneDnnPrepackedWeight, dtype) else None


def _multiplies(kind: type[MklPrepackedWeight] | type[OneDnnPrepackedWeight], dtype: torch.dtype) -> bool:
    """Packed for one number of rows, are products of that number and of others right?"""
    rows, inputs, outputs = PROBE
    weight = torch.linspace(-1, 1, outputs * inputs).view(outputs, inputs).to(dtype)
    bias = torch.linspace(-1, 1, outputs).to(dtype)
    bound = 4 * torch.finfo(dtype).eps * inputs
    try:
        prepacked = kind(weight, rows)
        for n in (1, rows, 7 * rows):
            x = torch.linspace(-1, 1, n * inputs).view(n, inputs).to(dtype)
            expected = nn.functional.linear(x.double(), weight.double(), bias.double())
            if not (prepacked.multiply(x, bias).double() - expected).abs().max() <= bound:
                return False
    except (AttributeError, NotImplementedError, RuntimeError):  # another processor, or a torch without them
        return False
    return True
