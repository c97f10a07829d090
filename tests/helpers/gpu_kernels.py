"""The kernels that a GPU would choose, for fake CUDA tensors in a PyTorch that was built without
CUDA.

RMS norm is one kernel. Scaled dot-product attention takes the kernel that a GPU takes with cuDNN
off: flash attention without a mask, the memory-efficient one with a mask or in float32, plain
products where keys and values are shared. Attention's operators are PyTorch's own, so what they
save for the backward is the real thing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class KernelsOfGpu(TorchFunctionMode):
    """Calls of RMS norm and attention on fake tensors go to the kernels of a GPU; `count` is told
    of those it lacks.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention and isinstance(args[0], FakeTensor):
            return _attend(*args, **(kwargs or {}))
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _copy_of(*args)
        if func is rms_norm and isinstance(args[0], FakeTensor):
            return _rms_norm(self._count, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _copy_of(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    """`copy.deepcopy` of a tensor, of which PyTorch's own reads the memory."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        memo[id(tensor)] = (
            Parameter(copied, tensor.requires_grad) if isinstance(tensor, Parameter) else copied
        )
    return memo[id(tensor)]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    width = query.shape[-1]
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16) and width <= 256:
        padded = [
            pad(states, (0, -width % 8)) if width % 8 else states for states in (query, key, value)
        ]
        scale = width**-0.5 if scale is None else scale
        return aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0][..., :width]
    if enable_gqa and query.shape[1] != key.shape[1]:  # then only the plain kernel is left
        key, value = (
            x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value)
        )
        mask = (
            attn_mask
            if attn_mask is None or attn_mask.dtype == torch.bool
            else attn_mask.to(query.dtype)
        )
        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, float("-inf")
            )
        if any(stride % 16 for stride in attn_mask.stride()[:-1]) or attn_mask.stride(-1) != 1:
            length = attn_mask.shape[-1]
            attn_mask = pad(attn_mask, (0, 16 - length % 16))[..., :length]
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _rms_norm(
    count: Callable[[str], None],
    states: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is None or weight.dtype == states.dtype:
        return _FusedRmsNorm.apply(count, states, list(normalized_shape), weight)
    # in eight kernels, with a warning on a GPU
    return torch.rms_norm(states, normalized_shape, weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The CUDA kernel, which a build for the CPU does not have."""

    @staticmethod
    def forward(
        ctx: Any,
        count: Callable[[str], None],
        states: Tensor,
        shape: list[int],
        weight: Tensor | None,
    ) -> Tensor:
        count("aten._fused_rms_norm.default")
        outer = states.shape[: states.dim() - len(shape)]
        rstd = states.new_empty((*outer, *(1 for _ in shape)), dtype=torch.float32)
        ctx.save_for_backward(states, rstd, weight)
        ctx.shape = shape
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        of_states, of_weight = aten._fused_rms_norm_backward(
            gradient, states, ctx.shape, rstd, weight, wanted
        )
        return None, of_states, None, of_weight
