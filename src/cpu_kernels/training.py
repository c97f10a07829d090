"""Functions with gradients, for the update: RMSNorm, and the gate of a feed-forward block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpu_kernels.compiled import call, serves

_ROWS = 64  # of a block of the backward: ROWS in kernels.cpp


def normalize(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The RMSNorm of a contiguous tensor over its last dimension, and 1 / sqrt(mean(x^2) + epsilon) of each row."""
    width = x.shape[-1]
    out, scales = torch.empty_like(x), torch.empty(x.numel() // width, dtype=torch.float32)
    call("norm_forward", x, weight, out, scales, len(scales), width, epsilon)
    return out, scales


class RMSNorm(torch.autograd.Function):
    """y = x s w with s = 1 / sqrt(mean(x^2) + epsilon) for each row; `apply(x, weight, epsilon)`.

    dL/dx = s (w g - x s^2 mean(w g x)), dL/dw = the sum of g x s over the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        out, scales = normalize(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        gradient, width = gradient.contiguous(), x.shape[-1]
        of_x, sums = torch.empty_like(x), torch.zeros(-(-len(scales) // _ROWS), width, dtype=torch.float32)
        call("norm_backward", x, weight, gradient, of_x, scales, sums, len(scales), width)
        return of_x, sums.sum(0).to(weight.dtype), None


class SiluGate(torch.autograd.Function):
    """silu(gate) * up; `apply(gate, up)`. It keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        call("gate_forward", gate, up, out, gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        call("gate_backward", gate, up, gradient.contiguous(), of_gate, of_up, gate.numel())
        return of_gate, of_up


def fuse_layers(model: nn.Module) -> int:
    """Make the norms and gates of a transformers model compute by these functions; returns the number of both.

    Norms are modules named `...RMSNorm` that multiply by `weight` with `variance_epsilon`, gates those with
    `gate_proj`, `up_proj`, `down_proj` and the activation SiLU. Inputs of other types or widths, or on another device,
    take a module's own forward.
    """
    fused = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module, module.forward)
            fused += 1
        elif all(hasattr(module, f"{name}_proj") for name in ("gate", "up", "down")) and _is_silu(module):
            module.forward = partial(_feed_forward, module, module.forward)
            fused += 1
    return fused


def _is_silu(module: Any) -> bool:
    activation = getattr(module, "act_fn", None)
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _norm(module: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not serves(x, x.shape[-1]) or module.weight.dtype != x.dtype:
        return forward(x)
    out: Tensor = RMSNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def _feed_forward(module: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not serves(x):
        return forward(x)
    gate, up = module.gate_proj(x), module.up_proj(x)
    if serves(gate, gate.shape[-1]) and gate.dtype == up.dtype:
        gated = SiluGate.apply(gate, up)  # type: ignore[no-untyped-call]
    else:
        gated = module.act_fn(gate) * up
    out: Tensor = module.down_proj(gated)
    return out
