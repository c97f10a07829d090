"""Decoder layers for a GPU with few kernels, because launching them bounds a decode step.

Products with the same inputs are fused, residuals are added in place or by the product itself, and
the key and value of a position are written at once: 10 to 20 kernels per layer instead of 40 to 93.
The fused weights are plain tensors, and the modules' own parameters are views of them: filling a
parameter fills the fused weight.

Attention by lengths counts as one kernel here; it also launches a fill and, if heads share keys,
copies of the queries and of the output.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer

from dapo.engines.native.cache import KeyValueCache
from dapo.engines.native.fused_layers import FAMILIES, run_layer

FUSED_FAMILIES = (*FAMILIES, SmolLM3DecoderLayer, Gemma3DecoderLayer)
"""The supported layers.

SmolLM3 omits the rotary embedding in some layers. Gemma3 has a norm before and after each
block, and its norms multiply with their parameters plus one.
"""


def fuse_weight_layers(model: PreTrainedModel) -> "list[FusedWeightKernels]":
    """Replace the forward of decoder layers of known families; returns their new operations."""
    kernels = []
    for layer in model.modules():
        # the exact class: a subclass may compute something else
        if type(layer) in FUSED_FAMILIES and _is_suited(layer):
            operations = FusedWeightKernels(layer)
            layer.forward = partial(run_layer, layer, operations)
            kernels.append(operations)
    return kernels


def _is_suited(layer: Any) -> bool:
    """Return True if the products of a layer can be fused: they are linear, with biases alike."""
    attention = layer.self_attn
    mlp = layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_proj, mlp.up_proj]
    products = [*qkv, *gate_up, attention.o_proj, mlp.down_proj]
    if not all(type(product) is nn.Linear for product in products):
        return False
    # a fused product has a bias in all of its parts or in none
    return _have_equal_biases(qkv) and _have_equal_biases(gate_up)


def _have_equal_biases(products: Sequence[nn.Linear]) -> bool:
    return len({product.bias is None for product in products}) == 1


class FusedWeightKernels:
    """The operations of one decoder layer around its attention, in few kernels."""

    def __init__(self, layer: Any) -> None:
        """Keep the layer's modules, but make parameters of fused products views of one tensor."""
        attention = layer.self_attn
        mlp = layer.mlp
        self._layer = layer
        self._attention = attention
        self._qkv = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = _fuse([mlp.gate_proj, mlp.up_proj])
        self._query_heads = attention.q_proj.out_features // attention.head_dim
        self._key_heads = attention.k_proj.out_features // attention.head_dim
        self._has_outer_norms = hasattr(layer, "post_feedforward_layernorm")
        self._rotates = getattr(attention, "use_rope", True)
        self._is_normed = hasattr(attention, "q_norm")
        self.refresh()

    def refresh(self) -> None:
        """Recompute the values derived from parameters: the factors of norms."""
        layer = self._layer
        attention = self._attention
        self._norm_weights = {}
        for name, norm in layer.named_children():
            if name.endswith("_layernorm"):
                self._norm_weights[name] = _norm_weight(norm)
        width = attention.head_dim
        weight = attention.o_proj.weight
        # (x1, -x2, x1, x2) contains both x and its rotation (-x2, x1) as views
        factors = weight.new_ones(2, width)
        factors[0, width // 2 :] = -1
        if self._is_normed:
            query = _norm_weight(attention.q_norm).expand(self._query_heads, -1)
            key = _norm_weight(attention.k_norm).expand(self._key_heads, -1)
            per_head = torch.cat((query, key))
            factors = factors * per_head[:, None]
        self._factors = factors  # [2, d], or [heads, 2, d] with the weights of the heads' norms

    def attention_inputs(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: KeyValueCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, and the keys and values that they attend to.

        Args:
            hidden_states: `[n, length, hidden]`.
            position_embeddings: cosines and sines of the positions, `[n, length, d]` each.
            cache: takes the new keys and values, and returns them with the earlier ones.

        Returns queries `[n, heads, length, d]`, keys and values.
        """
        attention = self._attention
        normed = self._norm("input_layernorm", hidden_states)
        heads = linear(normed, *self._qkv).unflatten(-1, (-1, attention.head_dim))
        if self._rotates:
            self._rotate(heads, *position_embeddings)
        queries, key_values = heads.split([self._query_heads, 2 * self._key_heads], 2)
        keys, values = cache.update_fused(key_values, attention.layer_idx)
        return queries.transpose(1, 2), keys, values

    def add_attention(self, hidden_states: Tensor, attn_output: Tensor) -> Tensor:
        """Add the projected output of attention to the hidden states, in place."""
        norm = "post_attention_layernorm" if self._has_outer_norms else None
        return self._add_product(hidden_states, attn_output, self._attention.o_proj, norm)

    def add_mlp(self, hidden_states: Tensor) -> Tensor:
        """Add the output of the feed-forward block to the hidden states, in place."""
        # the norm after attention is that of its output in Gemma3, elsewhere of this block's input
        inner_norm = "post_attention_layernorm"
        outer_norm = None
        if self._has_outer_norms:
            inner_norm = "pre_feedforward_layernorm"
            outer_norm = "post_feedforward_layernorm"
        normed = self._norm(inner_norm, hidden_states)
        gate, up = linear(normed, *self._gate_up).chunk(2, -1)
        gated = self._layer.mlp.act_fn(gate).mul_(up)
        return self._add_product(hidden_states, gated, self._layer.mlp.down_proj, outer_norm)

    def _rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Norm, if there is one, and rotate queries and keys `[n, length, heads, d]`, in place."""
        count = self._query_heads + self._key_heads
        width = heads.shape[-1]
        states = heads
        # values are normed too: for a part of the heads the kernel would make a copy
        if self._is_normed:
            states = rms_norm(heads, (width,), eps=_epsilon(self._attention.q_norm))
        # [n, length, count, 2 * d]
        both = (states.narrow(2, 0, count).unsqueeze(3) * self._factors).flatten(3)
        rotated = heads.narrow(2, 0, count)
        torch.mul(both.narrow(-1, width, width), cos.unsqueeze(2), out=rotated)
        rotated.addcmul_(both.narrow(-1, width // 2, width), sin.unsqueeze(2))

    def _norm(self, name: str, hidden_states: Tensor) -> Tensor:
        weight = self._norm_weights[name]
        size = hidden_states.shape[-1:]
        epsilon = _epsilon(getattr(self._layer, name))
        if weight.dtype == hidden_states.dtype:
            return rms_norm(hidden_states, size, weight, epsilon)
        # there is no kernel for two types
        return rms_norm(hidden_states, size, eps=epsilon).mul_(weight)

    def _add_product(
        self, hidden_states: Tensor, inputs: Tensor, product: nn.Linear, norm: str | None
    ) -> Tensor:
        """Add the product to the hidden states in place.

        Args:
            hidden_states: `[n, length, hidden]`.
            inputs: `[n, length, ...]` of the product.
            product: the layer whose product is added.
            norm: the name of the norm of the product; None: there is none.
        """
        width = hidden_states.shape[-1]
        if norm is not None:
            epsilon = _epsilon(getattr(self._layer, norm))
            states = rms_norm(product(inputs), (width,), eps=epsilon)
            return hidden_states.addcmul_(states, self._norm_weights[norm])
        if product.bias is not None:
            return hidden_states.add_(product(inputs))
        # the product adds to its output itself: one kernel less
        hidden_states.view(-1, width).addmm_(inputs.flatten(0, 1), product.weight.t())
        return hidden_states


def _fuse(products: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the fused weight and bias of products, whose own parameters become views of them."""
    has_bias = products[0].bias is not None
    weight = _fuse_parameters([product.weight for product in products])
    if not has_bias:
        return weight, None
    return weight, _fuse_parameters([product.bias for product in products])


def _fuse_parameters(parameters: Sequence[Tensor]) -> Tensor:
    fused = torch.cat([parameter.detach() for parameter in parameters])
    lengths = [len(parameter) for parameter in parameters]
    for parameter, part in zip(parameters, fused.split(lengths), strict=True):
        # `data`: the module and its names keep the parameter itself
        parameter.data = part
    return fused


def _norm_weight(norm: Any) -> Tensor:
    """Return the factor of a norm.

    If it is the parameter plus one, it is in float32, because bfloat16 would round the sum.
    """
    weight: Tensor = norm.weight.detach()
    if isinstance(norm, Gemma3RMSNorm):
        return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
    return weight


def _epsilon(norm: Any) -> float:
    return norm.eps if isinstance(norm, Gemma3RMSNorm) else norm.variance_epsilon
