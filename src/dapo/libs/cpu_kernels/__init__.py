"""Functions for a transformer on a CPU: the work between the matrix products of a decoder layer, in
one pass each.

RMSNorm, the rotary embedding, the write to the cache of keys and values, the attention of a decode
step, and sampling. Compiled functions serve float32 and bfloat16, in which they compute in float32;
`is_compiled` says whether they can. `rms_norm` and `rotate_` have a form in PyTorch's functions for
everything else. `RMSNorm`, `SiluGate`, `SegmentAttention` and `TokenScores` have gradients, for the
update.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compiled import DTYPES, MAX_WIDTH, addresses, call, library, serves
from .training import (
    OneDnnLinear,
    RMSNorm,
    SegmentAttention,
    Segments,
    SiluGate,
    TokenScores,
    add_gradient_,
    can_attend_to_segments,
    fuse_layers,
    linear,
    normalize,
    use_sparse_embeddings,
)

__all__ = [
    "DTYPES",
    "DecoderLayers",
    "OneDnnLinear",
    "Prompts",
    "RMSNorm",
    "Rows",
    "SegmentAttention",
    "Segments",
    "SiluGate",
    "TokenScores",
    "add_gradient_",
    "attend",
    "can_attend",
    "can_attend_to_segments",
    "can_decode",
    "can_multiply",
    "can_sample",
    "decode_",
    "fuse_layers",
    "is_compiled",
    "linear",
    "multiply",
    "pack_panels",
    "rms_norm",
    "rotate_",
    "sample",
    "store_positions_",
    "use_sparse_embeddings",
]


_FINISHES = ("plain", "silu", "plus", "times")  # Finish in kernels.cpp
_PAIR = {torch.float32: 1, torch.bfloat16: 2}  # inputs that are multiplied together
_TOKENS = 256  # of a block of the cumulative distribution: TOKENS in kernels.cpp


def is_compiled() -> bool:
    """Return True if the compiled functions are there, for this processor."""
    return library() is not None


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float, *, compiled: bool = True) -> Tensor:
    """RMSNorm over the last dimension; `compiled=False`: by PyTorch's functions."""
    width = inputs.shape[-1]
    compiled = compiled and not torch.is_grad_enabled()
    if (
        compiled
        and serves(inputs, width)
        and weight.dtype == inputs.dtype
        and inputs.is_contiguous()
    ):
        return normalize(inputs, weight, epsilon)[0]
    wide = inputs.float() if inputs.dtype.itemsize < 4 else inputs
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale: Tensor = length.square_().div_(width).add_(epsilon).rsqrt_()
    normed: Tensor = (wide * scale).to(inputs.dtype).mul_(weight)
    return normed


def rotate_(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
    query_heads: int,
    key_heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
    *,
    compiled: bool = True,
) -> Tensor:
    """Rotate the first heads of `[n, length, heads, d]`, those of queries and keys, in place;
    returns `heads`.

    Args:
        heads: of queries, then of keys, then others.
        cosines: `[n or 1, length, d]`.
        sines: likewise.
        query_heads: the number of heads of queries.
        key_heads: the number of heads of keys.
        norms: the weights of the queries' and the keys' RMSNorm over a head, and epsilon; it comes
            before the rotation.
        compiled: False: by PyTorch's functions.
    """
    n, length, count, width = heads.shape
    rotated = query_heads + key_heads
    half = width // 2
    *weights, epsilon = norms or (None, None, 0.0)
    compiled = compiled and not torch.is_grad_enabled()
    same = all(
        tensor is None or tensor.dtype == heads.dtype for tensor in (cosines, sines, *weights)
    )
    if compiled and serves(heads, width) and heads.is_contiguous() and same:
        cosines = cosines.contiguous()
        sines = sines.contiguous()
        sizes = n * length, len(cosines) * length, query_heads, key_heads, count, width
        pointers = addresses(heads, cosines, sines, *weights)
        library()["rotate", heads.dtype](*pointers, *sizes, epsilon)
        return heads
    states = heads[:, :, :rotated]
    if norms is not None:
        parts = states.split([query_heads, key_heads], 2)
        normed = (
            rms_norm(part, weight, epsilon, compiled=False)
            for part, weight in zip(parts, norms[:2], strict=True)
        )
        states = torch.cat(tuple(normed), 2)
    cosines = cosines.unsqueeze(2)
    sines = sines.unsqueeze(2)
    turned = states * cosines
    turned[..., :half].addcmul_(states[..., half:], sines[..., :half], value=-1)
    turned[..., half:].addcmul_(states[..., :half], sines[..., half:])
    heads[:, :, :rotated] = turned
    return heads


def can_attend(keys: Tensor, values: Tensor) -> bool:
    """Return True if `store_positions_` and `attend` serve keys and values like these."""
    width = keys.shape[-1]
    return values.shape == keys.shape and width <= MAX_WIDTH and serves(keys, width)


