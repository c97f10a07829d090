"""What an evaluation asks of its engine, and the scores of a real model against the slow, obvious
computation.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from itertools import combinations
from statistics import fmean

import pytest
import torch
from torch import Tensor

from benchmarks.scripted_engine import ScriptedEngine
from dapo.config import build_config
from dapo.config.rollout_options import NativeConfig
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.engines.native.engine import NativeEngine
from dapo.evaluation.evaluate import EngineSampler, evaluate
from dapo.evaluation.scores import Evaluation, EvaluationPlan, evaluation_plan
from dapo.types import GenerationRequest, Problem, Verdict
from helpers.fake_rollout import FakeEncoder, FakeJudge, problems
from helpers.tiny_models import tiny_model

PLAN = EvaluationPlan("toy", 3, 0.8, 0.65, 17, (9, 4, 6), seed=5)


def requests_of(plan: EvaluationPlan, asked: Sequence[Problem]) -> list[GenerationRequest]:
    """Every request of an evaluation, in the order in which the engine got them."""
    engine = ScriptedEngine(lambda request: ([1, 9], "stop"))
    evaluate(EngineSampler(engine, FakeEncoder(), plan), FakeJudge(), asked)
    return list(engine.submitted)


def seeds_of(plan: EvaluationPlan, asked: Sequence[Problem]) -> dict[tuple[int, int], int]:
    """The seed of each (prompt, sample)."""
    samples = Counter[int]()
    seeds = {}
    for request in requests_of(plan, asked):
        (prompt,) = request.prompt_ids
        seeds[prompt, samples[prompt]] = request.seed
        samples[prompt] += 1
    return seeds


def test_every_request_has_the_plans_temperature_top_p_limit_and_all_stop_ids():
    found = requests_of(PLAN, problems(5))
    assert len(found) == 15
    assert {(r.temperature, r.top_p, r.max_new_tokens, r.stop_ids) for r in found} == {
        (0.8, 0.65, 17, (9, 4, 6))
    }
    assert {r.min_new_tokens for r in found} == {0}


def test_each_prompt_is_submitted_k_times_in_a_row():
    assert [r.prompt_ids for r in requests_of(PLAN, problems(4))] == [
        (i,) for i in range(4) for _ in range(3)
    ]
    assert len({r.id for r in requests_of(PLAN, problems(4))}) == 12


def test_no_two_responses_share_a_seed():
    assert len(set(seeds_of(PLAN, problems(40)).values())) == 40 * 3


def test_a_seed_is_a_function_of_run_seed_problem_and_sample_alone():
    expected = seeds_of(PLAN, problems(6))
    assert seeds_of(PLAN, [*reversed(problems(6))]) == expected
    assert seeds_of(PLAN, problems(6)[4:]) == {
        key: seed for key, seed in expected.items() if key[0] >= 4
    }
    more = seeds_of(replace(PLAN, samples_per_problem=5), problems(6))
    assert {key: more[key] for key in expected} == expected
    assert not set(seeds_of(replace(PLAN, seed=6), problems(6)).values()) & set(expected.values())


def test_a_plan_takes_the_papers_temperature_and_top_p_and_the_runs_seed_and_limit():
    options = {"model": "tiny-random", "data": {"train": "builtin:sums", "eval": "builtin:sums"}}
    plan = evaluation_plan(
        build_config(options, ["rollout.max_response_tokens=5000", "train.seed=3"]), (7, 2)
    )
    assert (plan.temperature, plan.top_p, plan.samples_per_problem) == (1.0, 0.7, 1)
    assert (plan.max_response_tokens, plan.stop_ids, plan.seed) == (5000, (7, 2), 3)
    own = [
        "eval.temperature=0.3",
        "eval.top_p=0.9",
        "eval.samples_per_problem=32",
        "eval.max_response_tokens=99",
    ]
    plan = evaluation_plan(build_config(options, [*own, "rollout.temperature=0.5"]), (2,))
    assert (plan.temperature, plan.top_p, plan.samples_per_problem, plan.max_response_tokens) == (
        0.3,
        0.9,
        32,
        99,
    )


# --- a real model

K = 4
LIMIT = 6
REAL = EvaluationPlan("real", K, 0.9, 0.8, LIMIT, tuple(range(3, 197, 9)), seed=11)
ASKED = [Problem(f"p{i}", f"{i}", "") for i in range(12)]


class ListEncoder:
    """A prompt of a few tokens; a response as the list of its ids."""

    def encode(self, problem: Problem) -> tuple[int, ...]:
        number = int(str(problem.prompt))
        return (number + 1, 50 + number, 120)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    decode_prompt = decode


def verdict_of(text: str) -> Verdict:
    """Of the last token, one in four is right; the wrong ones give three different answers."""
    number = int(text.split()[-1])
    return Verdict(number % 4 == 0, 1.0 if number % 4 == 0 else -1.0, answer=f"{number % 4}")


class LastTokenJudge:
    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        future: Future[tuple[Verdict, ...]] = Future()
        future.set_result(tuple(map(verdict_of, responses)))
        return future


def naive_token(logits: Tensor, uniform: float) -> int:
    """The token at which the cumulative probability of the sorted nucleus passes the uniform
    number.
    """
    probabilities, ids = (logits / REAL.temperature).softmax(-1).sort(descending=True, stable=True)
    cumulative = probabilities.cumsum(-1)
    size = int((cumulative < REAL.top_p).sum()) + 1
    passed = int((cumulative[:size] <= uniform * cumulative[size - 1]).sum())
    return int(ids[min(passed, size - 1)])


@torch.no_grad()
def naive_response(model: torch.nn.Module, problem: Problem, sample: int) -> list[int]:
    ids = []
    prompt = list(ListEncoder().encode(problem))
    for uniform in keyed_uniforms(keyed_seed(REAL.seed, "eval", problem.id, sample), LIMIT):
        ids.append(naive_token(model(torch.tensor([prompt + ids])).logits[0, -1], uniform))
        if ids[-1] in REAL.stop_ids:
            break
    return ids


@cache
def naive_responses() -> list[list[list[int]]]:
    model = tiny_model("llama", dtype=torch.float64)
    return [[naive_response(model, problem, sample) for sample in range(K)] for problem in ASKED]


@pytest.fixture(scope="module")
def evaluated() -> Iterator[Evaluation]:
    engine = NativeEngine(tiny_model("llama", dtype=torch.float64), NativeConfig(slots=7))
    yield evaluate(EngineSampler(engine, ListEncoder(), REAL), LastTokenJudge(), ASKED)
    engine.close()


def naive_consensus(texts: Sequence[str]) -> float:
    """Vote by vote: an answer wins if no other has more votes; the winners share one point."""
    answers = [verdict_of(text).answer for text in texts]
    winners = {
        a for a in answers if all(answers.count(a) >= answers.count(other) for other in answers)
    }
    return ("0" in winners) / len(winners)


def test_the_responses_of_a_real_model_are_those_of_a_naive_sampler(evaluated: Evaluation):
    expected = [[ListEncoder().decode(ids) for ids in row] for row in naive_responses()]
    assert [
        [response.text for response in problem.responses] for problem in evaluated.problems
    ] == expected
    finishes = Counter(
        response.finish for problem in evaluated.problems for response in problem.responses
    )
    assert min(finishes["stop"], finishes["length"]) > 5  # the stop ids and the limit both matter
    assert all(len(set(row)) > 1 for row in expected)  # k samples, not one sample k times


def test_avg_pass_and_cons_of_a_real_model_are_those_of_a_naive_computation(evaluated: Evaluation):
    texts = [[ListEncoder().decode(ids) for ids in row] for row in naive_responses()]
    marks = [[verdict_of(text).correct is True for text in row] for row in texts]
    summary = evaluated.summary()
    assert summary["accuracy"] == pytest.approx(sum(map(sum, marks)) / (K * len(ASKED)))
    for j in (1, 2, 4):
        subsets = [[any(chosen) for chosen in combinations(row, j)] for row in marks]
        assert summary[f"pass@{j}"] == pytest.approx(fmean(fmean(row) for row in subsets))
    assert summary["cons@4"] == pytest.approx(fmean(map(naive_consensus, texts)))
    assert 0 < summary["accuracy"] < summary["pass@2"] < summary["pass@4"] < 1
    assert summary["cons@4"] not in (summary["accuracy"], summary["pass@4"])
    assert summary["response_tokens_mean"] == fmean(
        len(ids) for row in naive_responses() for ids in row
    )
