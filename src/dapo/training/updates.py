"""Algorithm 1, lines 9 and 10, for the loop, a session, a probe and a replay: from a batch to the updates of a step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

from dapo.config import Config
from dapo.training.samples import NO_WEIGHTS, minibatches, with_advantages, with_kl_in_rewards, with_old_logprobs
from dapo.training.token_advantages import ValueFunction, with_token_advantages
from dapo.types import Group, Sample

Phase: TypeAlias = Callable[[str], AbstractContextManager[Any]]


class LogprobSource(Protocol):
    """The methods of a policy that score responses before an update."""

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]: ...

    def response_kl(self, samples: Sequence[Sample], *, step: int) -> list[float]: ...


def _untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def estimate_advantages(
    groups: Sequence[Group],
    policy: LogprobSource,
    config: Config,
    *,
    step: int,
    weights: Mapping[int, float] = NO_WEIGHTS,
    critic: ValueFunction | None = None,
    phase: Phase = _untimed,
) -> list[Sample]:
    """Line 9: turn the groups of a step into samples with advantages (Eq. 9 and 13, or by `advantage.estimator`).

    Args:
        groups: All groups that the step trains on.
        policy: Scores responses where `loss.kl_in: reward` subtracts a divergence from the rewards.
        config: The run's options.
        step: The step, from 1.
        weights: Factors of groups in the loss, by id.
        critic: Estimates values where `advantage.estimator` is `gae`.
        phase: Times a part of the work by its name.
    """
    samples = with_advantages(groups, config, weights)
    if critic is not None:
        with phase("values"):
            return with_token_advantages(samples, critic, config, step=step)  # PPO: Eq. 2, 3
    if config.loss.has_kl_reward and samples:
        with phase("reference_kl"):
            return with_kl_in_rewards(samples, policy.response_kl(samples, step=step), config)
    return samples


def prepare_updates(
    samples: Sequence[Sample], policy: LogprobSource, config: Config, *, step: int, phase: Phase = _untimed
) -> list[list[Sample]]:
    """Line 10: cut the samples of a step into minibatches, and record pi_old of Eq. 6 for the second one on."""
    updates = minibatches(samples, config, step=step)
    if len(updates) > 1:
        with phase("old_logprobs"):
            return with_old_logprobs(updates, policy.record_old_logprobs, source=config.loss.old_logprobs)
    return updates
