"""From judged groups to samples: shaped rewards (Eq. 13), advantages (Eq. 9), masks."""

from collections.abc import Sequence

import numpy as np
import torch

from dapo.algo.advantages import group_advantages
from dapo.algo.overlong import overlong_penalty, trains
from dapo.config import Config
from dapo.core.packed import CompactArray
from dapo.core.rng import keyed_permutation
from dapo.types import Generation, Group, Sample, Verdict


def with_advantages(groups: Sequence[Group], config: Config) -> list[Sample]:
    """Algorithm 1, line 9: one sample for each response with a verdict, groups in their order.

    A response whose verdict is an error is left out of the group's mean and of the batch. `overlong.mode: filter`
    masks truncated responses; they still count in the group's mean.
    """
    return [sample for group in groups for sample in _group_samples(group, config)]


def shaped_reward(generation: Generation, verdict: Verdict, config: Config) -> float:
    """The verdict's score plus Eq. 13's penalty for the response's length."""
    if config.overlong.mode != "soft":
        return verdict.score
    return verdict.score + overlong_penalty(
        len(generation.token_ids),
        max_length=config.rollout.max_response_tokens,
        buffer=config.overlong.buffer_tokens,
        factor=config.overlong.penalty,
    )


def minibatches(samples: Sequence[Sample], config: Config, *, step: int) -> list[list[Sample]]:
    """Algorithm 1, line 10: whole groups in a keyed order, `minibatch_groups` of them to an update.

    A short batch makes fewer updates; its last one may be smaller.
    """
    by_group: dict[int, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample)
    groups = list(by_group.values())
    order = keyed_permutation(len(groups), config.train.seed, "minibatches", step)
    size = config.train.minibatch_groups
    return [
        [sample for i in order[start : start + size] for sample in groups[i]] for start in range(0, len(groups), size)
    ]


def _group_samples(group: Group, config: Config) -> list[Sample]:
    valid = [(g, v) for g, v in zip(group.generations, group.verdicts, strict=True) if v.error is None]
    rewards = [shaped_reward(generation, verdict, config) for generation, verdict in valid]
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), scale=config.advantage.scale)
    return [
        Sample(
            group_id=group.id,
            prompt_ids=group.prompt_ids,
            response_ids=generation.token_ids,
            reward=reward,
            advantage=advantage,
            engine_logprobs=generation.logprobs,
            old_logprobs=None,
            mask=CompactArray(np.full(len(generation.token_ids), trains(generation.finish, mode=config.overlong.mode))),
        )
        for (generation, _), reward, advantage in zip(valid, rewards, advantages.tolist(), strict=True)
    ]
