"""The reference model of the KL divergence: the initial policy, or that of an earlier step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

REFERENCE = "reference"  # checkpoint tensors: the weights of the reference
# checkpoint key: the training step whose policy the reference copies
REFERENCE_STEP = "reference_step"


class Reference:
    """A frozen copy of the policy in its computing type, sharded over the same ranks."""

    def __init__(self, model: Any, weights: Mapping[str, Tensor], *, every: int | None) -> None:
        """Take ownership of `model`, a copy of the initial policy.

        `weights` are its weights by name, this rank's rows if it is sharded; `every` is the number
        of steps between copies of the policy (None: never copied again).
        """
        self.model = model
        self.weights = weights
        self.step = 0  # the training step whose policy the reference copies; 0: the initial policy
        self._every = every

    @property
    def is_updated(self) -> bool:
        """Return True if it copies later policies, so that checkpoints must include it."""
        return self._every is not None

    def sync_to(self, policy: Mapping[str, Tensor], *, step: int) -> None:
        """Copy the weights of `policy` if it is due before training step `step` (from 1).

        Whether it is due depends only on the step number, so a resumed run copies at the same
        steps.
        """
        if self._every is not None:
            due = (step - 1) // self._every * self._every
            if due > self.step:
                self.restore(policy, step=due)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], *, step: int) -> None:
        """Copy `weights`, the policy after `step` steps, in the type of the reference."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])
        self.step = step
