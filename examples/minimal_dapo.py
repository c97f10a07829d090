"""DAPO on one page: Algorithm 1 of the paper (arXiv 2503.14476) in plain torch and transformers.

    python examples/minimal_dapo.py

trains a tiny random model to answer with a digit, in seconds and without a download, and prints
what happens in each step. Nothing here is fast: one sequence at a time, no cache, no batches, no
other processes. The package `dapo` computes the same: tests/system/test_algorithm1.py compares the
weights after five steps to 1e-8.

DAPO is GRPO without its KL term and with four changes, numbered in the code:

1. Clip-higher: the ratio may rise further (1.28) than it may fall (0.8), so that unlikely tokens
   can become likely.
2. Dynamic sampling: groups whose responses are all correct or all wrong carry no signal and are
   replaced.
3. Token-level loss: every token of a minibatch has the same weight, however long its response is.
4. Overlong reward shaping: responses close to the length limit are punished, the longer the more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from dapo.core.rng import keyed_permutation, keyed_seed, keyed_uniforms
from dapo.data.problems import load_problems
from dapo.policy.model import LoadedModel, load_model
from dapo.types import Problem

GROUP_SIZE = 4
PROMPTS_PER_STEP = 4
GROUPS_PER_MINIBATCH = 2  # the paper: 16, 512, 32
MAX_TOKENS = 8
BUFFER_TOKENS = 4
OVERLONG_PENALTY = 0.5  # the paper: 20,480, 4,096, 1.0
CLIP_LOW = 0.2
CLIP_HIGH = 0.28
LEARNING_RATE = 2e-3
WARMUP_STEPS = 2
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0  # the paper: 1e-6, 20
TEMPERATURE = 0.8
SEED = 0
PROBLEMS = {"builtin": {"sums": {}}, "size": 40, "seed": 1}


@dataclass
class Group:
    """The responses to one prompt."""

    prompt: list[int]
    responses: list[list[int]]
    texts: list[str]
    correct: list[bool]
    rewards: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    old_logprobs: list[Tensor] = field(default_factory=list)
    """One tensor [tokens] per response: log pi_old of its tokens."""


class MinimalDapo:
    """The policy, its optimizer and the position in the data."""

    def __init__(
        self,
        loaded: LoadedModel,
        problems: Sequence[Problem],
        *,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model: Any = loaded.model
        self.tokenizer = loaded.tokenizer
        self.stop_ids = loaded.stop_ids
        self.problems = problems
        self.position = 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self.log = log
        self.num_dropped = 0

    def step(self, step: int) -> None:
        """Lines 2 to 12 of Algorithm 1."""
        groups = self.sample_batch(step)
        for group in groups:
            group.rewards = [
                shaped_reward(c, len(r))
                for c, r in zip(group.correct, group.responses, strict=True)
            ]
            mean = fmean(group.rewards)
            std = stdev(group.rewards)
            group.advantages = [(reward - mean) / (std + 1e-6) for reward in group.rewards]  # Eq. 9
            with torch.no_grad():  # pi_old: the policy before the step's first update
                group.old_logprobs = [
                    self.logprobs(group.prompt, response) for response in group.responses
                ]
        for text, reward, advantage in zip(
            groups[0].texts, groups[0].rewards, groups[0].advantages, strict=True
        ):
            self.log(f"  reward {reward:+.2f}  advantage {advantage:+.2f}  {text!r}")
        order = keyed_permutation(len(groups), SEED, "minibatches", step)
        for start in range(0, len(groups), GROUPS_PER_MINIBATCH):
            self.update([groups[i] for i in order[start : start + GROUPS_PER_MINIBATCH]], step)

    def sample_batch(self, step: int) -> list[Group]:
        """Sample until the batch is full of groups that carry a signal."""
        kept: list[Group] = []
        dropped: list[Group] = []
        while len(kept) < PROMPTS_PER_STEP:
            group = self.sample_group(step)
            # 2. Dynamic sampling (Eq. 11): if all are correct or all wrong, no response is better
            #    than the others
            (kept if 0 < sum(group.correct) < GROUP_SIZE else dropped).append(group)
        self.num_dropped += len(dropped)
        accuracy = fmean(correct for group in kept + dropped for correct in group.correct)
        self.log(
            f"step {step}: {accuracy:.0%} correct, {len(kept)} groups kept, {len(dropped)} dropped"
        )
        return kept

    def sample_group(self, step: int) -> Group:
        """G responses to the next problem; every epoch has its own order."""
        epoch, offset = divmod(self.position, len(self.problems))
        problem = self.problems[
            int(keyed_permutation(len(self.problems), SEED, "epoch", epoch)[offset])
        ]
        prompt: list[int] = self.tokenizer(problem.prompt)["input_ids"]
        seeds = [keyed_seed(SEED, "token", step, self.position, i) for i in range(GROUP_SIZE)]
        self.position += 1
        responses = [self.sample(prompt, seed) for seed in seeds]
        texts = [self.text_of(response) for response in responses]
        return Group(prompt, responses, texts, [is_correct(text) for text in texts])

    def text_of(self, response: list[int]) -> str:
        """The text to judge: the response up to its first special token, without unknown
        characters.
        """
        ends = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        text: str = self.tokenizer.decode(
            list(takewhile(lambda i: i not in ends, response)), skip_special_tokens=True
        )
        return text

    @torch.no_grad()
    def sample(self, prompt: list[int], seed: int) -> list[int]:
        """One response: the token at which the cumulative probability passes a uniform random
        number, and so on.
        """
        response: list[int] = []
        for uniform in keyed_uniforms(seed, MAX_TOKENS):
            logits = self.model(torch.tensor([prompt + response])).logits[0, -1] / TEMPERATURE
            cumulative = torch.softmax(logits, -1).cumsum(-1)
            response.append(int((cumulative <= uniform * cumulative[-1]).sum()))
            if response[-1] in self.stop_ids:
                break
        return response

    def logprobs(self, prompt: list[int], response: list[int]) -> Tensor:
        """[tokens] the log-probability of each token of the response under the policy."""
        logits = self.model(torch.tensor([prompt + response])).logits[0] / TEMPERATURE
        # the position before predicts each token
        scored = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        return scored.gather(1, torch.tensor(response)[:, None])[:, 0]

    def update(self, groups: Sequence[Group], step: int) -> None:
        """One optimizer update on a minibatch of whole groups."""
        # 3. Token-level loss (Eq. 12): one sum over all tokens of the minibatch, divided by their
        #    number
        num_tokens = sum(len(response) for group in groups for response in group.responses)
        loss = (
            -sum(self.objective(group, i).sum() for group in groups for i in range(GROUP_SIZE))
            / num_tokens
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for settings in self.optimizer.param_groups:
            settings["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        self.optimizer.step()
        self.log(f"  update on {num_tokens} tokens: loss {loss:+.4f}, gradient norm {norm:.3f}")

    def objective(self, group: Group, i: int) -> Tensor:
        """[tokens] the clipped objective of response i, to be maximized (Eq. 8)."""
        # Eq. 6
        ratio = torch.exp(self.logprobs(group.prompt, group.responses[i]) - group.old_logprobs[i])
        # 1. Clip-higher (Eq. 10): the two sides of the clip differ
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        return torch.minimum(ratio * group.advantages[i], clipped * group.advantages[i])


def is_correct(text: str) -> bool:
    """The verifier.

    Any digit is correct here: a random model would never find the sum, and learn nothing.
    """
    return any(character.isdigit() for character in text)


def shaped_reward(correct: bool, length: int) -> float:
    """Eq. 7 plus Eq. 13."""
    # 4. Overlong reward shaping: from the start of the buffer to the length limit the penalty grows
    #    linearly
    excess = max(0, length - (MAX_TOKENS - BUFFER_TOKENS))
    return (1.0 if correct else -1.0) - OVERLONG_PENALTY * excess / BUFFER_TOKENS


def main(num_steps: int = 5) -> None:
    """Train the tiny model and print the steps."""
    dapo = MinimalDapo(
        load_model("tiny-random", dtype=torch.float32), load_problems(PROBLEMS), log=print
    )
    for step in range(1, num_steps + 1):
        dapo.step(step)


if __name__ == "__main__":
    main()
