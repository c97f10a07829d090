"""`environment.credit: turn`: advantages of turns, against a second computation."""

import math
from collections.abc import Sequence

import pytest

from dapo.config import Config, load_config
from dapo.core.errors import ConfigError
from dapo.sampling.samples import with_advantages
from dapo.types import Episode, Generation, Group, Problem, Verdict
from helpers.paths import CONFIGS


def config(*overrides: str) -> Config:
    options = ("environment=calculator", "reward.verifier=auto", "overlong.mode=off", *overrides)
    return load_config(CONFIGS / "tiny.yaml", options)


def group(rewards: Sequence[Sequence[float]]) -> Group:
    """Turns of three sampled tokens, with two observed ones between them."""
    generations = []
    verdicts = []
    for number, own in enumerate(rewards):
        length = 5 * len(own) - 2
        sampled = tuple((5 * k, 5 * k + 3) for k in range(len(own)))
        episode = Episode([{"role": "assistant", "content": "x"}] * len(own), own)
        generations.append(
            Generation(
                f"1/0/{number}",
                (1,) * length,
                (-1.0,) * length,
                "stop",
                0,
                sampled=sampled,
                episode=episode,
            )
        )
        verdicts.append(Verdict(None, sum(own)))
    totals = tuple(sum(own) for own in rewards)
    return Group(Problem("1", "Q", "A"), (1,), tuple(generations), tuple(verdicts), rewards=totals)


def test_the_tokens_of_a_turn_have_the_advantage_of_the_rewards_from_it_on():
    rewards = [[0.0, 1.0], [0.5, 0.0, 2.0], [-1.0], [0.25, -1.0]]
    samples = with_advantages([group(rewards)], config("environment.credit=turn"))
    for i, (own, sample) in enumerate(zip(rewards, samples, strict=True)):
        expected: list[float] = []
        for k in range(len(own)):
            members = [sum(each[k:]) for each in rewards if len(each) > k]
            if len(members) == 1:  # its episode's
                members = [sum(each) for each in rewards]
                value = sum(own)
            else:
                value = sum(own[k:])
            mean = sum(members) / len(members)
            std = math.sqrt(sum((each - mean) ** 2 for each in members) / (len(members) - 1))
            expected += [(value - mean) / (std + 1e-6)] * 3 + [0.0] * 2
        found = sample.token_advantages
        assert found is not None, i
        assert list(found) == pytest.approx(expected[:-2], abs=1e-5)
        sampled = [value for value, mask in zip(found, sample.mask, strict=True) if mask]
        assert sample.advantage == pytest.approx(sum(sampled) / len(sampled))


def test_with_one_turn_each_the_advantages_are_those_of_the_episode():
    rewards = [[1.0], [-1.0], [-1.0], [1.0]]
    of_turns = with_advantages([group(rewards)], config("environment.credit=turn"))
    of_episodes = with_advantages([group(rewards)], config())
    for turn, episode in zip(of_turns, of_episodes, strict=True):
        assert turn.token_advantages is not None
        assert list(turn.token_advantages) == pytest.approx([episode.advantage] * 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["preset=ppo"],
            (
                "environment.credit=turn compares the members of a group at each turn, and"
                " advantage.estimator=gae"
            ),
        ),
        (["distributed.trainer_ranks=2"], "which a trainer in separate processes does not carry"),
        (["loss.kl_coef=0.1", "loss.kl_in=reward"], "which loss.kl_in=reward does not carry"),
    ],
)
def test_what_does_not_carry_advantages_of_turns_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        config("environment.credit=turn", *overrides)
