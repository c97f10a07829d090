"""The frozen model that the divergence of the KL term is to: the initial policy, or the policy of some steps ago."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

REFERENCE = "reference"
"""The kind of a checkpoint's tensors that are its weights."""
REFERENCE_STEP = "reference_step"
"""The counter of a checkpoint that says after how many steps the policy was that it is a copy of."""


class Reference:
    """A model in the type that the policy computes in, on as many ranks as the policy."""

    def __init__(self, model: Any, weights: Mapping[str, Tensor], *, every: int | None) -> None:
        """Take over a copy of the policy as training begins.

        Args:
            model: what scores.
            weights: its weights by their names, of a sharded one this rank's rows.
            every: the steps after which it becomes a copy of the policy again; None: never.
        """
        self.model = model
        self.weights = weights
        self.step = 0
        """After how many steps the policy was that it is a copy of."""
        self._every = every

    @property
    def moves(self) -> bool:
        """Whether it is replaced at all, so that a checkpoint must hold it."""
        return self._every is not None

    def follow(self, policy: Mapping[str, Tensor], *, step: int) -> None:
        """Before step `step` (from 1) changes the `policy` of these weights: become a copy of it, where that is due.

        When it is due depends on the step's number alone, so that a resumed run does the same.
        """
        if self._every is not None and (due := (step - 1) // self._every * self._every) > self.step:
            self.restore(policy, step=due)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], *, step: int) -> None:
        """Take these weights, rounded to its own type, as those of the policy after `step` steps."""
        for name, own in self.weights.items():
            own.copy_(weights[name])
        self.step = step
