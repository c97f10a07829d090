"""The saving of `dynamic_sampling.predict` with a formula as policy: dapo's sampling, no model.

Takes seconds.

    python -m benchmarks.predict_simulation

A response to problem j of kind k is right with probability sigmoid(skill[k] + ease[j]). A group
that trains moves the skill of its kind by the policy gradient with the advantages of Eq. 9.
Sampling, selection, history and stream are those of a run. It says what to expect where kinds learn
apart; `benchmarks.predict` measures a policy.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.scripted_engine import ScriptedEngine
from dapo.algo.advantages import group_advantages
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.data.stream import ProblemStream
from dapo.sampling.batch import Sampling, SamplingPlan, collect
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.sampling.problem_stats import ProblemStats
from dapo.sampling.selection import ProblemSelector
from dapo.types import GenerationRequest, Group, Problem, Verdict

PROMPTS = 8
GROUP_SIZE = 8
TOKENS = 16
SEEDS = 5
MAX_STEPS = 200
LEARNING_RATE = 0.6
KINDS = {"trivial": 4.5, "impossible": -9.0, "useful": -0.8}
"""The skill that the policy begins with."""
SHARES = {"trivial": 0.45, "impossible": 0.35, "useful": 0.2}
TARGETS = (0.75, 0.9)
MODES = {"off": False, "on": True}
CASES = {
    "a source for each kind, 6,000 problems": (True, 6000),
    "one source, 300 problems": (False, 300),
}


class Simulation:
    """A run of the formula: encoder, judge and script for dapo's sampling, and its training
    steps.
    """

    def __init__(self, mode: str, *, by_source: bool, size: int, seed: int) -> None:
        """`by_source`: whether the kind of a problem is known from its source."""
        self.predict = MODES[mode]
        self.seed = seed
        self.skill = dict(KINDS)
        uniforms = keyed_uniforms(keyed_seed("kinds", seed), size)
        names = list(SHARES)
        bounds = np.cumsum(list(SHARES.values()))
        self.kinds = [names[min(int(np.searchsorted(bounds, u)), 2)] for u in uniforms]
        self.ease = np.random.Generator(np.random.Philox(key=keyed_seed("ease", seed))).normal(
            size=size
        )
        problems = [
            Problem(str(j), "", "", kind if by_source else "all")
            for j, kind in enumerate(self.kinds)
        ]
        self.stats = ProblemStats()
        self.tokens = 0
        self.sampling = Sampling(
            ProblemStream(problems, seed=seed),
            ScriptedEngine(self.respond, delay=lambda request: 1),
            self,
            DynamicSampler(prompts_per_step=PROMPTS, max_groups_per_step=10 * PROMPTS),
            self,
            SamplingPlan(GROUP_SIZE, TOKENS, 1.0, (0,), seed),
        )

    def rate(self, j: int) -> float:
        """The probability that a response to problem j is right."""
        return float(1 / (1 + np.exp(-self.skill[self.kinds[j]] - self.ease[j])))

    def accuracy(self) -> float:
        """The accuracy on useful problems of different ease, as a held-out set measures it."""
        eases = np.random.Generator(np.random.Philox(key=1)).normal(size=500)
        return float(np.mean(1 / (1 + np.exp(-self.skill["useful"] - eases))))

    def respond(self, request: GenerationRequest) -> tuple[list[int], str]:
        """A right response begins with 1, a wrong one with 2."""
        is_right = keyed_uniforms(request.seed, 1)[0] < self.rate(request.prompt_ids[0])
        return [1 if is_right else 2, *[3] * (TOKENS - 1)], "length"

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """A problem as its number."""
        return (int(problem.id),)

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as digits."""
        return "".join(map(str, ids))

    decode_prompt = decode

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        """Verdicts at once."""
        future: Future[tuple[Verdict, ...]] = Future()
        future.set_result(
            tuple(Verdict(text[0] == "1", 1.0 if text[0] == "1" else -1.0) for text in responses)
        )
        return future

    def step(self, step: int) -> None:
        """Sample a batch, and move the skills by its gradient."""
        selector = None
        if self.predict:
            selector = ProblemSelector(
                self.stats.history(), step=step, group_size=GROUP_SIZE, seed=self.seed
            )
        batch = collect(self.sampling, step=step, selector=selector)
        self.tokens += batch.num_generated_tokens
        moves = dict.fromkeys(KINDS, 0.0)
        for group in batch.groups:
            moves[self.kinds[int(group.problem.id)]] += self.gradient(group) / len(batch.groups)
        for kind, move in moves.items():
            self.skill[kind] += LEARNING_RATE * move
        self.stats.record((group for group, _ in batch.decided), step=step)

    def gradient(self, group: Group) -> float:
        """The mean of A_i d log pi(response i) / d skill."""
        right: NDArray[np.float64] = np.array([v.correct for v in group.verdicts], dtype=float)
        advantages = group_advantages(torch.tensor(2 * right - 1)).numpy()
        return float(np.mean(advantages * (right - self.rate(int(group.problem.id)))))


def tokens_and_steps(
    mode: str, *, by_source: bool, size: int, seed: int
) -> dict[float, tuple[int, int]]:
    """For each target: the tokens generated and the steps made when the accuracy has reached it."""
    run = Simulation(mode, by_source=by_source, size=size, seed=seed)
    found: dict[float, tuple[int, int]] = {}
    for step in range(1, MAX_STEPS + 1):
        run.step(step)
        for target in TARGETS:
            if run.accuracy() >= target:
                found.setdefault(target, (run.tokens, step))
        if len(found) == len(TARGETS):
            break
    return found


def main() -> None:
    """Print a table: medians over the seeds, and the ratio of tokens to off by seed."""
    print(
        "| problems | accuracy | mode | generated tokens | steps | fewer tokens than off, by seed |"
    )
    print("|---|---|---|---|---|---|")
    for name, (by_source, size) in CASES.items():
        runs = {
            mode: [
                tokens_and_steps(mode, by_source=by_source, size=size, seed=seed)
                for seed in range(SEEDS)
            ]
            for mode in MODES
        }
        for target in TARGETS:
            for mode, found in runs.items():
                there = [each[target] for each in found if target in each]
                ratios = [
                    f"{base[target][0] / each[target][0]:.1f}x"
                    for each, base in zip(found, runs["off"], strict=True)
                    if target in each and target in base
                ]
                tokens, steps = (
                    (median(values) for values in zip(*there, strict=True)) if there else (0, 0)
                )
                print(
                    f"| {name} | {target:.0%} | {mode} | {tokens:,.0f} | {steps:.0f} |"
                    f" {', '.join(ratios)} |"
                )


if __name__ == "__main__":
    main()
