"""Attention over a packed stream of sequences, in transformers' attention interface.

The other parts of a transformer work on single tokens, so they run on the flat stream unchanged. A
token attends only to its own sequence. A prefix that several sequences share is stored once; the
tokens after it form a segment, whose keys and values are gathered from anywhere in the stream.

16-bit types on a GPU attend by the kernel of `varlen_attention`, CPUs by the compiled one of
`cpu_kernels`. Other types, and sliding windows on a CPU, attend by PyTorch's
`scaled_dot_product_attention`: queries, keys and values are gathered into padded batches of similar
lengths. Gradients on a GPU are not reproducible to the bit in either case: threads add them up in
the order in which they finish.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from dapo.core.errors import ConfigError
from dapo.core.model_traits import LENGTH_DEPENDENT_ROPE, UNPASSED_WINDOWS, uncomputed_traits
from dapo.libs.cpu_kernels import SegmentAttention, Segments, can_attend_to_segments
from dapo.policy.segments import Segment, bucket_by_length
from dapo.policy.transfer import to_device
from dapo.policy.varlen_attention import (
    VarlenPlan,
    attends_by_varlen,
    build_varlen_plan,
    varlen_attention,
)

IMPLEMENTATION = "dapo_packed"
MASK_ELEMENTS = 2**26
"""The largest mask of a batch.

A batch with a larger one also computes the queries of its contexts, which makes it plain causal,
without a mask; unless these outnumber its own, and would take more memory than the mask.
"""
CUDA_KEY_MULTIPLE = 16
"""The multiple of keys for which CUDA's kernels do not copy and pad a mask in every layer."""
UNSUPPORTED_FIELDS = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": None,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": None,
    "attention_chunk_size": None,
}
"""Configuration fields with unsupported effects, and the value that turns each off."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""Unsupported arguments of a layer's attention call: soft cap, sinks, biases, chosen keys."""


@dataclass(frozen=True)
class SegmentBatch:
    """N segments that attend in one call: Q queries and K keys each, with padding at the end."""

    queries: Tensor  # `[N * Q]` stream indices; padding repeats an index
    keys: Tensor  # `[N * K]` likewise
    size: int
    # `[N or 1]` position of a segment's first query among its keys; one number if all are equal
    first_query: Tensor
    masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(
        default_factory=dict, repr=False
    )
    """Cached masks, shared by all layers."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return `[N or 1, 1, Q, K]`: 0 where a query sees a key, else -inf; None: plain causal."""
        if (window, dtype) not in self.masks:
            self.masks[window, dtype] = self._make_mask(window, dtype)
        return self.masks[window, dtype]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        device = self.keys.device
        num_queries = len(self.queries) // self.size
        num_keys = len(self.keys) // self.size
        if window is not None and window >= num_keys:
            window = None
        if window is None and num_queries == num_keys:
            return None
        key = torch.arange(num_keys, device=device)
        query = self.first_query[:, None, None] + torch.arange(num_queries, device=device)[:, None]
        # a padded query after the last key would see no key in a window, and some kernels return
        # NaN for such a row
        query = query.clamp(max=num_keys - 1)
        visible = key <= query  # [N or 1, Q, K]
        if window is not None:
            visible &= key > query - window
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~visible, -torch.inf)[:, None]


@dataclass(frozen=True)
class PaddedBatches:
    """The batches in which a stream attends by PyTorch's attention."""

    blocks: tuple[SegmentBatch, ...]
    # `[T]` the index of each stream token's output in the concatenated outputs of all batches
    outputs: Tensor


