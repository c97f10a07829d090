"""Runs the transformers model for the engine: prefills, decode steps, and loading of weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource
from dapo.engines.native.cache import ContinuedCache, PromptCache, SlotCache
from dapo.engines.native.device_memory import upload
from dapo.engines.native.fused_layers import CompiledDecoder
from dapo.engines.native.fused_weight_layers import FusedWeightKernels
from dapo.engines.native.model_kernels import ModelKernels, head_width
from dapo.engines.request_checks import require_all_weights, require_shape
from dapo.libs.cpu_kernels import Rows, can_attend
from dapo.libs.cpu_kernels.prepacked import prepacked_weights

UNSHARED_PROMPTS = ("diffllama", "hrm_text", "jetmoe")
"""Types of models whose attention does not read the cache's states of its `layer_idx` as they are.

DiffLlama divides the values, JetMoe repeats keys and values, and HrmText runs a layer several
times. Compiled attention reads a shared prompt by its address, without what such a model does.
"""


@dataclass(frozen=True)
class PromptPrefix:
    """The common first tokens of prompts, with their keys and values."""

    token_ids: tuple[int, ...]
    cache: PromptCache

    def cut(self, length: int) -> "PromptPrefix":
        if length == len(self.token_ids):
            return self
        return PromptPrefix(self.token_ids[:length], self.cache.select(0, length))


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all sequences begin with."""
    length = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length


@dataclass(frozen=True)
class Prefilled:
    """Prompts after their forward, ready for responses."""

    cache: PromptCache
    logits: Tensor  # `[prompts, vocabulary]` of each prompt's first response token


