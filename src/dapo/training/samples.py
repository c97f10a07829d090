"""From judged groups to samples: shaped rewards (Eq. 13), advantages (Eq. 9), masks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Literal

import torch

from dapo.algo.advantages import group_advantages
from dapo.algo.overlong import overlong_penalty, trains
from dapo.config import Config
from dapo.core.constant_rows import constant_row
from dapo.core.garbage import collections_paused
from dapo.core.rng import keyed_permutation
from dapo.types import Generation, Group, Sample, Verdict

NO_WEIGHTS: Mapping[int, float] = {}


@collections_paused()  # the trainer waits for it
def with_advantages(groups: Sequence[Group], config: Config, weights: Mapping[int, float] = NO_WEIGHTS) -> list[Sample]:
    """Algorithm 1, line 9: one sample per response with a verdict, the samples of a group adjacent.

    The advantages (Eq. 9) come from `Group.rewards`. A response whose verdict is an error has no reward: it is left out
    of the group's mean and of the batch. `overlong.mode: filter` masks the tokens of truncated responses, whose rewards
    still count in the group's mean. `weights` are factors of groups in the loss by their id, 1 for those it lacks.
    """
    return [sample for group in groups for sample in _group_samples(group, config, weights.get(group.id, 1.0))]


def shaped_reward(generation: Generation, verdict: Verdict, config: Config) -> float | None:
    """The verdict's score plus Eq. 13's penalty for the response's length; None where the verdict is an error."""
    if verdict.error is not None:
        return None
    if config.overlong.mode != "soft":
        return verdict.score
    return verdict.score + overlong_penalty(
        len(generation.token_ids),
        max_length=config.rollout.max_response_tokens,
        buffer=config.overlong.buffer_tokens,
        factor=config.overlong.penalty,
    )


def minibatches(samples: Sequence[Sample], config: Config, *, step: int) -> list[list[Sample]]:
    """Algorithm 1, line 10: whole groups in a keyed order, `train.minibatch_groups` of them per update.

    The samples of a group must be adjacent, and are adjacent in the result. A short batch makes fewer updates; its last
    one may be smaller.
    """
    groups = [list(members) for _, members in groupby(samples, key=lambda sample: sample.group_id)]
    order = keyed_permutation(len(groups), config.train.seed, "minibatches", step)
    size = config.train.minibatch_groups
    return [
        [sample for i in order[start : start + size] for sample in groups[i]] for start in range(0, len(groups), size)
    ]


def with_old_logprobs(
    minibatches: Sequence[list[Sample]],
    record: Callable[[list[Sample]], Sequence[Sample]],
    *,
    source: Literal["policy", "engine"] = "policy",
) -> list[list[Sample]]:
    """The minibatches of a step with pi_old of Eq. 6 from the second one on.

    In the first update the policy still is pi_old: there the detached log-probabilities of the update itself are taken,
    and compared with the engine's.

    Args:
        minibatches: of whole groups.
        record: asks the policy for the log-probabilities of samples.
        source: `engine`: take the engine's instead, unless nothing in the first update would be compared with them.
    """
    first, *later = minibatches
    samples = [sample for minibatch in later for sample in minibatch]
    is_compared = any(sample.has_signal and sample.num_trained_tokens for sample in first)
    recorded = iter(_from_engine(samples) if source == "engine" and is_compared else record(samples))
    return [first, *(list(islice(recorded, len(minibatch))) for minibatch in later)]


def _from_engine(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the engine's log-probabilities as old ones: moved, for their gap to themselves is no metric."""
    return [replace(sample, old_logprobs=sample.engine_logprobs, engine_logprobs=()) for sample in samples]


def _group_samples(group: Group, config: Config, weight: float) -> list[Sample]:
    responses = zip(group.generations, group.rewards, strict=True)
    valid = [(i, generation, reward) for i, (generation, reward) in enumerate(responses) if reward is not None]
    rewards = torch.tensor([reward for _, _, reward in valid], dtype=torch.float64)
    if config.has_critic:
        advantages = [0.0] * len(valid)  # until the critic has been asked: `with_token_advantages`
    else:
        advantages = group_advantages(rewards, scale=config.advantage.scale).tolist()
    samples = []
    for (i, generation, reward), advantage in zip(valid, advantages, strict=True):
        mask = constant_row(trains(generation.finish, mode=config.overlong.mode), len(generation.token_ids))
        samples.append(
            Sample(
                group_id=group.id,
                prompt_ids=group.prompt_ids,
                response_ids=generation.token_ids,
                reward=reward,
                advantage=advantage,
                engine_logprobs=generation.logprobs,
                old_logprobs=None,
                mask=mask,
                index=i,
                weight=weight,
            )
        )
    return samples
