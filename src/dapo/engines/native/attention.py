"""The attention and mask functions that the engine registers with transformers under its own name.

A decode step attends in one of two ways. On a GPU in bfloat16 or float16 each row attends up to its
own length, without a mask (`RowLengths`). Otherwise its queries `[n, heads, 1, d]` are viewed as
`[n, kv_heads, group, d]`, so keys and values are not repeated for the heads that share them, and
the model's own mask functions are evaluated at the slots' positions once per forward. Sliding
windows come from the model in both cases.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from dapo.core.errors import EngineError
from dapo.libs.cpu_kernels import Rows, attend

NAME = "dapo_native"
UNSUPPORTED = {
    "softcap": "soft-capped attention",
    "s_aux": "attention sinks",
    "position_bias": "a position bias in attention",
    "head_mask": "a mask over heads",
}


# `torch.nn.attention.varlen.varlen_attn`, or an equivalent function
VarlenAttention: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class RowLengths:
    """Attention of a decode step without a mask: a query sees its row up to its own position."""

    attend: VarlenAttention
    num_splits: int | None
    lengths: Tensor  # [n] int32, positions in use
    cu_queries: Tensor  # [n + 1] int32: one query per row
    cu_keys: Tensor  # [n + 1] int32: the first position of each row among all positions
    longest: int
    window: int | None = None  # positions that a query sees, including its own; None: all

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
    ) -> Tensor:
        """Attend with `[n, heads, d]` over `[positions, kv_heads, d]`; return `[n, heads, d]`."""
        # (-1, -1) is causal for a single query at the end of its row, and lets the kernel read keys
        # once for the heads that share them. The left bound of a window does not count the query's
        # own position.
        window = (-1, -1) if self.window is None else (self.window - 1, 0)
        return self.attend(
            query,
            keys,
            values,
            self.cu_queries,
            self.cu_keys,
            1,
            self.longest,
            scale=scaling,
            window_size=window,
            enable_gqa=True,
            seqused_k=self.lengths,
            num_splits=self.num_splits,
        )


def register() -> None:
    """Register `NAME` with transformers, and turn off cuDNN's attention.

    Repeated calls have no effect.

    torch prefers cuDNN on an H100, which plans each new shape for tens to hundreds of milliseconds,
    and nearly every decode step has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(NAME, native_attention)
    AttentionMaskInterface.register(NAME, native_mask)


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | RowLengths | Rows | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Return scaled dot-product attention `[n, q, heads, d]`.

    Args:
        module: the attention module of a layer.
        query: `[n, heads, q, d]`.
        key: `[n, kv_heads, length, d]`; with `RowLengths` `[positions, kv_heads, d]` from
            `cache.LengthSlots`.
        value: of the shape of `key`.
        attention_mask: the mask, or what replaces it in a decode step; None: causal.
        scaling: the factor of scores; None: 1 / sqrt(d).
        dropout: unused; transformers passes it.
        kwargs: other arguments of transformers; those in `UNSUPPORTED` raise EngineError.
    """
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise EngineError(f"{what} ({name})")
    if isinstance(attention_mask, RowLengths):
        return attention_mask(query.squeeze(2), key, value, scaling).unsqueeze(1), None
    if isinstance(attention_mask, Rows):
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        attn_output = attend(query.squeeze(2), key, value, attention_mask, scaling, layer)
        return attn_output.unsqueeze(1), None
    n, heads, length, width = query.shape
    shared = key.shape[1]
    if length == 1:
        grouped = query.reshape(n, shared, heads // shared, width)
        attn_output = scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
        return attn_output.reshape(n, 1, heads, value.shape[-1]), None
    causal = attention_mask is None
    if attention_mask is not None and query.is_cuda:
        # CUDA's kernels with masks do not support grouped heads: torch would compute the whole
        # matrix of scores
        key, value = (states.repeat_interleave(heads // shared, dim=1) for states in (key, value))
    attn_output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=key.shape[1] != heads,
    )
    return attn_output.transpose(1, 2), None


def native_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor | RowLengths | Rows = 0,
    mask_function: Callable[..., Tensor] | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: object,
) -> Tensor | RowLengths | Rows | None:
    """Return the positions that queries may attend to.

    Args:
        q_length: the number of queries.
        kv_length: the number of positions.
        q_offset: the position of the first query, `[n]` if rows begin at different positions.
        mask_function: the model's own function of batch, head, query and key.
        allow_is_causal_skip: whether plain causal attention may go without a mask.
        local_size: the size of a sliding window; None: no window.
        dtype: the type of a mask of numbers.
        device: the device of the mask.
        options: other arguments of transformers.

    A prefill gets `[1, 1, q, q_offset + q]` booleans, or None for plain causal attention
    (`q_offset` 0). A decode step and a prefill with `q_offset` `[n]` get `[n, 1, q, kv_length]` of
    0 and -inf in `dtype`, because attention on the CPU would convert booleans once per layer. A
    decode step with `RowLengths` as `q_offset` gets them back, with the window of the model's mask
    function.
    """
    if mask_function is None:
        raise EngineError("a model without a mask function")
    if isinstance(q_offset, RowLengths | Rows):
        # set by transformers where a model extends its causal or sliding mask
        if options.get("use_vmap"):
            raise EngineError("a mask function of its own")
        if local_size is None:
            return q_offset
        if isinstance(q_offset, RowLengths):
            return replace(q_offset, window=local_size)
        return replace(q_offset, first=(q_offset.lengths - local_size).clamp(min=0))
    keys = torch.arange(kv_length, device=device)[None, None, None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    if isinstance(q_offset, Tensor):
        offsets = torch.arange(q_length, device=device)[None, None, :, None]
        queries = q_offset[:, None, None, None] + offsets
        allowed = mask_function(zero, zero, queries, keys)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~allowed, float("-inf"))
    if allow_is_causal_skip and q_offset == 0 and (local_size is None or q_length <= local_size):
        return None
    queries = torch.arange(q_offset, q_offset + q_length, device=device)[None, None, :, None]
    return mask_function(zero, zero, queries, keys)
