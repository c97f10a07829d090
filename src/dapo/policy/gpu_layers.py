"""Faster layers of an update on a GPU, from packages that may be installed there.

`liger-kernel`: the rotary embedding and the gate of a feed-forward layer in one kernel each. The
gate's product is computed again in the backward instead of being kept: at the sizes of Qwen2.5-7B a
layer keeps 121 kB a token instead of 197. `flash_attn_interface`: FlashAttention 3, by PyTorch's
registry, in the place of FlashAttention 2. Where a package is absent nothing changes.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

LIGER = "liger_kernel"
FLASH_ATTENTION_3 = "flash_attn_interface"
HOPPER = (9, 0)  # the compute capability that FlashAttention 3 is written for
ROTATES_ALIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose rotary embedding is Liger's: of all of a head, by halves."""


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@dataclass(frozen=True)
class LayerFunctions:
    """Differentiable functions that replace parts of a layer."""

    gate: Callable[[Tensor, Tensor], Tensor]
    """Returns silu(gate) * up."""
    rotate: Callable[..., tuple[Tensor, Tensor]]
    """Returns the rotated `query` and `key`, of `(query, key, cos, sin)`; may write into them."""
    serves: Callable[[Tensor], bool] = _is_on_gpu
    """Whether a tensor is computed by them."""


def liger_functions() -> LayerFunctions | None:
    """Return Liger's functions; None without a GPU, or without a Liger that can be imported."""
    if not torch.cuda.is_available() or find_spec(LIGER) is None:
        return None
    try:
        functional: Any = importlib.import_module(f"{LIGER}.transformers.functional")
        return LayerFunctions(functional.liger_swiglu, functional.liger_rope)
    # it needs Triton, and other versions have other names: PyTorch's functions do the same work
    except (ImportError, AttributeError):
        return None


def use_layer_functions(model: PreTrainedModel, functions: LayerFunctions) -> int:
    """Make a transformers model compute by these functions; returns the number of its gates that do.

    Tensors that they do not serve are computed as before. Call it after `fuse_layers`.
    """
    count = 0
    for module in model.modules():
        own: Any = module
        if all(hasattr(module, f"{name}_proj") for name in ("gate", "up", "down")) and _is_silu(
            own
        ):
            own.forward = partial(_feed_forward, own, own.forward, functions)
            count += 1
    if model.config.model_type in ROTATES_ALIKE:
        # the attention layers find the function by its name in their file
        file: Any = sys.modules[type(model).__module__]
        plain = getattr(file.apply_rotary_pos_emb, "plain", file.apply_rotary_pos_emb)
        rotate: Any = partial(_rotate, plain, functions)
        rotate.plain = plain
        file.apply_rotary_pos_emb = rotate
    return count


def _is_silu(module: Any) -> bool:
    activation = getattr(module, "act_fn", None)
    is_silu = isinstance(activation, torch.nn.SiLU)
    return is_silu or type(activation).__name__ == "SiLUActivation"


def _rotate(
    plain: Callable[..., tuple[Tensor, Tensor]],
    functions: LayerFunctions,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if options or not functions.serves(query):
        return plain(query, key, cos, sin, **options)
    return functions.rotate(query, key, cos, sin)


def _feed_forward(
    module: Any, forward: Callable[[Tensor], Tensor], functions: LayerFunctions, x: Tensor
) -> Tensor:
    if not functions.serves(x):
        return forward(x)
    gate = module.gate_proj(x)
    up = module.up_proj(x)
    down = module.down_proj
    out: Tensor
    if type(down) is nn.Linear:
        out = GatedProduct.apply(gate, up, down.weight, down.bias, functions.gate)  # type: ignore[no-untyped-call]
    else:  # with an adapter, which has more than one use of the product
        out = down(functions.gate(gate, up))
    return out


class GatedProduct(torch.autograd.Function):
    """(silu(gate) * up) W^T + b; `apply(gate, up, weight, bias, function)`.

    The function gives silu(gate) * up. Its result is computed again in the backward. Saved-tensor
    hooks around `down_proj` would do so too, but take its tensors from `recompute_layers`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        function: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(gate, up, weight)
        return linear(function(gate, up), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        with torch.enable_grad():
            inputs = (gate.detach().requires_grad_(), up.detach().requires_grad_())
            product = ctx.function(*inputs)
        rows = gradient.reshape(-1, gradient.shape[-1])
        for_weight = None
        if ctx.needs_input_grad[2]:
            for_weight = rows.T @ product.detach().reshape(-1, product.shape[-1])
        for_bias = None
        if ctx.needs_input_grad[3]:
            for_bias = rows.sum(0)
        # last: it may write over the gate and the other product
        for_gate, for_up = torch.autograd.grad(product, inputs, gradient @ weight)
        return for_gate, for_up, for_weight, for_bias, None


def use_flash_attention_3() -> bool:
    """Let PyTorch's attention on this process's GPU be FlashAttention 3; False where it cannot."""
    if not torch.cuda.is_available() or find_spec(FLASH_ATTENTION_3) is None:
        return False
    if torch.cuda.get_device_capability() != HOPPER:
        return False
    from torch.nn import attention

    if attention.current_flash_attention_impl() == "FA3":
        return True
    try:
        attention.activate_flash_attention_impl("FA3")
    # a module without a backward, or a PyTorch without this registry's entry
    except (ImportError, RuntimeError, ValueError):
        return False
    return True


def layer_notes(device_type: str) -> list[str]:
    """Return a line on the kernels of updates on a GPU; nothing on a CPU."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return []
    attention = "FlashAttention 3" if use_flash_attention_3() else "PyTorch's FlashAttention"
    layers = "PyTorch's layers"
    if liger_functions() is not None:
        layers = "Liger's rotary embedding and gate"
    return [f"updates compute by {attention} and {layers}"]
