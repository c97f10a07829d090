"""The transformers model, run in the two ways that the engine needs: prompts whole, then token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.engines.native.cache import PromptCache, SlotCache
from dapo.engines.native.graphs import DecodeGraphs, GraphCapturer


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

    def __init__(self, model: PreTrainedModel, *, capturer: GraphCapturer | None = None) -> None:
        """`capturer`: how decode steps are recorded, if they are (see `graphs`)."""
        self.model = model
        self.backbone: nn.Module = model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        self.device = model.device
        self.vocabulary = next(model.get_input_embeddings().parameters()).shape[0]
        self.graphs = None if capturer is None else DecodeGraphs(self._step, capturer, self.device)

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
        if self.graphs is not None:
            return self.graphs.decode(cache, tokens, positions)
        ids, at = torch.tensor(tokens, device=self.device)[:, None], torch.tensor(positions, device=self.device)
        return self._step(cache, ids, at, max(positions) + 1)

    def _step(self, cache: SlotCache, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """`ids` `[n, 1]`, `positions` `[n]`; attends to the first `length` positions."""
        cache.begin_step(positions, length)
        return self.head(self._hidden(ids, positions[:, None], cache)[:, 0])

    def _hidden(self, ids: Tensor, positions: Tensor, cache: PromptCache | SlotCache) -> Tensor:
        return self.backbone(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
