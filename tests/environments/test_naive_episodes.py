"""Training on episodes against a second computation: no packing, no cache, no masks, no other
processes.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dapo.cli.train import start_run
from dapo.config import build_config
from dapo.core.rng import keyed_permutation, keyed_seed, keyed_uniforms
from examples import minimal_dapo as minimal
from helpers.environments import Hunt
from helpers.minimal_runs import minimal_config, minimal_inputs
from helpers.tiny_runs import metrics

pytestmark = pytest.mark.usefixtures("forked_workers")

STEPS = 3
MAX_TURNS = 4
MAX_TOKENS = 12
BUFFER_TOKENS = 8


@dataclass
class Episode:
    """The tokens behind a prompt, the turn that sampled each, None for those of an observation, and
    the rewards.
    """

    tokens: list[int] = field(default_factory=list)
    turns: list[int | None] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    correct: bool = False
    advantages: list[float] = field(default_factory=list)
    """One of each turn."""
    old_logprobs: dict[int, float] = field(default_factory=dict)

    @property
    def sampled(self) -> list[int]:
        return [t for t, turn in enumerate(self.turns) if turn is not None]


@dataclass
class Played(minimal.Group):
    episodes: list[Episode] = field(default_factory=list)


class NaiveEpisodes(minimal.MinimalDapo):
    """The policy of examples/minimal_dapo.py, trained on episodes of up to MAX_TURNS turns."""

    def __init__(self, model: Path, *, credit: str) -> None:
        super().__init__(*minimal_inputs(model))
        self.credit = credit
        self.turn_counts: list[int] = []
        self.num_cut = 0

    def step(self, step: int) -> None:
        groups: list[Any] = self.sample_batch(step)
        for group in groups:
            self.give_advantages(group.episodes)
            for episode in group.episodes:
                self.turn_counts.append(len(episode.rewards))
                self.num_cut += len(episode.sampled) == MAX_TOKENS
                with torch.no_grad():
                    values = self.log_probabilities(group.prompt, episode).tolist()
                episode.old_logprobs = dict(zip(episode.sampled, values, strict=True))
        order = keyed_permutation(len(groups), minimal.SEED, "minibatches", step)
        for start in range(0, len(groups), minimal.GROUPS_PER_MINIBATCH):
            self.update(
                [groups[i] for i in order[start : start + minimal.GROUPS_PER_MINIBATCH]], step
            )

    def sample_group(self, step: int) -> Played:
        epoch, offset = divmod(self.position, len(self.problems))
        problem = self.problems[
            int(keyed_permutation(len(self.problems), minimal.SEED, "epoch", epoch)[offset])
        ]
        prompt: list[int] = self.tokenizer(problem.prompt)["input_ids"]
        episodes = []
        for i in range(minimal.GROUP_SIZE):
            hunt = Hunt()
            hunt.reset(problem, keyed_seed(minimal.SEED, "environment", problem.id))
            episodes.append(
                self.play(prompt, hunt, keyed_seed(minimal.SEED, "token", step, self.position, i))
            )
        self.position += 1
        return Played(prompt, [], [], [episode.correct for episode in episodes], episodes=episodes)

    def play(self, prompt: list[int], hunt: Hunt, seed: int) -> Episode:
        episode = Episode()
        left = MAX_TOKENS
        while True:
            turn = len(episode.rewards)
            response = self.turn(
                prompt + episode.tokens, keyed_seed(seed, "turn", turn) if turn else seed, left
            )
            episode.tokens += response
            episode.turns += [turn] * len(response)
            left -= len(response)
            episode.rewards.append(0.0)
            if response[-1] in self.stop_ids:  # otherwise the turn was cut, and is not answered
                result = hunt.step(self.text_of(response))
                episode.rewards[-1] += result.reward or 0.0
                if result.done:
                    episode.correct = bool(result.correct)
                    return episode
                if left and turn + 1 < MAX_TURNS:
                    observed = self.tokenizer(
                        f"\n{result.observation}\n", add_special_tokens=False
                    )["input_ids"]
                    episode.tokens += observed
                    episode.turns += [None] * len(observed)
                    continue
            last = hunt.end()
            episode.rewards[-1] += last.reward or 0.0
            episode.correct = bool(last.correct)
            return episode

    @torch.no_grad()
    def turn(self, ids: list[int], seed: int, left: int) -> list[int]:
        response: list[int] = []
        for uniform in keyed_uniforms(seed, left):
            logits = self.model(torch.tensor([ids + response])).logits[0, -1] / minimal.TEMPERATURE
            cumulative = torch.softmax(logits, -1).cumsum(-1)
            response.append(int((cumulative <= uniform * cumulative[-1]).sum()))
            if response[-1] in self.stop_ids:
                break
        return response

    def give_advantages(self, episodes: list[Episode]) -> None:
        """Eq. 9 over the group, of the whole rewards or, for each turn, of the rewards from it
        on.
        """
        rewards = []
        for episode in episodes:  # Eq. 13 counts the sampled tokens, and belongs to the last turn
            excess = max(0, len(episode.sampled) - (MAX_TOKENS - BUFFER_TOKENS))
            rewards.append([*episode.rewards])
            rewards[-1][-1] -= minimal.OVERLONG_PENALTY * excess / BUFFER_TOKENS
        for episode, own in zip(episodes, rewards, strict=True):
            for turn in range(len(own)):
                others = [sum(each[turn:]) for each in rewards if len(each) > turn]
                value = sum(own[turn:])
                if self.credit == "episode" or len(others) == 1:
                    others = [sum(each) for each in rewards]
                    value = sum(own)
                episode.advantages.append((value - fmean(others)) / (stdev(others) + 1e-6))

    def log_probabilities(self, prompt: list[int], episode: Episode) -> Tensor:
        """[sampled tokens]"""
        logits = self.model(torch.tensor([prompt + episode.tokens])).logits[0] / minimal.TEMPERATURE
        return torch.stack(
            [
                torch.log_softmax(logits[len(prompt) + t - 1], -1)[episode.tokens[t]]
                for t in episode.sampled
            ]
        )

    def update(self, groups: Any, step: int) -> None:
        terms = []
        for group in groups:
            for episode in group.episodes:
                values = self.log_probabilities(group.prompt, episode)
                for value, t in zip(values, episode.sampled, strict=True):
                    advantage = episode.advantages[episode.turns[t] or 0]
                    ratio = torch.exp(value - episode.old_logprobs[t])
                    clipped = ratio.clamp(1 - minimal.CLIP_LOW, 1 + minimal.CLIP_HIGH)
                    terms.append(torch.minimum(ratio * advantage, clipped * advantage))
        self.optimizer.zero_grad()
        (-sum(terms) / len(terms)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), minimal.MAX_GRAD_NORM)
        for settings in self.optimizer.param_groups:
            settings["lr"] = minimal.LEARNING_RATE * min(1.0, step / minimal.WARMUP_STEPS)
        self.optimizer.step()


@pytest.fixture(scope="module")
def model(float64_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a third of its tokens as ends, so that its episodes have several
    turns.
    """
    path = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(float64_model, path)
    for name in ("config.json", "generation_config.json"):
        options = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**options, "eos_token_id": [2, *range(70, 100)]}))
    return path


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_three_steps_of_episodes_equal_a_naive_reimplementation(
    tmp_path: Path, model: Path, credit: str
):
    naive = NaiveEpisodes(model, credit=credit)
    before = {name: tensor.clone() for name, tensor in naive.model.named_parameters()}
    for step in range(1, STEPS + 1):
        naive.step(step)
    changes = [
        (
            f"environment={{name: helpers.environments:Hunt, max_turns: {MAX_TURNS}, workers: 1,"
            f" credit: {credit}}}"
        ),
        "environment.max_observation_tokens=24",
        f"rollout.max_response_tokens={MAX_TOKENS}",
        f"overlong.buffer_tokens={BUFFER_TOKENS}",
        f"train.num_steps={STEPS}",
        "reward.verifier=auto",
    ]
    config = build_config(minimal_config(model).model_dump(), changes)
    start_run(config, run_dir=tmp_path / "run", config_name="tiny")
    (weights,) = (tmp_path / "run/checkpoints" / f"step_{STEPS:06d}").glob("weights*.safetensors")
    real = load_file(weights)

    assert set(naive.turn_counts) == {1, 2, 3, 4}
    assert naive.num_cut > 0
    moved = max(
        (tensor - before[name]).abs().max().item()
        for name, tensor in naive.model.named_parameters()
    )
    assert moved > 2e-3  # the comparison would mean nothing if training did nothing
    for name, tensor in naive.model.named_parameters():
        torch.testing.assert_close(real[name], tensor.detach(), rtol=0, atol=1e-8)
    rows = metrics(tmp_path / "run")
    dropped = sum(
        row["rollout/groups_all_wrong"] + row["rollout/groups_all_correct"] for row in rows
    )
    assert dropped == naive.num_dropped > 0
