"""Turns judged groups into samples: shaped rewards (Eq. 13), advantages (Eq. 9 and variants),
masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from math import fsum
from typing import Literal

import torch

from dapo.algo.estimator_table import ESTIMATORS
from dapo.algo.overlong import overlong_penalty, trains
from dapo.config import Config
from dapo.core.constant_rows import constant_row
from dapo.core.memory import collections_paused
from dapo.core.ranges import spread
from dapo.core.rng import keyed_permutation
from dapo.types import Generation, Group, Sample, Verdict


@collections_paused()  # the trainer waits for it
def with_advantages(groups: Sequence[Group], config: Config) -> list[Sample]:
    """Algorithm 1, line 9: make one sample per response with a verdict, the groups' side by side.

    An agent's episode makes one sample per branch, with the advantage of the episode and equal
    shares of its weight.

    The advantages (Eq. 9, or by `advantage.estimator`) come from `Group.rewards`; `groups` are all
    that the step trains on. A response whose verdict is an error has no reward: it is left out of
    every mean and of the batch. `overlong.mode: filter` masks the tokens of truncated responses,
    whose rewards still count in the means. With `environment.credit: turn` samples have
    `token_advantages`.
    """
    rewards = [[reward for reward in group.rewards if reward is not None] for group in groups]
    pairs = zip(groups, advantages_of(rewards, config), strict=True)
    samples = [_group_samples(group, advantages, config) for group, advantages in pairs]
    if config.credits_turns:
        samples = [
            _with_turn_advantages(group_samples, group, config)
            for group_samples, group in zip(samples, groups, strict=True)
        ]
    return [sample for group_samples in samples for sample in group_samples]


def advantages_of(rewards: Sequence[Sequence[float]], config: Config) -> list[list[float]]:
    """Compute a step's advantages, times `reward.coef`, from its rewards, both by group."""
    reward_tensors = [torch.tensor(group_rewards, dtype=torch.float64) for group_rewards in rewards]
    estimator = ESTIMATORS[config.advantage.estimator]
    coef = config.reward.coef
    if estimator.function is None or not reward_tensors or not coef:
        # until the critic has estimated: with_token_advantages
        return [[0.0] * len(group_rewards) for group_rewards in rewards]
    estimate = estimator.load()
    sizes = torch.tensor([len(group_rewards) for group_rewards in reward_tensors])
    if estimator.takes_batch:
        batch_advantages = estimate(
            torch.cat(reward_tensors), torch.arange(len(reward_tensors)).repeat_interleave(sizes)
        )
        return [(part * coef).tolist() for part in batch_advantages.split(sizes.tolist())]
    keywords = {"scale": config.advantage.scale} if config.advantage.estimator == "group" else {}
    return [
        (estimate(group_rewards, **keywords) * coef).tolist() for group_rewards in reward_tensors
    ]


def with_kl_in_rewards(
    samples: Sequence[Sample], kl: Sequence[float], config: Config
) -> list[Sample]:
    """`loss.kl_in: reward`: give samples the rewards R - kl_coef KL, and their advantages.

    `samples` are all that a step trains on, and the samples of a group are adjacent. `kl` is the
    divergence of each to the reference, summed over its sampled tokens (`Policy.response_kl`).
    """
    penalised = with_reward_less_kl(samples, kl, config)
    groups = [
        list(members) for _, members in groupby(penalised, key=lambda sample: sample.group_id)
    ]
    rewards = [{sample.index: sample.reward for sample in members} for members in groups]
    advantages = advantages_of([list(responses.values()) for responses in rewards], config)
    results = []
    for members, responses, group_advantages in zip(groups, rewards, advantages, strict=True):
        by_index = dict(zip(responses, group_advantages, strict=True))
        results += [replace(sample, advantage=by_index[sample.index]) for sample in members]
    return results


def shaped_reward(generation: Generation, verdict: Verdict, config: Config) -> float | None:
    """Add Eq. 13's length penalty to the verdict's score; None if the verdict is an error."""
    if verdict.error is not None:
        return None
    return verdict.score + length_penalty(generation, config)


def length_penalty(generation: Generation, config: Config) -> float:
    """Compute Eq. 13's penalty for a response's length; 0 unless `overlong.mode` is `soft`."""
    if config.overlong.mode != "soft":
        return 0.0
    return overlong_penalty(
        generation.num_sampled,
        max_length=config.rollout.max_response_tokens,
        buffer=config.overlong.buffer_tokens,
        factor=config.overlong.penalty,
    )


def with_reward_less_kl(
    samples: Sequence[Sample], kl: Sequence[float], config: Config
) -> list[Sample]:
    """Give samples the rewards R - kl_coef KL; their advantages do not change.

    KL is that of the whole response: the branches of an episode have one reward.
    """
    coef = config.loss.kl_coef
    totals: dict[tuple[int, int], float] = {}
    for sample, divergence in zip(samples, kl, strict=True):
        response = sample.group_id, sample.index
        totals[response] = totals.get(response, 0.0) + divergence
    return [
        replace(
            sample,
            reward=sample.reward - coef * totals[sample.group_id, sample.index],
            kl=divergence,
        )
        for sample, divergence in zip(samples, kl, strict=True)
    ]


