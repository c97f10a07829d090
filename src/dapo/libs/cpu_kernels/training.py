"""Functions with gradients, for the update.

RMSNorm, the gate of a feed-forward block, attention over a packed stream, and log-probabilities and
entropies from logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .compiled import call, serves

_ROWS = 64  # of a block of the backward: ROWS in kernels.cpp


def normalize(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of a contiguous tensor over its last dimension, and 1 / sqrt(mean(x^2) +
    epsilon) of each row.
    """
    width = x.shape[-1]
    out = torch.empty_like(x)
    scales = torch.empty(x.numel() // width, dtype=torch.float32)
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
        gradient = gradient.contiguous()
        width = x.shape[-1]
        input_gradient = torch.empty_like(x)
        sums = torch.zeros(-(-len(scales) // _ROWS), width, dtype=torch.float32)
        call("norm_backward", x, weight, gradient, input_gradient, scales, sums, len(scales), width)
        return input_gradient, sums.sum(0).to(weight.dtype), None


class SiluGate(torch.autograd.Function):
    """silu(gate) * up; `apply(gate, up)`. It keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        out = torch.empty_like(gate)
        call("gate_forward", gate, up, out, gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gate_gradient = torch.empty_like(gate)
        up_gradient = torch.empty_like(up)
        call(
            "gate_backward",
            gate,
            up,
            gradient.contiguous(),
            gate_gradient,
            up_gradient,
            gate.numel(),
        )
        return gate_gradient, up_gradient


class OneDnnLinear(torch.autograd.Function):
    """x W^T + b by oneDNN in float32, and its gradients; `apply(x, weight, bias)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _multiply(gradient, weight.T) if needs_input else None,
            _multiply(rows.T, x.reshape(len(rows), -1).T) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: in float32 on an AMD processor by oneDNN, elsewhere by PyTorch's function.

    PyTorch multiplies float32 by MKL, which leaves the wide vectors of AMD's processors unused.
    """
    if (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel()
        and prefers_onednn()
    ):
        out: Tensor = OneDnnLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return torch.nn.functional.linear(x, weight, bias)


@lru_cache(1)
def prefers_onednn() -> bool:
    """Return True if `linear` multiplies float32 by oneDNN on this machine: on AMD's processors
    under Linux.
    """
    try:
        vendor = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return vendor and torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()


def add_gradient_(sums: Tensor, gradient: Tensor) -> None:
    """Add a gradient of any type, dense or of some rows of an embedding, to sums."""
    if gradient.is_sparse:
        sums.index_add_(0, gradient._indices()[0], gradient._values().to(sums.dtype))
    elif (
        sums.dtype == torch.float32
        and serves(gradient)
        and sums.is_contiguous()
        and gradient.is_contiguous()
    ):
        call("add", gradient, sums, gradient.numel())
    else:
        sums += gradient


def use_sparse_embeddings(model: nn.Module) -> None:
    """Give embeddings on a CPU gradients of the rows that were read; an embedding that is sharded
    stays as it is.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module.weight) is nn.Parameter:
            module.sparse = module.weight.device.type == "cpu"


@dataclass(frozen=True)
class Segments:
    """The parts of a packed stream that attend as one sequence each; all tensors are int64, on the
    CPU.

    Attributes:
        starts: `[n]` the first token of each, in the stream; its own tokens are consecutive.
        lengths: `[n]` the number of its own tokens.
        offsets: `[n + 1]` where its keys begin in `indices`, and where the last one's end.
        indices: the tokens of its keys in the order of their positions; the last ones are its own
            tokens.
    """

    starts: Tensor
    lengths: Tensor
    offsets: Tensor
    indices: Tensor


def can_attend_to_segments(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if `SegmentAttention` serves queries, keys and values like these."""
    same = keys.shape == values.shape and query.dtype == keys.dtype == values.dtype
    return same and query.shape[-1] == keys.shape[-1] and serves(query, query.shape[-1])


class SegmentAttention(torch.autograd.Function):
    """The causal attention of each segment; `apply(query, keys, values, segments, scale)`.

    `query`, like the result, is `[tokens, heads, width]`, `keys` and `values` are `[tokens,
    kv_heads, width]`. Every token is in one segment. It keeps its inputs only: the backward
    computes the weights again.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        query, keys, values = map(_with_joined_heads, (query, keys, values))
        ctx.save_for_backward(query, keys, values)
        ctx.segments = segments
        ctx.scale = scale
        out = query.new_empty(query.shape)
        _attend((query, keys, values), (None, out, None, None, None), segments, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values = ctx.saved_tensors
        query_gradient, key_gradient, value_gradient = (
            states.new_empty(states.shape) for states in (query, keys, values)
        )
        gathered = torch.empty(len(ctx.segments.indices), 2, *keys.shape[1:], dtype=torch.float32)
        outputs = gradient.contiguous(), query_gradient, key_gradient, value_gradient, gathered
        _attend((query, keys, values), outputs, ctx.segments, ctx.scale)
        return query_gradient, key_gradient, value_gradient, None, None


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor | None, ...],
    segments: Segments,
    scale: float,
) -> None:
    tokens, heads, width = inputs[0].shape
    key_heads = inputs[1].shape[1]
    segment_tensors = segments.starts, segments.lengths, segments.offsets, segments.indices
    sizes = (
        len(segments.starts),
        key_heads,
        heads // key_heads,
        width,
        *(states.stride(0) for states in inputs),
        tokens,
    )
    call("segments", *inputs, *outputs, *segment_tensors, *sizes, scale)


def _with_joined_heads(states: Tensor) -> Tensor:
    """`[tokens, heads, width]` whose tokens may lie apart, but not their heads."""
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


class TokenScores(torch.autograd.Function):
    """Log-probabilities `[n]` of targets and entropies `[m]` in nats, float32, both of
    softmax(logits / temperature).

    `apply(logits, targets, ends, temperature, with_entropy)`: `logits` are `[m, vocabulary]`,
    contiguous, `targets` `[n]` token ids in the order of the rows, and `ends` `[m]` int64 the
    number of targets of the rows up to each. The backward runs once: it writes the gradient over
    the logits. Entropies carry a gradient if `with_entropy`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ends: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        m, vocabulary = logits.shape
        logprobs, entropies, normalizers = (
            torch.empty(n, dtype=torch.float32) for n in (len(targets), m, 2 * m)
        )
        tensors = targets, ends, logprobs, entropies, normalizers
        call("score_forward", logits, *tensors, m, vocabulary, 1 / temperature)
        ctx.save_for_backward(*tensors)
        ctx.logits = logits
        ctx.temperature = temperature
        ctx.with_entropy = with_entropy  # not saved: overwritten
        if not with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits = ctx.logits
        del ctx.logits
        slopes = by_logprob.contiguous(), by_entropy.contiguous() if ctx.with_entropy else None
        call(
            "score_backward",
            logits,
            *ctx.saved_tensors,
            *slopes,
            *logits.shape,
            1 / ctx.temperature,
        )
        return logits, None, None, None, None


def fuse_layers(model: nn.Module) -> int:
    """Make a transformers model compute by these functions; returns the number of its norms and
    gates that do.

    Norms are modules named `...RMSNorm` that multiply by `weight` with `variance_epsilon`, gates
    those with `gate_proj`, `up_proj`, `down_proj` and the activation SiLU. Inputs of other types or
    widths, or on another device, take a module's own forward, but norms on a GPU PyTorch's kernel.
    Linear layers compute by `linear`.
    """
    fused = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module, module.forward)
            fused += 1
        elif all(hasattr(module, f"{name}_proj") for name in ("gate", "up", "down")) and _is_silu(
            module
        ):
            module.forward = partial(_feed_forward, module, module.forward)
            fused += 1
        elif type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
    return fused


def _is_silu(module: Any) -> bool:
    activation = getattr(module, "act_fn", None)
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _norm(module: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.is_cuda and module.weight.dtype == x.dtype:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
    if not serves(x, x.shape[-1]) or module.weight.dtype != x.dtype:
        return forward(x)
    out: Tensor = RMSNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def _feed_forward(module: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not serves(x):
        return forward(x)
    gate = module.gate_proj(x)
    up = module.up_proj(x)
    if serves(gate, gate.shape[-1]) and gate.dtype == up.dtype:
        gated = SiluGate.apply(gate, up)  # type: ignore[no-untyped-call]
    else:
        gated = module.act_fn(gate) * up
    out: Tensor = module.down_proj(gated)
    return out
