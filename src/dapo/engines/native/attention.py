"""The attention and mask functions that the engine registers with transformers under its own name.

A decode step's queries `[n, heads, 1, d]` are seen as `[n, kv_heads, group, d]`, so keys and values are never repeated
for the heads that share them. Masks come from the model's own mask functions, evaluated at the slots' positions, once
per forward: sliding windows are therefore always the model's own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from dapo.core.errors import EngineError

NAME = "dapo_native"

UNSUPPORTED = {
    "softcap": "soft-capped attention",
    "s_aux": "attention sinks",
    "position_bias": "a position bias in attention",
    "head_mask": "a mask over heads",
}


def register() -> None:
    """Register `NAME` with transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, native_attention)
    AttentionMaskInterface.register(NAME, native_mask)


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention of `[n, heads, q, d]` over `[n, kv_heads, length, d]`; returns `[n, q, heads, d]`.

    Raises EngineError for what this engine does not compute (`UNSUPPORTED`).
    """
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise EngineError(f"{what} ({name})")
    n, heads, length, width = query.shape
    shared = key.shape[1]
    if length == 1:
        grouped = query.reshape(n, shared, heads // shared, width)
        attn_output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return attn_output.reshape(n, 1, heads, value.shape[-1]), None
    causal, gqa = attention_mask is None, shared != heads
    attn_output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=gqa
    )
    return attn_output.transpose(1, 2), None


def native_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **others: object,
) -> Tensor | None:
    """The positions that queries may attend to, from the model's own `mask_function(batch, head, query, key)`.

    A prefill (`q_offset` 0) gives `[1, 1, q, q]` booleans, or None where that is plain causal. A decode step
    (`q_offset` `[n]`, each row's position) gives `[n, 1, 1, kv_length]` of 0 and -inf in `dtype`: attention on the CPU
    would convert booleans to it once per layer instead of once per step.
    """
    if mask_function is None:
        raise EngineError("a model without a mask function")
    keys = torch.arange(kv_length, device=device)[None, None, None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    if isinstance(q_offset, Tensor):
        allowed = mask_function(zero, zero, q_offset[:, None, None, None], keys)
        return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))
    if allow_is_causal_skip and (local_size is None or q_length <= local_size):
        return None
    return mask_function(zero, zero, torch.arange(q_length, device=device)[None, None, :, None], keys)
