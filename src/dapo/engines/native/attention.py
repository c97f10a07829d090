"""The attention and mask functions that the engine registers with transformers under its own name.

A decode step attends in one of two ways. On a GPU in bfloat16 or float16 the rows' lengths bound what each of them
reads, and no mask is made (`RowLengths`). Elsewhere its queries `[n, heads, 1, d]` are seen as `[n, kv_heads, group,
d]`, so keys and values are never repeated for the heads that share them, and masks come from the model's own mask
functions, evaluated at the slots' positions, once per forward. Either way sliding windows are the model's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

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


VarlenAttention: TypeAlias = Callable[..., Tensor]
"""`torch.nn.attention.varlen.varlen_attn`, or an equivalent function."""


@dataclass(frozen=True)
class RowLengths:
    """The positions of each row that a decode step attends to without a mask: the first ones, up to the query's own."""

    attend: VarlenAttention
    num_splits: int | None
    lengths: Tensor  # [n] int32, positions in use
    cu_queries: Tensor  # [n + 1] int32: one query per row
    cu_keys: Tensor  # [n + 1] int32: where each row begins among all positions
    longest: int
    window: int | None = None  # positions that a query sees, including its own; None: all

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """Attention of `[n, heads, d]` over `[positions, kv_heads, d]`; returns `[n, heads, d]`."""
        # A single query at the end of its row sees all of it: (-1, -1) is causal, and lets the kernel read keys once
        # for the heads that share them. The left bound of a window does not count the query's own position.
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


PromptStates: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Keys and values `[1, kv_heads, positions, d]` of a prompt, for each layer."""


@dataclass(frozen=True)
class SharedPrompts:
    """The attention of a decode step whose rows share prompts that are stored outside of the rows.

    A row attends to its own positions and to its prompt separately; the sums of exponentials of the scores weigh the
    two results. A prompt is read once for all its rows, which form one product.
    """

    positions: Tensor  # [n] in the rows, of the queries
    prompts: Sequence[tuple[Tensor, PromptStates]]
    """The rows `[k]` of each prompt, and the prompt's keys and values."""
    mask: Tensor | None = None  # [n, 1, 1, length] over the rows' own positions

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, layer: int) -> Tensor:
        """Attention of `[n, kv_heads, group, d]` over `[n, kv_heads, length, d]` and the prompts."""
        output, sums = _attend_with_sums(query, keys, values, attn_mask=self.mask, scale=scaling)
        for rows, states in self.prompts:
            queries = query[rows].transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, rows * group, d]
            found, found_sums = _attend_with_sums(queries, *states[layer], scale=scaling)
            of_prompt = found[0].unflatten(1, (len(rows), -1)).transpose(0, 1)  # [rows, kv_heads, group, d]
            prompt_sums = found_sums[0].unflatten(1, (len(rows), -1)).transpose(0, 1)
            weight = torch.sigmoid(sums[rows] - prompt_sums).unsqueeze(3).to(output.dtype)
            output[rows] = torch.lerp(of_prompt, output[rows], weight)
        return output


_attend_with_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The CPU kernel of `scaled_dot_product_attention`; it also returns the logarithms of the sums of exponentials."""


def register() -> None:
    """Register `NAME` with transformers, and turn off cuDNN's attention; repeating it changes nothing.

    torch prefers cuDNN on an H100, which plans each new shape for tens to hundreds of milliseconds, and nearly every
    step of an engine has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(NAME, native_attention)
    AttentionMaskInterface.register(NAME, native_mask)


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | RowLengths | SharedPrompts | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention of `[n, heads, q, d]` over `[n, kv_heads, length, d]`; returns `[n, q, heads, d]`.

    With `RowLengths` instead of a mask, keys and values are `[positions, kv_heads, d]` as `cache.LengthSlots` returns
    them. Raises EngineError for what this engine does not compute (`UNSUPPORTED`).
    """
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise EngineError(f"{what} ({name})")
    if isinstance(attention_mask, RowLengths):
        return attention_mask(query.squeeze(2), key, value, scaling).unsqueeze(1), None
    n, heads, length, width = query.shape
    shared = key.shape[1]
    if isinstance(attention_mask, SharedPrompts):
        grouped = query.reshape(n, shared, heads // shared, width)
        attn_output = attention_mask(grouped, key, value, scaling, int(module.layer_idx))  # type: ignore[arg-type]
        return attn_output.reshape(n, 1, heads, width), None
    if length == 1:
        grouped = query.reshape(n, shared, heads // shared, width)
        attn_output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return attn_output.reshape(n, 1, heads, value.shape[-1]), None
    causal = attention_mask is None
    if attention_mask is not None and query.is_cuda:
        # CUDA's kernels that take a mask do not take grouped heads: torch would make the whole matrix of scores
        key, value = (states.repeat_interleave(heads // shared, dim=1) for states in (key, value))
    attn_output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=key.shape[1] != heads
    )
    return attn_output.transpose(1, 2), None


def native_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor | RowLengths | SharedPrompts = 0,
    mask_function: Callable[..., Tensor] | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **others: object,
) -> Tensor | RowLengths | SharedPrompts | None:
    """The positions that queries may attend to, from the model's own `mask_function(batch, head, query, key)`.

    A prefill gives `[1, 1, q, q_offset + q]` booleans, or None where that is plain causal (`q_offset` 0). A decode step
    (`q_offset` `[n]`, each row's position) gives `[n, 1, 1, kv_length]` of 0 and -inf in `dtype`: attention on the CPU
    would convert booleans to it once per layer instead of once per step. A decode step that knows its rows' lengths
    (`q_offset` is `RowLengths`) gets them back, with the window of the model's mask function.
    """
    if mask_function is None:
        raise EngineError("a model without a mask function")
    if isinstance(q_offset, RowLengths):
        if others.get("use_vmap"):  # set by transformers where a model extends its causal or sliding mask
            raise EngineError("a mask function of its own")
        return q_offset if local_size is None else replace(q_offset, window=local_size)
    if isinstance(q_offset, SharedPrompts):
        if local_size is not None:
            raise EngineError("a window over a shared prompt")
        mask = native_mask(
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset.positions,
            mask_function=mask_function,
            dtype=dtype,
            device=device,
        )
        assert isinstance(mask, Tensor)
        return replace(q_offset, mask=mask)
    keys = torch.arange(kv_length, device=device)[None, None, None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    if isinstance(q_offset, Tensor):
        allowed = mask_function(zero, zero, q_offset[:, None, None, None], keys)
        return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))
    if allow_is_causal_skip and q_offset == 0 and (local_size is None or q_length <= local_size):
        return None
    return mask_function(
        zero, zero, torch.arange(q_offset, q_offset + q_length, device=device)[None, None, :, None], keys
    )
