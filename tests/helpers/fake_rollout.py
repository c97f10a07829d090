"""Encoder, judge, problems and scripts for a scripted engine: no model, no tokenizer, no verifier
process.
"""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from dapo.core.rng import keyed_uniforms
from dapo.data.stream import ProblemStream
from dapo.sampling.batch import SamplingPlan
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.types import GenerationRequest, Problem, Verdict

RIGHT = 1
WRONG = 2
BROKEN = 3
FILL = 4
END = 9
"""Token ids: the first of a response decides its verdict, `FILL` pads it and `END` stops it."""
VERDICTS = {
    str(RIGHT): Verdict(True, 1.0),
    str(WRONG): Verdict(False, -1.0),
    str(BROKEN): Verdict(None, 0.0, "timed out after 1 s"),
}


class FakeEncoder:
    """Encodes a problem as its number, and decodes token ids to their digits."""

    def encode(self, problem: Problem) -> tuple[int, ...]:
        return (int(problem.id),)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(str, ids))

    decode_prompt = decode


class FakeJudge:
    """Judges a response by its first character."""

    def __init__(self, verdicts: Mapping[str, Verdict] = VERDICTS) -> None:
        self.verdicts = verdicts

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        future: Future[tuple[Verdict, ...]] = Future()
        future.set_result(tuple(self.verdicts[text[0]] for text in responses))
        return future


class SlowJudge(FakeJudge):
    """Answers in threads, each after a random time."""

    def __init__(self, chance: random.Random, *, longest_s: float) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(8)
        self.chance = chance
        self.longest_s = longest_s

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        found = super().submit(problem, responses, token_ids)
        delay = self.longest_s * self.chance.random()

        def answer() -> tuple[Verdict, ...]:
            time.sleep(delay)
            return found.result()

        return self.pool.submit(answer)


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), f"problem {i}", "") for i in range(count)]


def in_order(count: int) -> ProblemStream:
    """A stream whose permutation does not matter: the tests look problems up by number."""
    return ProblemStream(problems(count), seed=0)


def plan(group_size: int = 4, limit: int = 12) -> SamplingPlan:
    return SamplingPlan(group_size, limit, 1.0, (END,), 0)


def sampler(prompts: int = 4, bound: int = 40, **options: object) -> DynamicSampler:
    return DynamicSampler(prompts_per_step=prompts, max_groups_per_step=bound, **options)  # type: ignore[arg-type]


def random_script(request: GenerationRequest) -> tuple[list[int], str]:
    """A response by the request's own seed: right or wrong with the problem's difficulty, 1 to 12
    tokens.
    """
    mark, length = keyed_uniforms(request.seed, 2)
    # 0, .25, .5, .75, 1: some groups can only be uniform
    difficulty = (request.prompt_ids[0] % 5) / 4
    return [RIGHT if mark < difficulty else WRONG] + [FILL] * int(length * 11) + [END], "stop"
