"""The transformers model as the engine runs it: prefill of whole prompts, decode steps, and loading of weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource
from dapo.engines.native.attention import PromptStates
from dapo.engines.native.cache import PromptCache, SlotCache
from dapo.engines.native.formulation import Formulation
from dapo.engines.native.joint_layers import JointKernels
from dapo.engines.native.prepacked_linear import drop_prepacked, prepacked_weights
from dapo.engines.native.upload import upload
from dapo.engines.request_checks import require_all_weights, require_shape


@dataclass(frozen=True)
class Beginning:
    """The first tokens of prompts, with their keys and values."""

    token_ids: tuple[int, ...]
    cache: PromptCache

    def cut(self, length: int) -> "Beginning":
        """The first `length` tokens of it."""
        return (
            Beginning(self.token_ids[:length], self.cache.select(0, length)) if length < len(self.token_ids) else self
        )


@dataclass(frozen=True)
class Prefilled:
    """Prompts that have passed through the model, ready for their responses."""

    cache: PromptCache
    logits: Tensor  # `[prompts, vocabulary]` of each prompt's first response token


class Shared(NamedTuple):
    """Prompts that a decode step reads once for all rows that go on after them."""

    positions: Tensor  # [n] in the rows, of the tokens that are fed
    prompts: Sequence[tuple[Tensor, PromptStates]]  # as of `attention.SharedPrompts`


class Forward:
    """Backbone and head of a causal language model; logits are computed only where a token will be sampled."""

    def __init__(
        self, model: PreTrainedModel, formulation: Formulation, joint_layers: Sequence[JointKernels] = ()
    ) -> None:
        """`joint_layers` hold derived forms of some weights, which `load_weights` refreshes."""
        self.model, self.formulation, self._joint_layers = model, formulation, joint_layers
        self.backbone: nn.Module = model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        self.device = model.device
        self.vocabulary = next(model.get_input_embeddings().parameters()).shape[0]
        self.shares_prompts = _shares_prompts(model, formulation)
        """Whether a decode step can read a prompt once for several rows."""
        self.position_bytes = 0
        """The size of the keys and values of one position in all layers; 0 before the first cache."""
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []

    def prefill(self, prompts: Sequence[Sequence[int]], beginning: Beginning | None = None) -> Prefilled:
        """Run prompts together, padded on the right, where causal attention never looks.

        `beginning`: the proper prefix of all prompts, which is not computed again.
        """
        offset = 0 if beginning is None else len(beginning.token_ids)
        lengths = [len(prompt) - offset for prompt in prompts]
        width = max(lengths)
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = prompt[offset:]
        cache = PromptCache(None if beginning is None else beginning.cache)
        positions = torch.arange(offset, offset + width, device=self.device)[None]
        hidden = self._hidden(upload(ids, self.device), positions, cache)  # [prompts, width, hidden]
        last = upload(np.array(lengths, dtype=np.int64) - 1, self.device)
        return Prefilled(cache, self.head(hidden[torch.arange(len(prompts), device=self.device), last]))

    def prefill_beginning(self, token_ids: Sequence[int]) -> Beginning:
        """Run the first tokens of prompts."""
        return Beginning(tuple(token_ids), self.prefill([token_ids]).cache)

    def decode(self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Feed row i `tokens[i]` at `positions[i]`; returns `[n, vocabulary]` logits of what follows."""
        ids, at = upload(np.array([tokens, positions], dtype=np.int64), self.device).unbind()
        return self.step(cache, ids, at, longest=max(positions) + 1)

    def step(
        self, cache: SlotCache, ids: Tensor, positions: Tensor, *, longest: int, shared: Shared | None = None
    ) -> Tensor:
        """Do as `decode`, from `[n]` numbers on the device; `longest` is one more than the largest position in a row.

        `shared`: prompts outside of the rows; without them positions in the rows are those of the sequences.
        """
        if shared is None:
            cache.begin_step(positions, longest)
        else:
            cache.begin_step(shared.positions, longest, shared.prompts)
        return self.head(self._hidden(ids[:, None], positions[:, None], cache)[:, 0])

    def load_weights(self, source: WeightSource) -> None:
        """Take new values of every weight. Raises EngineError as `copy_weights` does."""
        for storage, num_bytes in self._dropped:
            storage.resize_(num_bytes)
        self._dropped = []
        copy_weights(source, self.model)
        for layer in self._joint_layers:
            layer.refresh()

    def drop_weights(self) -> None:
        """Free the memory of the weights that `load_weights` will fill: prepacked ones, on a GPU all."""
        drop_prepacked(self.model)
        if self.formulation.is_joint and not self._dropped:
            storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in self.model.parameters()}
            self._dropped = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in self._dropped:
                storage.resize_(0)

    def _hidden(self, ids: Tensor, positions: Tensor, cache: PromptCache | SlotCache) -> Tensor:
        output = self.backbone(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return output.last_hidden_state


def _shares_prompts(model: PreTrainedModel, formulation: Formulation) -> bool:
    """On a CPU, without windows, and with keys as wide as values."""
    config = model.config
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_windows = layers != {"full_attention"} or (
        getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None
    )
    same_widths = getattr(config, "v_head_dim", None) is None
    return model.device.type == "cpu" and formulation.attend is None and same_widths and not has_windows


@torch.no_grad()
def copy_weights(source: WeightSource, model: nn.Module) -> None:
    """Copy every tensor of `source` into the parameter of its name, converted to its dtype and device.

    A tied weight may come under one of its names or under each. Raises EngineError if a name is unknown, a parameter
    gets nothing, a shape differs, or the names of a tied weight disagree; the model is then partly overwritten.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    layers = prepacked_weights(model)
    given: dict[int, str] = {}  # the name that each parameter was filled under, by the parameter's identity
    unexpected = []
    for name, tensor in source.named_tensors():
        target = buffers.get(name, targets.get(name))
        if target is None:
            unexpected.append(name)
        elif (first := given.get(id(target))) is not None:
            if not torch.equal(tensor.to(target), target):
                raise EngineError(
                    f"{first} and {name} are one tied weight in the engine's model, but load_weights got different "
                    "values for them"
                )
        else:
            require_shape(name, tensor.shape, target.shape)
            layer = layers.get(id(target))  # keeps the parameter's values prepacked
            target.copy_(tensor) if layer is None else layer.load(tensor)
            if name in targets:
                given[id(target)] = name
    missing = [name for name, target in targets.items() if id(target) not in given]
    require_all_weights(len(targets), missing=missing, unexpected=unexpected)