def store_positions_(states: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
    """Write row i's new key and value at `positions[i]`.

    Args:
        states: `[n, 2 * kv_heads, d]`, keys before values; rows may lie apart.
        keys: `[rows, kv_heads, capacity, d]`, at least n rows.
        values: likewise.
        positions: `[n]`.
    """
    n, _, width = states.shape
    _, heads, capacity, _ = keys.shape
    pointers = addresses(states, keys, values, positions)
    library()["store_positions", keys.dtype](*pointers, n, states.stride(0), heads, width, capacity)


@dataclass(frozen=True)
class Prompts:
    """Prompts that rows share, outside of the rows.

    Attributes:
        of_row: `[n]` int64, the index of each row's prompt, -1 for a row without one.
        lengths: `[prompts]` int64.
        pointers: `[layers, 2, prompts]` int64, the addresses of each layer's keys and values of the
            prompts; each is `[kv_heads, length, d]`, contiguous, and the caller keeps it.
    """

    of_row: Tensor
    lengths: Tensor
    pointers: Tensor


@dataclass(frozen=True)
class Rows:
    """The positions and prompts to which the rows of a decode step attend.

    Attributes:
        first: `[n]` int64, the first position in the row.
        split: `[n]` int64, the number of positions of a prompt that is in the row: its bits are
            those of one outside.
        lengths: `[n]` int64, one more than the last position in the row.
        prompts: outside of the rows.
    """

    first: Tensor
    split: Tensor
    lengths: Tensor
    prompts: Prompts | None = None


def can_multiply(dtype: torch.dtype) -> bool:
    """Return True if `multiply` serves a type: float32, and bfloat16 on processors with
    `avx512_bf16`.
    """
    return is_compiled() and ("product", dtype) in library()


def pack_panels(weight: Tensor) -> Tensor:
    """Return the weight `[out, in]` in the order in which `multiply` reads it.

    Returns `[panels, in, outputs of a panel]` in float32, `[panels, in / 2, outputs of a panel, 2]`
    in bfloat16.
    """
    outputs, inputs = weight.shape
    panel = library()["panel"]
    pair = _PAIR[weight.dtype]
    sizes = -(-outputs // panel), -(-inputs // pair), panel, pair
    packed = weight.new_empty(sizes if pair > 1 else sizes[:3])
    call("pack", weight.contiguous(), packed, outputs, inputs)
    return packed


def multiply(
    inputs: Tensor,
    packed: Tensor,
    outputs: int,
    bias: Tensor | None = None,
    finish: str = "plain",
    operand: Tensor | None = None,
) -> Tensor:
    """Return the products of rows with a packed weight; a row's result does not depend on the other
    rows.

    Args:
        inputs: `[..., in]`, of the weight's type.
        packed: by `pack_panels`.
        outputs: the number of the weight's outputs.
        bias: `[outputs]`.
        finish: `silu`: SiLU of the product; `plus` and `times`: the product plus or times `operand`.
        operand: `[..., outputs]`.
    """
    padding = -inputs.shape[-1] % _PAIR[inputs.dtype]
    inputs = torch.nn.functional.pad(inputs, (0, padding)) if padding else inputs.contiguous()
    out = inputs.new_empty(*inputs.shape[:-1], outputs)
    functions = library()
    operand = None if operand is None else operand.contiguous()
    pointers = addresses(inputs, packed, bias, operand, out)
    width = inputs.shape[-1]
    sizes = inputs.numel() // width, width, outputs, _FINISHES.index(finish)
    functions["product", inputs.dtype](functions["run"], *pointers, *sizes)
    return out


class DecoderLayers:
    """Decoder layers for `decode_`, with the addresses of their weights, which it keeps.

    A layer is RMSNorm, queries, keys and values in one product, the rotary embedding, attention,
    its output plus the residual, RMSNorm, and a gated feed-forward block plus the residual.

    Its weights are, in this order: the first norm's; weight and bias of queries, keys and values;
    the norms' of queries and keys; weight and bias of attention's output; the second norm's; weight
    and bias of gate, of up and of down. Weights of products are packed by `pack_panels`; a bias or
    a norm that the model lacks is None.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Tensor | None]],
        *,
        inner: int,
        query_heads: int,
        epsilon: float,
        scaling: float,
    ) -> None:
        """Take the weights of layers that `can_decode` accepts.

        Args:
            layers: the weights of each.
            inner: the number of inputs of the last product.
            query_heads: the number of heads of queries.
            epsilon: of all norms.
            scaling: of the products of queries and keys.
        """
        self._layers = layers
        self.addresses = torch.tensor(
            [[0 if weight is None else weight.data_ptr() for weight in layer] for layer in layers]
        )
        self.inner = inner
        self.query_heads = query_heads
        self.epsilon = epsilon
        self.scaling = scaling


def can_decode(layers: Sequence[Sequence[Tensor | None]], inner: int) -> bool:
    """Return True if `decode_` serves layers with these weights, in the order of `DecoderLayers`:
    one type, and its widths.
    """
    norm = layers[0][0]
    types = {weight.dtype for layer in layers for weight in layer if weight is not None}
    return (
        norm is not None
        and types == {norm.dtype}
        and serves(norm, len(norm))
        and inner % _PAIR[norm.dtype] == 0
    )


def decode_(
    hidden: Tensor,
    layers: DecoderLayers,
    cache: tuple[Sequence[Tensor], Sequence[Tensor]],
    angles: tuple[Tensor, Tensor],
    rows: Rows,
) -> Tensor:
    """Compute all layers of a decode step in one call; returns `hidden`, which is changed in place.

    The bits are those of the single functions.

    Args:
        hidden: `[n, hidden]`, contiguous.
        layers: with their weights.
        cache: keys and values of each layer, `[rows, kv_heads, capacity, d]` with at least n rows.
        angles: cosines and sines `[n, 1, d]`.
        rows: the positions and prompts of the n rows; the step writes to the last position of each.
    """
    n, width = hidden.shape
    _, key_heads, capacity, head = cache[0][0].shape
    prompts = rows.prompts
    count = len(layers.addresses)
    states = torch.tensor(
        [[tensor.data_ptr() for tensor in tensors_of_kind] for tensors_of_kind in cache]
    )
    shared = torch.zeros(2, count, dtype=torch.int64)
    if prompts is not None:
        stride = prompts.pointers.element_size()
        first = prompts.pointers.data_ptr()
        by_layer, by_kind, _ = prompts.pointers.stride()
        at = torch.arange(count) * (by_layer * stride) + first
        shared = torch.stack((at, at + by_kind * stride))
    table = torch.cat((layers.addresses, states.T, shared.T), 1).contiguous()
    buffer = hidden.new_empty(
        n * (width + 2 * (layers.query_heads + key_heads) * head + layers.inner)
    )
    scales = torch.empty(n, dtype=torch.float32)
    angles = (angles[0].contiguous(), angles[1].contiguous())
    row_tensors = rows.lengths - 1, rows.first, rows.split, rows.lengths
    prompt_tensors = (None, None) if prompts is None else (prompts.of_row, prompts.lengths)
    tensors = hidden, table, buffer, *angles, scales, *row_tensors, *prompt_tensors
    sizes = count, n, width, layers.inner, layers.query_heads, key_heads, head, capacity
    functions = library()
    pointers = addresses(*tensors)
    functions["decode", hidden.dtype](
        functions["run"], *pointers, *sizes, layers.epsilon, layers.scaling
    )
    return hidden


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    scaling: float | None = None,
    layer: int = 0,
) -> Tensor:
    """Return the attention of one query per row and head, `[n, heads, d]`.

    Args:
        query: `[n, heads, d]`; rows may lie apart.
        keys: `[rows, kv_heads, capacity, d]`, at least n rows.
        values: likewise.
        rows: the positions and prompts of the n rows.
        scaling: of the products; None: 1 / sqrt(d).
        layer: whose keys and values of the prompts are read.
    """
    n, heads, width = query.shape
    query = query if query.stride()[1:] == (width, 1) else query.contiguous()
    _, key_heads, capacity, _ = keys.shape
    out = query.new_empty(n, heads, width)
    functions = library()
    tensors: list[Tensor | None] = [query, keys, values, out, rows.first, rows.split, rows.lengths]
    if rows.prompts is None:
        tensors += [None] * 4
    else:
        tensors += [rows.prompts.of_row, rows.prompts.lengths, *rows.prompts.pointers[layer]]
    pointers = addresses(*tensors)
    sizes = n, query.stride(0), key_heads, heads // key_heads, width, capacity
    scale = width**-0.5 if scaling is None else scaling
    functions["attention", query.dtype](functions["run"], *pointers, *sizes, scale)
    return out


def sample(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    ends: Tensor,
    top_ps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens from softmax(logits / temperature) by inverting each row's cumulative
    distribution.

    A token of probability zero is never drawn. If the logits of a row are not finite, its
    log-probabilities are nan.

    Args:
        logits: `[n, vocabulary]`, contiguous.
        temperatures: `[n]` float64, positive.
        uniforms: `[m]` float64 in [0, 1), in the order of the rows.
        ends: `[n]` int64, the number of draws of the rows up to each, itself included.
        top_ps: `[n]` float64; the distribution is cut to the fewest most probable tokens with that
            mass, lower ids first among equal ones, and renormalised. None: the whole distribution,
            in the order of the ids.

    Returns:
        `[m]` token ids, and `[m]` float32 log-probabilities.
    """
    n, vocabulary = logits.shape
    tokens = torch.empty(len(uniforms), dtype=torch.int64)
    logprobs = torch.empty(len(uniforms), dtype=torch.float32)
    if top_ps is not None:
        settings = temperatures.contiguous(), top_ps.contiguous(), uniforms, ends
        call("sample_nucleus", logits, *settings, tokens, logprobs, n, vocabulary)
        return tokens, logprobs
    sums = torch.empty(n, -(-vocabulary // _TOKENS), dtype=torch.float64)
    call("sample", logits, temperatures, uniforms, ends, tokens, logprobs, sums, n, vocabulary)
    return tokens, logprobs


def can_sample(logits: Tensor) -> bool:
    """Return True if `sample` serves these logits."""
    return serves(logits) and logits.is_contiguous()
