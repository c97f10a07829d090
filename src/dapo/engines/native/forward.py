"""The transformers model as the engine runs it: prefill of whole prompts, decode steps, and loading of weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource
from dapo.engines.native.cache import PromptCache, SlotCache
from dapo.engines.native.prepacked_linear import prepacked_weights
from dapo.engines.request_checks import require_all_weights, require_shape


@dataclass(frozen=True)
class Prefilled:
    """Prompts that have been through the model: all that is needed to start responses to them."""

    cache: PromptCache
    logits: Tensor  # `[prompts, vocabulary]` of each prompt's first response token

    def select(self, index: int, length: int) -> "Prefilled":
        """A copy of one prompt, `length` tokens long, without the others."""
        return Prefilled(self.cache.select(index, length), self.logits[index : index + 1].clone())


class Forward:
    """Backbone and head of a causal language model; logits are computed only where a token will be sampled."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.backbone: nn.Module = model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        self.device = model.device
        self.vocabulary = next(model.get_input_embeddings().parameters()).shape[0]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Run prompts together, padded on the right, where causal attention never looks."""
        lengths = list(map(len, prompts))
        width = max(lengths)
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=self.device)
        cache = PromptCache()
        hidden = self._hidden(ids, torch.arange(width, device=self.device)[None], cache)  # [prompts, width, hidden]
        last = torch.tensor(lengths, device=self.device) - 1
        return Prefilled(cache, self.head(hidden[torch.arange(len(prompts), device=self.device), last]))

    def decode(self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Feed row i `tokens[i]` at `positions[i]`; returns `[n, vocabulary]` logits of what follows."""
        ids, at = torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device)
        cache.begin_step(at, max(positions) + 1)
        return self.head(self._hidden(ids[:, None], at[:, None], cache)[:, 0])

    def _hidden(self, ids: Tensor, positions: Tensor, cache: PromptCache | SlotCache) -> Tensor:
        output = self.backbone(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return output.last_hidden_state


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
