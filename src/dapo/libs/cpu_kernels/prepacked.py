"""Linear layers whose weights are stored in the order in which the processor's matmul reads them.

A decode step multiplies few rows by every weight of the model. An ordinary matmul first reorders
each weight into blocks, which at 64 rows takes about as long as the arithmetic. Weights change once
per training step but are read for every token, so they are reordered when they are loaded. By
default float32 uses MKL's blocks (oneDNN's if there is no MKL) and bfloat16 oneDNN's. Blocks work
for any number of rows, and best for the given one.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from . import can_multiply, multiply, pack_panels

PROBE = (5, 24, 40)
"""Rows, inputs and outputs of the product that tests whether this processor and this torch support
the operators.
"""
DEFAULT_KERNELS: Mapping[str, str] = {}
"""The empty choice of kernels, with which each weight uses the default kernel for its type."""
LAYERS = "layers"
COMPILED = "compiled"
"""The entry of a choice of kernels by which `cpu_kernels` computes what lies between a layer's
products.
"""


class PrepackedWeight:
    """A weight `[out, in]` in blocks; products are `[..., in]` -> `[..., out]`."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        raise NotImplementedError

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def silu(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """SiLU of the product."""
        return silu(self.multiply(inputs, bias), inplace=True)

    def plus(self, inputs: Tensor, bias: Tensor | None, addend: Tensor) -> Tensor:
        """Return the product plus `other`."""
        return self.multiply(inputs, bias).add_(addend)

    def times(self, inputs: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
        """Return the product times `other`."""
        return self.multiply(inputs, bias).mul_(factor)


class MklPrepackedWeight(PrepackedWeight):
    """A float32 weight in MKL's blocks."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._prepacked = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        self._shape = weight.new_zeros(()).expand(weight.shape)  # only its sizes are read

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        # with a different number torch would multiply by `_shape`
        rows = inputs.numel() // inputs.shape[-1]
        return torch.ops.mkl._mkl_linear(inputs, self._prepacked, self._shape, bias, rows)


class OneDnnPrepackedWeight(PrepackedWeight):
    """A float32 or bfloat16 weight in oneDNN's blocks; activation, sum or gate are fused into the
    product.
    """

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._prepacked = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self._prepacked, bias, "none", [], "")

    def silu(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self._prepacked, bias, "swish", [], "")

    def plus(self, inputs: Tensor, bias: Tensor | None, addend: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(
            inputs, addend, self._prepacked, bias, "add"
        )

    def times(self, inputs: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(
            inputs, factor, self._prepacked, bias, "mul"
        )


class CompiledWeight(PrepackedWeight):
    """A weight in panels, for the compiled product; activation, sum or gate are fused into it.

    It serves float32, and bfloat16 on processors that multiply pairs of it (`avx512_bf16`). A row's
    products do not depend on the number of rows.
    """

    def __init__(self, weight: Tensor, rows: int) -> None:
        if not can_multiply(weight.dtype):
            raise NotImplementedError
        self.packed = pack_panels(weight)
        self._outputs = len(weight)

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(inputs, self.packed, self._outputs, bias)

    def silu(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(inputs, self.packed, self._outputs, bias, "silu")

    def plus(self, inputs: Tensor, bias: Tensor | None, addend: Tensor) -> Tensor:
        return multiply(inputs, self.packed, self._outputs, bias, "plus", addend)

    def times(self, inputs: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
        return multiply(inputs, self.packed, self._outputs, bias, "times", factor)


class PlainWeight(PrepackedWeight):
    """An unchanged copy of a weight, for a processor on which blocks are not faster."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._weight = weight.clone()

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(inputs, self._weight, bias)


KERNELS: Mapping[str, type[PrepackedWeight]] = {
    "mkl": MklPrepackedWeight,
    "onednn": OneDnnPrepackedWeight,
    "compiled": CompiledWeight,
    "plain": PlainWeight,
}
"""Kernels by the names that a run records."""


class PrepackedLinear(nn.Module):
    """Replaces an `nn.Linear` for inference on a CPU.

    The plain weight is kept only if it is tied to another.

    `weight` has the shape, type and device of the weight but no memory; `load` sets values.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        rows: int,
        tied: bool,
        fused_qkv: "FusedQKVLinear | None" = None,
        kernels: Mapping[str, str] = DEFAULT_KERNELS,
    ) -> None:
        """`fused_qkv`: the product of several layers that includes this one, which then cannot be
        called.
        """
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._rows = rows
        self._tied = tied
        self._fused_qkv = fused_qkv
        self._kernels = kernels
        plain = linear.weight
        self.weight = (
            plain
            if tied
            else nn.Parameter(plain.new_zeros(()).expand(plain.shape), requires_grad=False)
        )
        self._take(plain)

    def load(self, weight: Tensor) -> None:
        """Load new values `[out, in]` of any floating type, from any device."""
        if self._tied:
            self.weight.copy_(weight)
        self._take(weight.to(self.weight))

    def drop(self) -> None:
        """Free the prepacked values until new ones are loaded."""
        holder = self if self._fused_qkv is None else self._fused_qkv
        vars(holder).pop("prepacked", None)

    def _take(self, weight: Tensor) -> None:
        if self._fused_qkv is not None:
            self._fused_qkv.take(self, weight)
        else:
            self.prepacked = prepack(weight, self._rows, self._kernels)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return self.prepacked.multiply(inputs, self.bias)

    def silu(self, inputs: Tensor) -> Tensor:
        """SiLU of the product."""
        return self.prepacked.silu(inputs, self.bias)

    def plus(self, inputs: Tensor, addend: Tensor) -> Tensor:
        """Return the product plus `other`."""
        return self.prepacked.plus(inputs, self.bias, addend)

    def times(self, inputs: Tensor, factor: Tensor) -> Tensor:
        """Return the product times `other`."""
        return self.prepacked.times(inputs, self.bias, factor)


class FusedQKVLinear:
    """Layers with the same inputs as one product, whose last dimension concatenates theirs.

    `layers` replace the given layers in the model, so that new values are loaded through them by
    their names.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        *,
        rows: int,
        kernels: Mapping[str, str] = DEFAULT_KERNELS,
    ) -> None:
        self._rows = rows
        self._kernels = kernels
        self._pending_weights: dict[PrepackedLinear, Tensor] = {}
        self.layers: list[PrepackedLinear] = []  # empty until all have taken their first values
        self.layers = [
            PrepackedLinear(linear, rows=rows, tied=False, fused_qkv=self) for linear in linears
        ]
        self._prepack()

    def take(self, layer: PrepackedLinear, weight: Tensor) -> None:
        """Take new values of one layer, which are used once all layers have new values."""
        self._pending_weights[layer] = weight
        if len(self._pending_weights) == len(self.layers):
            self._prepack()

    def _prepack(self) -> None:
        fused = torch.cat([self._pending_weights.pop(layer) for layer in self.layers])
        self.prepacked = prepack(fused, self._rows, self._kernels)

    @property
    def bias(self) -> Tensor | None:
        """`[sum of out]`."""
        biases: list[Tensor] = [layer.bias for layer in self.layers]
        return None if biases[0] is None else torch.cat(biases)

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[..., in]` -> `[..., sum of out]`."""
        return self.prepacked.multiply(inputs, self.bias)


def prepack_linears(
    model: nn.Module, *, rows: int, kernels: Mapping[str, str] = DEFAULT_KERNELS
) -> int:
    """Replace every plain linear layer, for products of about `rows` rows; returns the number of
    replaced layers.

    Layers in float64, on another device than the CPU, or of a subclass do not change. `kernels`
    names the `KERNELS` to use by the shape of a weight (`shape_name`).
    """
    parameters = [p for module in model.modules() for p in module.parameters(recurse=False)]
    suited: dict[str, Any] = {
        name: module for name, module in model.named_modules() if can_prepack(module)
    }
    for name, linear in suited.items():
        parent, _, attribute = name.rpartition(".")
        tied = sum(linear.weight is parameter for parameter in parameters) > 1
        setattr(
            model.get_submodule(parent),
            attribute,
            PrepackedLinear(linear, rows=rows, tied=tied, kernels=kernels),
        )
    return len(suited)


def prepacked_weights(model: nn.Module) -> dict[int, PrepackedLinear]:
    """Return the layers that hold a parameter's values in its place, by the identity of that
    parameter.
    """
    return {
        id(module.weight): module
        for module in model.modules()
        if isinstance(module, PrepackedLinear)
    }


def can_prepack(layer: nn.Module) -> bool:
    """Return True if it is a plain linear layer on the CPU, and working operators exist for its
    weights.
    """
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
        return False
    return default_kernel(layer.weight.dtype) is not None


def prepack(
    weight: Tensor, rows: int, kernels: Mapping[str, str] = DEFAULT_KERNELS
) -> PrepackedWeight:
    """Reorder a weight of a supported type, by the kernel chosen for its shape if this processor
    supports it.
    """
    name = kernels.get(shape_name(*weight.shape))
    if name is None or not multiplies(name, weight.dtype):
        name = default_kernel(weight.dtype)
    assert name is not None, f"weights of {weight.dtype} cannot be prepacked here"
    return KERNELS[name](weight.detach().contiguous(), rows)


def shape_name(outputs: int, inputs: int) -> str:
    """Return the name of a weight's shape in a choice of kernels."""
    return f"{outputs}x{inputs}"


def default_kernel(dtype: torch.dtype) -> str | None:
    """Return the name of the default kernel for a type; None: weights of the type are not
    prepacked.
    """
    candidates = {torch.float32: ("mkl", "onednn"), torch.bfloat16: ("onednn",)}.get(dtype, ())
    return next((name for name in candidates if multiplies(name, dtype)), None)


@cache
def multiplies(name: str, dtype: torch.dtype) -> bool:
    """Return True if a weight prepacked for one number of rows gives correct products for any
    number of rows.
    """
    libraries: dict[str, Any] = {"mkl": torch.backends.mkl, "onednn": torch.backends.mkldnn}
    if name not in KERNELS or (name in libraries and not libraries[name].is_available()):
        return False
    rows, inputs, outputs = PROBE
    weight = torch.linspace(-1, 1, outputs * inputs).view(outputs, inputs).to(dtype)
    bias = torch.linspace(-1, 1, outputs).to(dtype)
    bound = 4 * torch.finfo(dtype).eps * inputs
    try:
        prepacked = KERNELS[name](weight, rows)
        for n in (1, rows, 7 * rows):
            x = torch.linspace(-1, 1, n * inputs).view(n, inputs).to(dtype)
            expected = nn.functional.linear(x.double(), weight.double(), bias.double())
            if not (prepacked.multiply(x, bias).double() - expected).abs().max() <= bound:
                return False
    # this processor or this torch lacks the operators
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
