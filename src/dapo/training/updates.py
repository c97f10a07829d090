"""Algorithm 1, lines 9 and 10: from a batch to the updates of a step, for the loop, a session and a
probe.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dapo.algo.gae import explained_variance, generalized_advantages, token_rewards, whiten
from dapo.config import Config
from dapo.core.ranges import select, spread
from dapo.sampling.samples import (
    minibatches,
    with_advantages,
    with_engine_logprobs,
    with_kl_in_rewards,
    with_old_logprobs,
    with_reward_less_kl,
)
from dapo.training.teacher_server import teacher_server
from dapo.types import Group, Sample

T = TypeVar("T")


@runtime_checkable
class ValueFunction(Protocol):
    """The methods of a policy with a critic."""

    def values(self, samples: Sequence[Sample]) -> list[Sequence[float]]:
        """Compute V(s_t) of each response token of the samples."""

    def token_kl(self, samples: Sequence[Sample], *, step: int) -> list[Sequence[float]]:
        """Compute each response token's divergence to the reference, for `loss.kl_in: reward`."""


def with_token_advantages(
    samples: Sequence[Sample], critic: ValueFunction, config: Config, *, step: int
) -> list[Sample]:
    """Return the samples with advantages per token and the critic's targets (DAPO's Eq. 2 and 3).

    Values are recorded before the step's first update, and stay fixed over its minibatches.
    Advantages are whitened over the tokens that train; a response's `advantage` becomes the mean
    over its tokens. All numbers are float64. The steps of an episode are its sampled tokens: the
    value that follows a turn's last token is the next turn's first.
    """
    if not samples:
        return []
    rows = _of_sampled(critic.values(samples), samples)
    lengths = torch.tensor([sample.num_sampled for sample in samples])
    values = _padded(rows)
    mask = _padded(_of_sampled([sample.mask for sample in samples], samples))
    shaped = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    penalties = torch.zeros_like(values)
    if config.loss.has_kl_reward:
        kl = _of_sampled(critic.token_kl(samples, step=step), samples)
        penalties = config.loss.kl_coef * _padded(kl)
        samples = with_reward_less_kl(samples, [math.fsum(row) for row in kl], config)
    advantages, targets = generalized_advantages(
        token_rewards(shaped, lengths, penalties),
        values,
        lengths,
        gamma=1.0,
        gae_lambda=config.critic.gae_lambda,
    )
    advantages = whiten(advantages, mask) * config.reward.coef
    means = advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    credited = zip(
        samples,
        rows,
        _rows(advantages, lengths),
        _rows(targets, lengths),
        means.tolist(),
        strict=True,
    )
    return [
        _with_rows(sample, row, token_advantages, target, advantage=mean)
        for sample, row, token_advantages, target, mean in credited
    ]


def _of_sampled(rows: Sequence[Sequence[T]], samples: Sequence[Sample]) -> list[Sequence[T]]:
    """Return the values of the sampled tokens, from values of all response tokens."""
    return [select(row, sample.sampled) for row, sample in zip(rows, samples, strict=True)]


def _with_rows(sample: Sample, *rows: Sequence[float], advantage: float) -> Sample:
    """Return the sample with values, token advantages and targets, given for its sampled tokens."""
    values, advantages, targets = (
        spread(row, sample.sampled, len(sample.response_ids)) for row in rows
    )
    return replace(
        sample,
        advantage=advantage,
        token_advantages=advantages,
        old_values=values,
        value_targets=targets,
    )


def critic_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Compute `critic/*` from the values recorded before the step; empty without values."""
    valued = [
        sample for sample in samples if sample.old_values is not None and sample.num_trained_tokens
    ]
    if not valued:
        return {}
    mask = np.concatenate([np.asarray(sample.mask) for sample in valued]).astype(bool)
    values = torch.from_numpy(_joined([sample.old_values or () for sample in valued])[mask])
    targets = torch.from_numpy(_joined([sample.value_targets or () for sample in valued])[mask])
    metrics = {"critic/value_mean": float(values.mean())}
    if (explained := explained_variance(values, targets)) is not None:
        metrics["critic/explained_variance"] = explained
    return metrics


def _joined(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """Pad rows with zeros to `[N, T]`, float64."""
    padded = np.zeros((len(rows), max(map(len, rows))))
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded)


def _rows(padded: Tensor, lengths: Tensor) -> "list[array[float]]":
    return [
        array("d", row[:n].tobytes())
        for row, n in zip(padded.numpy(), lengths.tolist(), strict=True)
    ]


Phase: TypeAlias = Callable[[str], AbstractContextManager[Any]]


class LogprobSource(Protocol):
    """The methods of a policy that score responses before an update."""

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with `old_logprobs`, or a `rank_record` where ranks keep them."""

    def response_kl(self, samples: Sequence[Sample], *, step: int) -> list[float]:
        """Compute each response's divergence to the reference, before the step's first update."""


def _untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def estimate_advantages(
    groups: Sequence[Group],
    policy: LogprobSource,
    config: Config,
    *,
    step: int,
    phase: Phase = _untimed,
) -> list[Sample]:
    """Line 9: turn groups into samples with advantages (Eq. 9, 13, or `advantage.estimator`).

    Args:
        groups: All that the step trains on.
        policy: Scores responses where `loss.kl_in: reward` subtracts a divergence from the rewards,
            and estimates values where `advantage.estimator` is `gae`. A teacher behind a server
            scores them for the loss.
        config: The options.
        step: The step.
        phase: Times a part of the work by its name.
    """
    samples = with_advantages(groups, config)
    if config.has_critic:
        assert isinstance(policy, ValueFunction)
        with phase("values"):
            return with_token_advantages(samples, policy, config, step=step)  # PPO: Eq. 2, 3
    if config.loss.server is not None and config.has_kl and samples:
        with phase("reference_kl"):
            return teacher_server(config.loss.server).with_logprobs(samples)
    if config.loss.has_kl_reward and samples:
        with phase("reference_kl"):
            return with_kl_in_rewards(samples, policy.response_kl(samples, step=step), config)
    return samples


def prepare_updates(
    samples: Sequence[Sample],
    policy: LogprobSource,
    config: Config,
    *,
    step: int,
    phase: Phase = _untimed,
) -> list[list[Sample]]:
    """Line 10: cut samples into minibatches, and record pi_old of Eq. 6 where an update needs it."""
    updates = minibatches(samples, config, step=step)
    # also if the batch is short and fills one update: every step has the same objective
    if updates and config.reuses_samples and config.loss.has_ratio_to_engine:
        return with_engine_logprobs(updates)

    def record(samples: Sequence[Sample]) -> list[Sample]:
        with phase("old_logprobs"):
            return policy.record_old_logprobs(samples)

    if len(updates) > 1:
        return with_old_logprobs(updates, record, source=config.loss.old_logprobs)
    return updates
