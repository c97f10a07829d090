"""Decoder layers with fewer passes over their inputs and fewer calls than the model's own.

With the few rows of a decode step a CPU spends about a third of the time between the products
(norms, gates, rotations, residual sums and their calls), and a GPU mostly waits for the next call.
So a layer of a known family computes queries, keys and values in one product, and needs few
operations between products: `PrepackedKernels` for a CPU, `fused_weight_layers.FusedWeightKernels`
for a GPU.

The arithmetic is the layer's own up to the order of roundings. `compatibility.patch_model` compares
the logits with those of the plain model.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from dapo.engines.native.attention import native_attention
from dapo.engines.native.cache import KeyValueCache, SlotCache
from dapo.libs.cpu_kernels import DecoderLayers, Rows, can_decode, decode_, rms_norm, rotate_
from dapo.libs.cpu_kernels.prepacked import (
    DEFAULT_KERNELS,
    CompiledWeight,
    FusedQKVLinear,
    can_prepack,
    prepack_linears,
)

FAMILIES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""Layers with the same modules in the same order; the last family also normalizes queries and keys.
"""


class LayerKernels(Protocol):
    """The operations of a decoder layer around its attention, on `[n, length, hidden]` states."""

    def attention_inputs(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: KeyValueCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[n, heads, length, d]`, and the cache's keys and values."""

    def add_attention(self, hidden_states: Tensor, attn_output: Tensor) -> Tensor:
        """Return the states after the attention block, from its heads `[n, length, heads * d]`."""

    def add_mlp(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states after the feed-forward block."""


def run_layer(
    layer: Any,
    kernels: LayerKernels,
    hidden_states: Tensor,
    attention_mask: Any = None,
    past_key_values: KeyValueCache | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **options: object,
) -> Tensor:
    """Run a decoder layer with its operations replaced.

    Args:
        layer: the decoder layer of transformers.
        kernels: its operations around attention.
        hidden_states: `[n, length, hidden]`.
        attention_mask: what `attention.native_mask` returned.
        past_key_values: the engine's cache.
        position_embeddings: cosines and sines of the positions.
        options: other arguments of transformers, which the layer does not need.
    """
    # transformers has defaults for both, but the engine always passes them
    assert past_key_values is not None
    assert position_embeddings is not None
    attention = layer.self_attn
    query, keys, values = kernels.attention_inputs(
        hidden_states, position_embeddings, past_key_values
    )
    attn_output, _ = native_attention(
        attention, query, keys, values, attention_mask, scaling=attention.scaling
    )
    return kernels.add_mlp(kernels.add_attention(hidden_states, attn_output.flatten(2)))


def fuse_prepacked_layers(
    model: PreTrainedModel,
    *,
    rows: int,
    kernels: Mapping[str, str] = DEFAULT_KERNELS,
    compiled: bool = False,
) -> None:
    """Replace the forward of decoder layers of known families whose weights can be prepacked.

    Args:
        model: the model, which is changed.
        rows: the usual number of rows of a decode step.
        kernels: the kernels of prepacked weights by shape.
        compiled: whether norms, rotations and layers are those of `cpu_kernels`.
    """
    # the exact class: a subclass may compute something else
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in FAMILIES]
    for layer in filter(_is_suited, layers):
        operations = PrepackedKernels(layer, rows=rows, kernels=kernels, compiled=compiled)
        layer.forward = partial(run_layer, layer, operations)


def _is_suited(layer: Any) -> bool:
    attention = layer.self_attn
    mlp = layer.mlp
    products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return attention.config.hidden_act == "silu" and all(map(can_prepack, products))


class PrepackedKernels:
    """Operations that fuse activation, gate and residual sum into prepacked products.

    Norms take half the passes.
    """

    def __init__(
        self, layer: Any, *, rows: int, kernels: Mapping[str, str], compiled: bool
    ) -> None:
        """Replace the layer's linear modules by prepacked ones.

        Args:
            layer: the decoder layer, which is changed.
            rows: the usual number of rows of a decode step.
            kernels: the kernels of prepacked weights by shape.
            compiled: whether norms and rotations are those of `cpu_kernels`.
        """
        attention = layer.self_attn
        self._layer = layer
        self._compiled = compiled
        self._attention = attention
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._fused_qkv = FusedQKVLinear(parts, rows=rows, kernels=kernels)
        attention.q_proj, attention.k_proj, attention.v_proj = self._fused_qkv.layers
        prepack_linears(layer, rows=rows, kernels=kernels)

    def attention_inputs(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: KeyValueCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries `[n, heads, length, d]`, and the keys and values that they attend to."""
        attention = self._attention
        normed = self._norm(self._layer.input_layernorm, hidden_states)
        heads = self._fused_qkv(normed).unflatten(-1, (-1, attention.head_dim))
        key_heads = attention.v_proj.out_features // attention.head_dim
        query_heads = heads.shape[2] - 2 * key_heads
        norms = None
        if hasattr(attention, "q_norm"):
            norms = (
                attention.q_norm.weight,
                attention.k_norm.weight,
                attention.q_norm.variance_epsilon,
            )
        rotate_(
            heads,
            *position_embeddings,
            query_heads,
            key_heads,
            norms,
            compiled=self._compiled,
        )
        keys, values = cache.update_fused(heads[:, :, query_heads:], attention.layer_idx)
        return heads[:, :, :query_heads].transpose(1, 2), keys, values

    def weights(self) -> list[Tensor | None] | None:
        """Return the weights as `cpu_kernels.DecoderLayers` orders them; None unless compiled."""
        layer = self._layer
        attention = self._attention
        mlp = self._layer.mlp
        if not self._compiled:
            return None
        products = [self._fused_qkv, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        pairs = []
        for product in products:
            weight = product.prepacked
            # the fastest kernel of a shape may be another library's
            if not isinstance(weight, CompiledWeight):
                return None
            pairs.append((weight.packed, product.bias))
        qkv, output, gate, up, down = pairs
        return [
            layer.input_layernorm.weight,
            *qkv,
            _weight_of(attention, "q_norm"),
            _weight_of(attention, "k_norm"),
            *output,
            layer.post_attention_layernorm.weight,
            *gate,
            *up,
            *down,
        ]

    def add_attention(self, hidden_states: Tensor, attn_output: Tensor) -> Tensor:
        """Return the sum of the hidden states and the projected output of attention."""
        return self._attention.o_proj.plus(attn_output, hidden_states)

    def add_mlp(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of the hidden states and the output of the feed-forward block."""
        mlp = self._layer.mlp
        inner = self._norm(self._layer.post_attention_layernorm, hidden_states)
        gated = mlp.up_proj.times(inner, mlp.gate_proj.silu(inner))
        return mlp.down_proj.plus(gated, hidden_states)

    def _norm(self, norm: Any, inputs: Tensor) -> Tensor:
        return rms_norm(inputs, norm.weight, norm.variance_epsilon, compiled=self._compiled)


def _weight_of(attention: Any, norm: str) -> Tensor | None:
    """Return the weight of a norm of queries or keys; None: the family has none."""
    return getattr(getattr(attention, norm, None), "weight", None)


class CompiledDecoder:
    """The backbone of a decode step with all layers in one call, if each part is compiled.

    Python then makes one call for all layers, where it makes ten for each otherwise.
    """

    def __init__(self, backbone: nn.Module, layers: Sequence[PrepackedKernels]) -> None:
        self._backbone: Any = backbone
        self._kernels = layers
        self.refresh()

    @classmethod
    def of(cls, backbone: nn.Module) -> "CompiledDecoder | None":
        """Return the decoder of a backbone after `fuse_prepacked_layers`; None for any other."""
        layers: list[Any] = list(getattr(backbone, "layers", ()))
        modules = ("embed_tokens", "rotary_emb", "norm")
        if not layers or not all(hasattr(backbone, name) for name in modules):
            return None
        kernels = []
        for layer in layers:
            # `fuse_prepacked_layers` leaves layers of other families as they are
            if not isinstance(layer.forward, partial):
                return None
            operations = layer.forward.args[1]
            if not isinstance(operations, PrepackedKernels):
                return None
            kernels.append(operations)
        return cls(backbone, kernels)

    def refresh(self) -> None:
        """Take the weights that are packed now; `layers` is None unless all layers are compiled."""
        weights = [kernels.weights() for kernels in self._kernels]
        backbone = self._backbone
        compiled = [layer for layer in weights if layer is not None]
        inner = backbone.layers[0].mlp.down_proj.in_features
        self.layers: DecoderLayers | None = None
        if len(compiled) == len(weights) and can_decode(compiled, inner):
            self.layers = DecoderLayers(
                compiled,
                inner=inner,
                query_heads=backbone.config.num_attention_heads,
                epsilon=backbone.config.rms_norm_eps,
                scaling=backbone.layers[0].self_attn.scaling,
            )

    def __call__(self, ids: Tensor, positions: Tensor, cache: SlotCache, rows: Rows) -> Tensor:
        """Return `[n, hidden]` states of a step.

        Args:
            ids: `[n]` tokens.
            positions: `[n]` positions in the sequences.
            cache: the keys and values, which the step extends.
            rows: the positions in the cache.
        """
        assert self.layers is not None
        backbone = self._backbone
        # keys of all layers first
        half = len(cache.tensors) // 2
        key_values = (cache.tensors[:half], cache.tensors[half:])
        hidden = backbone.embed_tokens(ids)
        angles = backbone.rotary_emb(hidden[:, None], positions[:, None])
        states = decode_(hidden, self.layers, key_values, angles, rows)
        normed: Tensor = backbone.norm(states)
        return normed