def minibatches(samples: Sequence[Sample], config: Config, *, step: int) -> list[list[Sample]]:
    """Algorithm 1, line 10: cut a step into updates of `train.minibatch_groups`, in keyed order.

    The samples of a group must be adjacent, and remain so. A short batch has fewer updates; the
    last of a pass may be smaller. Each of `train.passes_per_step` passes holds every group, in an
    order of its own.
    """
    groups = [list(members) for _, members in groupby(samples, key=lambda sample: sample.group_id)]
    size = config.train.minibatch_groups
    updates = []
    for number in range(config.train.passes_per_step):
        order = keyed_permutation(
            len(groups), config.train.seed, "minibatches", step, *([number] if number else [])
        )
        starts = range(0, len(groups), size)
        updates += [
            [sample for i in order[start : start + size] for sample in groups[i]]
            for start in starts
        ]
    return updates


def with_old_logprobs(
    minibatches: Sequence[list[Sample]],
    record: Callable[[list[Sample]], Sequence[Sample]],
    *,
    source: Literal["policy", "engine"] = "policy",
) -> list[list[Sample]]:
    """Record pi_old of Eq. 6 for a step's minibatches from the second one on, once per sample.

    In the first update the policy still is pi_old: that update uses its own detached
    log-probabilities, and compares them with the engine's. `record` computes log-probabilities with
    the policy; with `source` `engine` the engine's are used instead, unless the first update would
    compare none with them.
    """
    first, *later = minibatches
    samples = list({id(sample): sample for minibatch in later for sample in minibatch}.values())
    is_compared = any(sample.has_signal and sample.num_trained_tokens for sample in first)
    recorded_samples: Sequence[Sample]
    if source == "engine" and is_compared:  # the gap of a number to itself is no metric
        recorded_samples = [
            replace(sample, old_logprobs=sample.engine_logprobs, engine_logprobs=())
            for sample in samples
        ]
    else:
        recorded_samples = record(samples)
    recorded = {
        id(sample): recorded_sample
        for sample, recorded_sample in zip(samples, recorded_samples, strict=True)
    }
    return [first, *([recorded[id(sample)] for sample in minibatch] for minibatch in later)]


def with_engine_logprobs(minibatches: Sequence[list[Sample]]) -> list[list[Sample]]:
    """Use the engine's log-probabilities as pi_old in every update, which needs no scores.

    The ratio of each update is that to the engine. Only the first compares the two: later ones have
    a newer policy.
    """
    first, *later = minibatches
    compared = [replace(sample, old_logprobs=sample.engine_logprobs) for sample in first]
    return [
        compared,
        *(
            [
                replace(sample, old_logprobs=sample.engine_logprobs, engine_logprobs=())
                for sample in minibatch
            ]
            for minibatch in later
        ),
    ]


def _with_turn_advantages(samples: Sequence[Sample], group: Group, config: Config) -> list[Sample]:
    """Give turn k's tokens the advantage of R_ik, the rewards of episode i summed from turn k on.

    It is compared with R_jk of the members that reached turn k. A turn that one member alone
    reached has the advantage of its episode. The part of the shaped reward that the environment did
    not pay belongs to the last turn.
    """
    returns: list[list[float]] = []
    for sample in samples:
        episode = group.generations[sample.index].episode
        assert episode is not None
        rewards = list(episode.rewards)
        rewards[-1] += sample.reward - fsum(rewards)
        returns.append(list(accumulate(reversed(rewards)))[::-1])
    rows = [
        [sample.advantage] * len(turn_returns)
        for sample, turn_returns in zip(samples, returns, strict=True)
    ]
    for turn in range(max(map(len, returns), default=0)):
        members = [i for i, turn_returns in enumerate(returns) if len(turn_returns) > turn]
        if len(members) > 1:
            (advantages,) = advantages_of([[returns[i][turn] for i in members]], config)
            for i, advantage in zip(members, advantages, strict=True):
                rows[i][turn] = advantage
    credited = []
    for sample, turn_advantages in zip(samples, rows, strict=True):
        length = len(sample.response_ids)
        sizes = [end - start for start, end in sample.sampled or ((0, length),)]
        token_advantages = [
            advantage
            for advantage, size in zip(turn_advantages, sizes, strict=True)
            for _ in range(size)
        ]
        mean = fsum(token_advantages) / max(1, len(token_advantages))
        credited.append(
            replace(
                sample,
                advantage=mean,
                token_advantages=spread(token_advantages, sample.sampled, length),
            )
        )
    return credited


def _group_samples(group: Group, advantages: Sequence[float], config: Config) -> list[Sample]:
    responses = zip(group.generations, group.rewards, strict=True)
    valid = [
        (i, generation, reward)
        for i, (generation, reward) in enumerate(responses)
        if reward is not None
    ]
    samples = []
    for (i, generation, reward), advantage in zip(valid, advantages, strict=True):
        is_trained = trains(generation.finish, mode=config.overlong.mode)
        num_branches = 1
        if generation.branches:  # one without a sampled token has no share
            num_branches = sum(any(branch.mask) for branch in generation.conversations)
        for branch in generation.conversations:
            prompt_ids = group.prompt_ids if branch.prompt_ids is None else branch.prompt_ids
            mask = branch.mask
            if not is_trained:
                mask = constant_row(False, len(branch.token_ids))
            samples.append(
                Sample(
                    group_id=group.id,
                    prompt_ids=prompt_ids,
                    response_ids=branch.token_ids,
                    reward=reward,
                    advantage=advantage,
                    engine_logprobs=branch.logprobs,
                    old_logprobs=None,
                    mask=mask,
                    index=i,
                    sampled=branch.sampled,
                    weight=1 / max(1, num_branches),
                )
            )
    return samples
