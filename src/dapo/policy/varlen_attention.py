"""Attention over a packed stream by `torch.nn.attention.varlen`: 16-bit types on a GPU.

All segments attend in one call without padding, masks or repeated heads. To the kernel a segment is
a sequence: its queries are its own tokens, its keys those of its context and its own, and the last
query is aligned with the last key. The kernel needs a sequence's keys to be consecutive, so the
keys of a context are copied for each of its segments: in the forward and again in the backward, so
that autograd keeps no copy. Their gradients are added up in float32.

Gradients are not reproducible to the bit: the kernel adds up the gradients of queries, and this
module the gradients of shared keys and values, in the order in which threads finish.
`torch.use_deterministic_algorithms` changes both.

The operators are called like `varlen_attn` of PyTorch 2.13 calls them. Its own backward would keep
the copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dapo.core.processor import BFLOAT16_CAPABILITY
from dapo.policy.segments import Segment
from dapo.policy.transfer import to_device

KEYS_PER_CALL = 2**16
"""The most keys of a call with several sequences, which bounds copies of a shared context."""


@dataclass(frozen=True)
class VarlenCall:
    """N neighbouring segments of the stream that attend in one call of the kernel."""

    rows: slice  # the stream indices of their queries
    keys: Tensor  # `[K]` int32 the stream index of each key, sequence by sequence
    cu_queries: Tensor  # `[N + 1]` int32 the number of queries before each sequence, and in total
    cu_keys: Tensor  # likewise
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class VarlenPlan:
    """The calls for a whole stream, in its order."""

    calls: tuple[VarlenCall, ...]
    # the number of keys before and after its own that a query sees; -1: no limit
    window_size: tuple[int, int]


def attends_by_varlen(query: Tensor, value: Tensor) -> bool:
    """Return True if the kernel serves states `[T, heads, d]` and `[T, kv_heads, d]`."""
    if query.device.type != "cuda" or value.shape[2] != query.shape[2]:
        return False
    capability = torch.cuda.get_device_capability(query.device)
    return supports_varlen(query.dtype, query.shape[2], capability)


def supports_varlen(dtype: torch.dtype, head_width: int, capability: tuple[int, int]) -> bool:
    """Return True if the kernel runs both ways for that width and compute capability."""
    if dtype not in (torch.bfloat16, torch.float16) or capability < BFLOAT16_CAPABILITY:
        return False
    # in between, some GPUs have no backward
    has_backward = head_width <= 192 or 224 < head_width <= 256
    return head_width % 8 == 0 and has_backward


def padded_attention_notes(
    dtype: torch.dtype, device_type: str, capability: tuple[int, int] | None
) -> list[str]:
    """Return a warning, with the reason, if 16-bit training on a GPU cannot use the kernel.

    `capability` is the GPU's compute capability; None: the GPU is on another machine.
    """
    if device_type != "cuda" or dtype.itemsize != 2:
        return []
    if capability is None or capability >= BFLOAT16_CAPABILITY:
        return []
    name = str(dtype).removeprefix("torch.")
    capability_text = ".".join(map(str, capability))
    return [
        f"warning: model.dtype={name} on a GPU of compute capability {capability_text}, below 8.0:"
        " bfloat16 is emulated, and updates attend in padded batches, which takes several times as"
        " long for long responses; model.dtype=auto takes float32 there"
    ]


def build_varlen_plan(
    segments: Sequence[Segment],
    device: torch.device,
    window: int | None,
    *,
    keys_per_call: int = KEYS_PER_CALL,
) -> VarlenPlan:
    """Return the plan for segments that follow each other in the stream without a gap.

    Args:
        segments: the segments.
        device: the device of the plan.
        window: the number of keys that a query sees, its own included; None: all before it.
        keys_per_call: the most keys of a call with several sequences.
    """
    parts = _neighbours(segments, window, keys_per_call)
    calls = tuple(_call(neighbours, device, window) for neighbours in parts)
    # the kernel does not count a query's own key
    keys_before = -1 if window is None else window - 1
    return VarlenPlan(calls, (keys_before, 0))


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, *, scale: float | None
) -> Tensor:
    """Return `[T, heads, d]` outputs, differentiable once.

    Args:
        query: `[T, heads, d]`.
        key: `[T, kv_heads, d]`.
        value: like `key`.
        plan: the calls of the kernel.
        scale: the factor of scores.
    """
    # defines the operators; slow, and useless on a CPU
    from torch.nn.attention import varlen  # noqa: F401

    return _VarlenAttention.apply(query, key, value, plan, scale)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float | None
    ) -> Tensor:
        is_grouped = query.shape[1] != key.shape[1]
        is_causal = plan.window_size == (-1, 0)
        outs = []
        saved = []
        for call in plan.calls:
            k = key.index_select(0, call.keys)
            v = value.index_select(0, call.keys)
            lengths = (call.cu_queries, call.cu_keys, call.max_queries, call.max_keys)
            options = (is_causal, scale, list(plan.window_size))
            out, *for_backward = torch.ops.torch_attn._varlen_attn(
                query[call.rows], k, v, *lengths, *options, enable_gqa=is_grouped
            )
            outs.append(out)
            # the logarithm of each softmax's denominator, and the dropout state
            saved += for_backward
        joined = _joined(outs)
        ctx.save_for_backward(query, key, value, joined, *saved)
        ctx.plan = plan
        ctx.scale = scale
        ctx.is_causal = is_causal
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, joined, *saved = ctx.saved_tensors
        wide = torch.promote_types(key.dtype, torch.float32)
        for_queries = []
        for_key = torch.zeros(key.shape, dtype=wide, device=key.device)
        for_value = torch.zeros(value.shape, dtype=wide, device=value.device)
        for i, call in enumerate(ctx.plan.calls):
            k = key.index_select(0, call.keys)
            v = value.index_select(0, call.keys)
            states = (gradient[call.rows], query[call.rows], k, v, joined[call.rows], saved[2 * i])
            lengths = (call.cu_queries, call.cu_keys, call.max_queries, call.max_keys)
            options = (ctx.is_causal, saved[2 * i + 1], ctx.scale, list(ctx.plan.window_size))
            dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(*states, *lengths, *options)
            for_queries.append(dq)
            for_key.index_add_(0, call.keys, dk.to(wide))
            for_value.index_add_(0, call.keys, dv.to(wide))
        return _joined(for_queries), for_key.to(key.dtype), for_value.to(value.dtype), None, None


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the parts of all calls as one; a single part is not copied."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _visible_context(segment: Segment, window: int | None) -> int:
    """Return the number of context tokens that a segment's first query sees.

    Its other queries see no more.
    """
    if window is None:
        return segment.context_length
    return min(segment.context_length, window - 1)


def _neighbours(
    segments: Sequence[Segment], window: int | None, keys_per_call: int
) -> Iterator[list[Segment]]:
    """Cut the segments, in stream order, into calls of at most `keys_per_call` keys."""
    call: list[Segment] = []
    num_keys = 0
    for segment in sorted(segments, key=lambda segment: segment.start):
        keys = _visible_context(segment, window) + segment.length
        if call and num_keys + keys > keys_per_call:
            yield call
            call = []
            num_keys = 0
        assert not call or call[-1].start + call[-1].length == segment.start
        call.append(segment)
        num_keys += keys
    yield call


def _call(segments: Sequence[Segment], device: torch.device, window: int | None) -> VarlenCall:
    """Make the index tensors of a call, in one copy to the device."""
    keys = []
    for segment in segments:
        first = segment.context_length - _visible_context(segment, window)
        keys.append(segment.keys[first:])
    num_queries = [segment.length for segment in segments]
    num_keys = [len(sequence) for sequence in keys]
    columns = [*keys, np.cumsum([0, *num_queries]), np.cumsum([0, *num_keys])]
    numbers = np.concatenate(columns).astype(np.int32)
    on_device = to_device(torch.from_numpy(numbers), device)
    num_ends = len(segments) + 1
    key_index, cu_queries, cu_keys = on_device.split([sum(num_keys), num_ends, num_ends])
    start = segments[0].start
    return VarlenCall(
        rows=slice(start, start + sum(num_queries)),
        keys=key_index,
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        # if no sequence has two queries, the kernel may arrange heads, and so its results,
        # differently
        max_queries=max(2, *num_queries),
        max_keys=max(num_keys),
    )