class Forward:
    """Backbone and head of a language model; computes logits only where a token is sampled."""

    def __init__(
        self,
        model: PreTrainedModel,
        model_kernels: ModelKernels,
        fused_layers: Sequence[FusedWeightKernels] = (),
    ) -> None:
        """Take a model whose attention and layers have been replaced.

        Args:
            model: the language model.
            model_kernels: the kernels that compute it.
            fused_layers: layers with values derived from weights, which `load_weights` refreshes.
        """
        self.model = model
        self.model_kernels = model_kernels
        self._fused_layers = fused_layers
        self.backbone: nn.Module = model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        self.device = model.device
        self.vocabulary = next(model.get_input_embeddings().parameters()).shape[0]
        self.shares_prompts = _shares_prompts(model, model_kernels)
        """Whether a decode step can read a prompt once for several rows."""
        self._decoder = CompiledDecoder.of(self.backbone) if self.shares_prompts else None
        self.position_bytes = 0
        """The size of the keys and values of one position in all layers; 0 before the first cache.
        """
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        prefix: PromptPrefix | Sequence[PromptPrefix] | None = None,
    ) -> Prefilled:
        """Run prompts together, padded on the right, which causal attention never reads.

        Args:
            prompts: the token ids of the prompts.
            prefix: a proper prefix of all prompts, or one of each prompt, which is not computed
                again.
        """
        if isinstance(prefix, Sequence):
            cache: PromptCache = ContinuedCache([entry.cache for entry in prefix])
            starts = [len(entry.token_ids) for entry in prefix]
        elif prefix is None:
            cache = PromptCache()
            starts = [0] * len(prompts)
        else:
            cache = PromptCache(prefix.cache)
            starts = [len(prefix.token_ids)] * len(prompts)
        lengths = [len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)]
        width = max(lengths)
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = prompt[starts[row] :]
        # with a common prefix all rows have the same positions, and one stands for all
        distinct_starts = starts if isinstance(prefix, Sequence) else starts[:1]
        first = upload(np.array(distinct_starts, dtype=np.int64), self.device)
        # [prompts, or 1 if all equal, width]
        positions = first[:, None] + torch.arange(width, device=self.device)
        # padding may not go beyond all prompts: a table of positions ends with the model's context
        positions.clamp_(max=max(map(len, prompts)) - 1)
        # [prompts, width, hidden]
        hidden = self._hidden(upload(ids, self.device), positions, cache)
        last = upload(np.array(lengths, dtype=np.int64) - 1, self.device)
        rows = torch.arange(len(prompts), device=self.device)
        # the head of last positions alone: logits of all would be the largest tensor by far
        return Prefilled(cache, self.head(hidden[rows, last]))

    def decode(self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Feed row i `tokens[i]` at `positions[i]`; return `[n, vocabulary]` logits.

        The positions in the rows are those in the sequences (`step` has the other case).
        """
        ids, at = upload(np.array([tokens, positions], dtype=np.int64), self.device).unbind()
        return self.step(cache, ids, at, longest=max(positions) + 1)

    def step(
        self,
        cache: SlotCache,
        ids: Tensor,
        positions: Tensor,
        *,
        longest: int,
        rows: Rows | None = None,
    ) -> Tensor:
        """Return `[n, vocabulary]` logits, like `decode`, from numbers on the device.

        Args:
            cache: the keys and values of the rows.
            ids: `[n]` tokens.
            positions: `[n]` positions in the sequences.
            longest: the largest position in a row plus one.
            rows: lengths and prompts for compiled attention; None: positions in rows are those in
                sequences.
        """
        if cache.graphs is not None:
            compute = partial(self._captured_step, cache)
            return self.head(cache.graphs.run(ids, positions, compute, max_rows=cache.rows))
        row_positions = positions if rows is None else rows.lengths - 1
        cache.begin_step(row_positions, longest, rows)
        step_rows = cache.get_query_offset()
        if isinstance(step_rows, Rows) and self._decodes_compiled:
            assert self._decoder is not None
            return self.head(self._decoder(ids, positions, cache, step_rows))
        return self.head(self._hidden(ids[:, None], positions[:, None], cache)[:, 0])

    @property
    def _decodes_compiled(self) -> bool:
        """Whether one call computes all layers of a step."""
        return self._decoder is not None and self._decoder.layers is not None

    def _captured_step(self, cache: SlotCache, ids: Tensor, positions: Tensor) -> Tensor:
        cache.begin_step(positions, cache.capacity)  # a graph is for all lengths
        return self._hidden(ids[:, None], positions[:, None], cache)[:, 0]

    def load_weights(self, source: WeightSource) -> None:
        """Load new values of every weight. Raises EngineError like `copy_weights`."""
        # the memory that `drop_weights` has freed
        for storage, num_bytes in self._dropped:
            storage.resize_(num_bytes)
        self._dropped = []
        copy_weights(source, self.model)
        for layer in self._fused_layers:
            layer.refresh()
        if self._decoder is not None:
            self._decoder.refresh()

    def drop_weights(self) -> None:
        """Free the weights that `load_weights` fills: prepacked ones, on a GPU all."""
        for layer in prepacked_weights(self.model).values():
            layer.drop()
        if self._decoder is not None:
            self._decoder.layers = None
        if self.model_kernels.fuses_weights and not self._dropped:
            # once each: parameters of a fused product are views of one storage
            storages = {}
            for parameter in self.model.parameters():
                storage = parameter.untyped_storage()
                storages[storage._cdata] = storage
            for storage in storages.values():
                self._dropped.append((storage, storage.nbytes()))
                storage.resize_(0)

    def _hidden(self, ids: Tensor, positions: Tensor, cache: PromptCache | SlotCache) -> Tensor:
        """Return `[n, length, hidden]` last hidden states of `[n, length]` tokens."""
        output = self.backbone(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state


def _shares_prompts(model: PreTrainedModel, model_kernels: ModelKernels) -> bool:
    """Return True if compiled attention, without windows, can share prompts."""
    config = model.config
    if config.model_type in UNSHARED_PROMPTS:
        return False
    layers = getattr(config, "layer_types", None)
    if not layers:
        # without types of layers a window holds for all of them
        layers = [getattr(config, "sliding_window", None) or "full_attention"]
    has_windows = set(layers) != {"full_attention"}
    width = head_width(model) or 1
    states = torch.empty(1, width, dtype=model.dtype, device=model.device)
    return model_kernels.compiled and can_attend(states, states) and not has_windows


@torch.no_grad()
def copy_weights(source: WeightSource, model: nn.Module) -> None:
    """Copy every tensor of `source` into the parameter of its name, converting type and device.

    A tied weight may come under one or all of its names.

    Raises:
        EngineError: a name is unknown, a parameter is missing, a shape differs, or the values of a
            tied weight differ; the model is then partly overwritten.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    layers = prepacked_weights(model)
    # the name under which each parameter was filled, by the parameter's identity
    sources: dict[int, str] = {}
    unexpected = []
    for name, tensor in source.named_tensors():
        target = buffers.get(name, targets.get(name))
        if target is None:
            unexpected.append(name)
            continue
        first_name = sources.get(id(target))
        if first_name is not None:
            if not torch.equal(tensor.to(target), target):
                raise EngineError(
                    f"{first_name} and {name} are one tied weight in the engine's model, but"
                    " load_weights got different values for them"
                )
            continue
        require_shape(name, tensor.shape, target.shape)
        layer = layers.get(id(target))  # holds the parameter's values prepacked
        if layer is None:
            target.copy_(tensor)
        else:
            layer.load(tensor)
        if name in targets:
            sources[id(target)] = name
    missing = [name for name, target in targets.items() if id(target) not in sources]
    require_all_weights(len(targets), missing=missing, unexpected=unexpected)