@dataclass(frozen=True)
class PackedAttentionPlan:
    """The attention of a stream, each token of which is in exactly one segment.

    The first layer makes a kernel's index tensors on the host and copies them to the device without
    waiting for it; all layers share them.
    """

    segments: tuple[Segment, ...]
    device: torch.device
    mask_elements: int = MASK_ELEMENTS
    key_multiple: int = 1  # the divisor of the number of keys of a masked batch
    _varlen: dict[int | None, VarlenPlan] = field(default_factory=dict, repr=False)

    def needed(self, window: int | None) -> int | None:
        """Return the window, None if all keys of a segment are within it."""
        if window is None:
            return None
        longest = max(len(segment.keys) for segment in self.segments)
        return window if window < longest else None

    @cached_property
    def compiled(self) -> Segments:
        """Return the segments for the compiled kernel of a CPU."""
        keys = [segment.keys for segment in self.segments]
        starts = np.array([segment.start for segment in self.segments])
        lengths = np.array([segment.length for segment in self.segments])
        offsets = np.cumsum([0, *map(len, keys)])
        columns = (starts, lengths, offsets, np.concatenate(keys))
        return Segments(*map(torch.from_numpy, columns))

    def varlen(self, window: int | None) -> VarlenPlan:
        """Return the plan for the varlen kernel; `window` limits a query's keys."""
        window = self.needed(window)
        if window not in self._varlen:
            self._varlen[window] = build_varlen_plan(self.segments, self.device, window)
        return self._varlen[window]

    @cached_property
    def padded(self) -> PaddedBatches:
        """Return the batches for PyTorch's attention."""
        buckets = bucket_by_length(self.segments)
        outputs = np.empty(sum(segment.length for segment in self.segments), np.int64)
        parts: list[np.ndarray] = []
        offset = 0
        for bucket in buckets:
            queries, keys, first, is_query = self._indices(bucket)
            outputs[queries[is_query]] = offset + np.flatnonzero(is_query)
            offset += queries.size
            parts += [queries.ravel(), keys.ravel(), first.ravel()]
        # one copy to the device, cut there
        parts.append(outputs)
        joined = torch.from_numpy(np.concatenate(parts))
        indices = to_device(joined, self.device).split([len(part) for part in parts])
        blocks = []
        for number, bucket in enumerate(buckets):
            queries, keys, first = indices[3 * number : 3 * number + 3]
            blocks.append(SegmentBatch(queries, keys, len(bucket), first))
        return PaddedBatches(tuple(blocks), indices[-1])

    def _indices(self, bucket: Sequence[Segment]) -> tuple[np.ndarray, ...]:
        """Return stream indices of queries `[N, Q]` and keys `[N, K]`.

        Also returns the first query's key `[N or 1, 1]`, and which queries are the segment's own.
        """
        length = np.array([[segment.length] for segment in bucket])  # [N, 1]
        total = np.array([[len(segment.keys)] for segment in bucket])  # [N, 1]
        context = total - length
        num_queries = length.max()
        longest = total.max()
        num_keys = -(-longest // self.key_multiple) * self.key_multiple
        first = context
        is_large = len(bucket) * num_queries * num_keys > self.mask_elements
        if is_large and 2 * num_queries >= longest:
            first = np.zeros_like(context)
            num_queries = longest
        if num_queries == longest:
            num_queries = num_keys
        keys = np.zeros((len(bucket), num_keys), np.int64)
        keys[np.arange(num_keys) < total] = np.concatenate([segment.keys for segment in bucket])
        at = first + np.arange(num_queries)  # [N, Q] the position of a query among the keys
        queries = np.take_along_axis(keys, np.minimum(at, num_keys - 1), axis=1)
        is_query = (at >= context) & (at < total)
        if (first == first[0]).all():
            first = first[:1]  # a mask for all segments
        return queries, keys, first, is_query


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` attend by the `packed_attention_plan` that is passed to its forward.

    cuDNN's attention is turned off for the whole process: planning a new shape takes it longer than
    the attention itself, and every microbatch has new shapes. Raises ConfigError, naming model type
    and field, for models with unsupported features.
    """
    for problem in _problems(model):
        raise unsupported_model_error(model, problem)
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    model.set_attn_implementation(IMPLEMENTATION)


def unsupported_model_error(model: PreTrainedModel, problem: str) -> ConfigError:
    """Return the error for a model that packed sequences would compute wrongly."""
    return ConfigError(
        f"models of type {model.config.model_type} cannot be trained here: {problem}; "
        "use a Llama, Qwen2, Qwen3 or Mistral model"
    )


def _problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield what packed sequences would compute wrongly, as far as it can be seen."""
    config = model.config
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    if not model._supports_attention_backend:
        yield "its attention cannot be replaced through transformers' AttentionInterface"
    if model.get_output_embeddings() is None:
        yield "it has no language-model head"
    text = config.get_text_config()  # of a model of several kinds of input, else the same
    for name, off in UNSUPPORTED_FIELDS.items():
        value = getattr(text, name, None)
        if value is not None and value != off:
            yield f"packed log-probabilities would leave out its {name}={value}"
    window = getattr(text, "sliding_window", None)
    if text.model_type in UNPASSED_WINDOWS and window:
        yield f"packed log-probabilities would leave out its sliding_window={window}"
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            yield (
                f"with rope_type={parameters['rope_type']} its positions depend on the longest"
                " sequence of a batch"
            )
    yield from uncomputed_traits(model)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_attention_plan: PackedAttentionPlan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend in every layer, in the interface of transformers; return `[1, T, heads, d]`, None.

    Args:
        module: the attention module.
        query: `[1, heads, T, d]`.
        key: `[1, kv_heads, T, d]`.
        value: like `key`.
        attention_mask: unused: the plan has the segments.
        scaling: the factor of scores.
        sliding_window: the number of keys that a query sees, its own included.
        packed_attention_plan: the segments of the stream.
        options: other arguments of transformers; those in UNSUPPORTED_ARGUMENTS raise ConfigError.
    """
    for name in UNSUPPORTED_ARGUMENTS:
        if options.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} cannot be trained here: packed attention has no {name}"
            )
    if packed_attention_plan is None:
        raise ValueError("this model needs an attention plan; call it with packed_attention_plan=")
    # [1, heads, T, d] is a view of [T, heads, d], whose rows can be gathered without another copy
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if attends_by_varlen(q, v):
        out = varlen_attention(q, k, v, packed_attention_plan.varlen(sliding_window), scale=scaling)
        return out.unsqueeze(0), None
    if can_attend_to_segments(q, k, v) and packed_attention_plan.needed(sliding_window) is None:
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        out = SegmentAttention.apply(q, k, v, packed_attention_plan.compiled, scale)  # type: ignore[no-untyped-call]
        return out.unsqueeze(0), None
    padded = packed_attention_plan.padded
    outputs = [_attend(block, q, k, v, scaling, sliding_window) for block in padded.blocks]
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return joined.index_select(0, padded.outputs).unsqueeze(0), None


def _attend(
    block: SegmentBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return the `[N * Q, heads, d]` outputs of one batch."""
    q = _gather_segments(query, block.queries, block.size)
    k = _gather_segments(key, block.keys, block.size)
    v = _gather_segments(value, block.keys, block.size)
    mask = block.mask(window, q.dtype)
    if mask is not None and q.is_cuda:
        # CUDA's kernels with masks do not support grouped heads
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _gather_segments(states: Tensor, indices: Tensor, size: int) -> Tensor:
    """Gather `[N, heads, L, d]` from `[T, heads, d]`."""
    return states.index_select(0, indices).unflatten(0, (size, -1)).transpose(1, 2)
