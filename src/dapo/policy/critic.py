"""The critic of PPO: a value for each response token, from a trained copy of the policy.

The value of a token depends only on the tokens before it: like log-probabilities, the values of a
prefix that several responses of a microbatch share are computed once.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.algo.gae import value_loss
from dapo.config import Config
from dapo.core.errors import CheckpointError
from dapo.core.memory import explain_out_of_memory
from dapo.policy.checkpoint import StateCopy, load_optimizer, state_of, write_state
from dapo.policy.logprobs import hidden_states
from dapo.policy.minibatch import loss_weights
from dapo.policy.objective import add_sums
from dapo.policy.optim import MasterAdamW, learning_rate, schedule_of
from dapo.policy.packing import (
    Microbatch,
    RankMicrobatch,
    in_callers_order,
    pack,
    pack_microbatch,
    partition,
)
from dapo.policy.transfer import to_device
from dapo.types import Sample

CLIP_RANGE = 0.5  # as in other implementations of PPO
FOLDER = "critic"  # the folder of a checkpoint that holds the critic


class ValueModel(nn.Module):
    """A language model with a linear layer to one number, initially zero, in place of its head."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Copy the network of `model`, which does not change."""
        super().__init__()
        self.base_model = copy.deepcopy(model.base_model)
        to_vocabulary: Any = model.get_output_embeddings()
        width = to_vocabulary.weight.shape[1]
        wide = torch.promote_types(model.dtype, torch.float32)
        # the layer's own initialisation would draw from the global generator
        self.head: nn.Linear = nn.utils.skip_init(
            nn.Linear, width, 1, dtype=wide, device=model.device
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.eval()

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Return `[S]` values of the microbatch's targets, in float32 or better."""
        hidden = hidden_states(self, microbatch)  # type: ignore[arg-type]  # [M, hidden]
        predictor_values = self.head(hidden.to(self.head.weight.dtype)).squeeze(1)  # [M]
        return predictor_values.index_select(0, microbatch.rows)


class Critic:
    """The value function of `advantage.estimator: gae`, with an optimiser of its own."""

    def __init__(
        self, config: Config, model: PreTrainedModel, *, clip_range: float | None = CLIP_RANGE
    ) -> None:
        """Start from a copy of `model`, the initial policy with packed attention.

        Args:
            config: the configuration.
            model: the initial policy, which does not change.
            clip_range: the largest change of a value in a step before its gradient vanishes, in
                units of the reward; None: no limit.
        """
        self._config = config
        self._clip_range = clip_range
        self.model = ValueModel(model)
        self._device = model.device
        self._optimizer = MasterAdamW(
            self.model,
            config.optim.model_copy(update={"lr": config.critic.lr}),
            advice="lower critic.lr, or look at critic/loss and critic/grad_norm",
        )
        self._copy = StateCopy()

    @property
    def skipped_in_a_row(self) -> int:
        """Return the number of updates skipped since the last successful one."""
        return self._optimizer.skipped_in_a_row

    @explain_out_of_memory(
        torch.OutOfMemoryError, "the critic's values", "lower train.microbatch_tokens"
    )
    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[Sequence[float]]:
        """Return V(s_t) of each response token, one row per sample, in order.

        A group's samples must be adjacent.
        """
        microbatches = pack(samples, max_tokens=self._config.microbatch_tokens, device=self._device)
        values = [self.model(microbatch) for microbatch in microbatches]
        return in_callers_order(microbatches, values, len(samples))

    @explain_out_of_memory(
        torch.OutOfMemoryError,
        "an update of the critic",
        "lower train.microbatch_tokens or set train.recompute=true",
    )
    def backward(self, minibatch: Sequence[Sample]) -> dict[str, float]:
        """Compute the gradient on samples with `old_values` and `value_targets`; return the sums.

        The loss is the mean over the trained tokens of the minibatch, for every `loss.aggregate`.
        """
        weights = loss_weights(minibatch, self._config, aggregate="token")
        # samples with an advantage of 0 have values to learn
        trained = [i for i, sample in enumerate(minibatch) if sample.num_trained_tokens]
        samples = [minibatch[i] for i in trained]
        max_tokens = self._config.microbatch_tokens
        (passes,) = partition(samples, weights[trained].tolist(), ranks=1, max_tokens=max_tokens)
        self._optimizer.zero_grad()
        sums = [self._backward(rank_microbatch) for rank_microbatch in passes]
        return add_sums([*sums, self._optimizer.measure()])

    def apply_gradient(self, sums: Mapping[str, float], *, step: int) -> dict[str, float]:
        """Update the critic by the gradient of `backward`, which returned `sums`.

        Returns the metrics `critic/*`.

        The learning rate follows the schedule of `optim` at training step `step` (from 1), with
        `critic.lr` in place of `optim.lr`. The update is skipped if the loss or the gradient's norm
        is not finite. Raises NumericsError if the previous update made a weight infinite or NaN.
        """
        schedule = schedule_of(self._config.optim, self._config.train.num_steps)
        rate = learning_rate(step, lr=self._config.critic.lr, **schedule)
        norm, skipped = self._optimizer.update(rate, sums, is_valid=math.isfinite(sums["loss"]))
        metrics = {
            "critic/loss": sums["loss"],
            "critic/grad_norm": norm,
            "critic/skipped": float(skipped),
        }
        if self._clip_range is not None and sums["tokens"]:
            metrics["critic/clip_fraction"] = sums["clipped"] / sums["tokens"]
        return metrics

    def writer(self, *, copies: bool) -> Callable[[Path], None]:
        """Return a function that writes the state into the folder `critic` of a checkpoint.

        It writes the state, or with `copies` a copy of the present one, until the next copy is
        made. Raises NumericsError if a weight is not finite.
        """
        self._optimizer.require_finite()
        state = state_of(self._optimizer)
        if copies:
            state = self._copy.take(state)
        return partial(_write, state=state)

    def load(self, directory: Path) -> None:
        """Restore a state that was written into a checkpoint, bit for bit.

        Raises CheckpointError.
        """
        if not (directory / FOLDER).is_dir():
            raise CheckpointError(
                f"{directory} holds no critic, because its run did not use advantage.estimator=gae;"
                " resume it with its own advantage.estimator, or start a new run"
            )
        load_optimizer(self._optimizer, directory / FOLDER)

    def _backward(self, rank_microbatch: RankMicrobatch) -> Mapping[str, Tensor | float]:
        """Accumulate a microbatch's gradient; return the sums over its trained tokens."""
        microbatch = pack_microbatch(rank_microbatch, self._device)
        tokens = self._per_token(rank_microbatch, microbatch)
        loss, sums = value_loss(self.model(microbatch), **tokens, clip_range=self._clip_range)
        loss.backward()
        return {**sums, "loss": loss.detach()}

    def _per_token(
        self, rank_microbatch: RankMicrobatch, microbatch: Microbatch
    ) -> dict[str, Tensor]:
        """Return the arguments of `value_loss`, `[S]` each, brought to the device in one copy."""
        samples = rank_microbatch.samples
        lengths = np.array(microbatch.lengths)
        rows: dict[str, Any] = {
            "old_values": [sample.old_values for sample in samples],
            "targets": [sample.value_targets for sample in samples],
            "mask": [sample.mask for sample in samples],
        }
        columns = {}
        for name, parts in rows.items():
            if any(part is None for part in parts):
                raise ValueError("the critic needs samples with old_values and value_targets")
            columns[name] = np.concatenate(parts).astype(np.float64)
        columns["weights"] = np.repeat(rank_microbatch.weights, lengths)
        in_order = np.stack(list(columns.values()))[:, microbatch.order]
        numbers = torch.from_numpy(in_order).to(self.model.head.weight.dtype)
        on_device = to_device(numbers, self._device)
        return dict(zip(columns, on_device.unbind(), strict=True))


def _write(directory: Path, state: Any) -> None:
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    write_state(folder, state)
