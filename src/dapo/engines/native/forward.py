"""The transformers model, run in the two ways that the engine needs: prompts whole, then token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.engines.native.cache import PromptCache, SlotCache


@dataclass(frozen=True)
class Prefilled:
    """Prompts that have been through the model: all that is needed to start responses to them."""

    cache: PromptCache
    logits: Tensor
    """`[prompts, vocabulary]` of each prompt's first response token."""

    def select(self, index: int, length: int) -> "Prefilled":
        """A copy of one prompt, `length` tokens long, without the others."""
        return Prefilled(self.cache.select(index, length), self.logits[index : index + 1].clone())


class Forward:
    """Backbone and head of a causal language model; logits are computed where a token will be drawn, nowhere else."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.backbone: nn.Module = model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        self.device = model.device
        self.vocabulary = next(model.get_input_embeddings().parameters()).shape[0]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Run prompts together: padded on the right, where causal attention never looks."""
        lengths = [len(prompt) for prompt in prompts]
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
        return self.backbone(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
