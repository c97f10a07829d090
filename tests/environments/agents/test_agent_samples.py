"""What agents train: a relay the samples of its environment, branches one weight, retries once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dapo.config import LossConfig
from dapo.core.rng import keyed_uniforms
from dapo.engines.checked import CheckedEngine
from dapo.engines.continuation import ContinuingEngine
from dapo.environments.agents.pool import AgentPool
from dapo.environments.engine import EpisodeEngine
from dapo.environments.games.calculator import Calculator
from dapo.environments.starts import EpisodeStarts
from dapo.policy.minibatch import loss_weights
from dapo.processes.output import WorkerOutput
from dapo.rewards.combine import build_verifier
from dapo.sampling.samples import with_advantages
from dapo.types import EpisodeText, Finish, Generation, GenerationRequest, Group, Sample, Verdict
from helpers.agents import (
    END,
    PROBLEM,
    PROMPT,
    RENDERER,
    TOKENIZER,
    RecordingEngine,
    agent_options,
    agents_of,
    request,
    to_play,
)
from helpers.environments import LocalPool
from helpers.naive_update import whole_gradient
from helpers.tables import for_each_row
from helpers.tiny_policies import (
    assert_close,
    float64_model,
    ids,
    loaded,
    make_policy,
    policy_config,
)
from helpers.tiny_runs import tiny

OPTIONS = agent_options(timeout_s=30.0, workers=1, max_turns=8, max_turn_tokens=7)


@pytest.fixture(scope="module")
def pool() -> Iterator[AgentPool]:
    with AgentPool(OPTIONS, memory_gib=1.0, output=WorkerOutput()) as opened:
        yield opened


# --- a relay

TURNS = ("12+30", "7*8 so", "42", "-1", "", "x", "this is a very long turn that is cut off")


def keyed_text(asked: GenerationRequest) -> tuple[Sequence[int], Finish]:
    """One of the texts, by the seed."""
    (u,) = keyed_uniforms(asked.seed, 1)
    text = TURNS[int(u * len(TURNS))]
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END], "stop"


def samples_of(episodes: Sequence[Generation]) -> list[dict[str, Any]]:
    """Return what trains of a group of episodes."""
    config = tiny("environment=calculator", "reward.verifier=environment", "overlong.mode=off")
    verifier = build_verifier("environment")
    verdicts = []
    for generation in episodes:
        assert generation.episode is not None
        text = EpisodeText(generation.episode)
        verdicts += verifier.judge_group(PROBLEM, [text], [generation.token_ids])
    rewards = tuple(verdict.score for verdict in verdicts)
    assert {verdict.error for verdict in verdicts} == {None}
    problem = replace(PROBLEM, answer="42")
    group = Group(problem, PROMPT, tuple(episodes), tuple(verdicts), rewards=rewards)
    rows = []
    for sample in with_advantages([group], config):
        row = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
        for name in ("response_ids", "engine_logprobs", "mask"):
            row[name] = list(row[name])
        rows.append(row)
    return rows


def test_an_agent_that_relays_the_calculator_gives_the_samples_of_the_calculator(pool: AgentPool):
    problem = replace(PROBLEM, answer="42", fields={"agent": "relay_calculator"})
    requests = [request(str(i), seed=i, budget=20, problem=problem) for i in range(48)]
    local = LocalPool(Calculator)
    inner = RecordingEngine(keyed_text, logprob=lambda count: [-1.0 - i / 8 for i in range(count)])
    engine = EpisodeEngine(
        ContinuingEngine(CheckedEngine(inner, vocabulary=len(TOKENIZER))),
        local,  # type: ignore[arg-type]
        RENDERER.plain,
        OPTIONS,
        starts=EpisodeStarts(local, seed=5),  # type: ignore[arg-type]
    )
    engine.submit(requests)
    played: dict[str, Generation] = {}
    while len(played) < len(requests):
        played |= {generation.request_id: generation for generation in engine.poll()}
    relayed = agents_of(pool, OPTIONS, script=keyed_text).play(requests)
    names = [asked.id for asked in requests]
    expected = samples_of([played[name] for name in names])
    assert samples_of([relayed[name] for name in names]) == expected
    # it computes, answers right and wrong, and is cut
    assert {len(row["sampled"] or ((),)) for row in expected} == {1, 2}
    assert {row["reward"] for row in expected} == {-1.0, 1.0}
    assert {generation.finish for generation in played.values()} == {"stop", "length"}


# --- the loss of branches

MAX_TOKENS = 50
EPISODES = (
    # (group, the numbers of trained tokens of its branches; 0 of one that is masked)
    (0, (5, 3, 0)),
    (0, (12,)),
    (1, (1, 9, 4, 2)),
    (1, (0, 6)),
    (1, (7,)),
)


def branching_samples() -> list[Sample]:
    """Return the samples of two groups whose episodes have branches."""
    groups = []
    for number in (0, 1):
        generations = []
        members = [branches for group, branches in EPISODES if group == number]
        for i, branches in enumerate(members):
            parts = [
                Generation(
                    f"{number}/{i}",
                    ids(length or 3, "branch", number, i, k),
                    [-2.0] * (length or 3),
                    "stop",
                    0,
                    prompt_ids=None if k == 0 else ids(4 + k, "prompt", number, i, k),
                    is_masked=length == 0,
                )
                for k, length in enumerate(branches)
            ]
            generations.append(replace(parts[0], branches=tuple(parts[1:])))
        rewards = tuple(float(i * i) for i in range(len(members)))
        verdicts = tuple(Verdict(None, reward) for reward in rewards)
        prompt = ids(6, "prompt", number)
        group = Group(PROBLEM, prompt, tuple(generations), verdicts, rewards=rewards, id=number)
        groups.append(group)
    return with_advantages(groups, policy_config())


def written_weights(aggregate: str) -> list[float]:
    """Write out what a token of each branch weighs: 1 / B of a response with B branches that train.

    Its length in the formulas is the mean length of its branches.
    """
    num_trained = [sum(length > 0 for length in branches) for _, branches in EPISODES]
    mean_lengths = [
        sum(branches) / count for (_, branches), count in zip(EPISODES, num_trained, strict=True)
    ]
    weights = []
    for (group, branches), count in zip(EPISODES, num_trained, strict=True):
        in_group = [
            length
            for (other, _), length in zip(EPISODES, mean_lengths, strict=True)
            if other == group
        ]
        for length in branches:
            denominators = {
                "token": sum(mean_lengths),
                "group": 2 * sum(in_group),
                "sequence": len(EPISODES) * length,
                "constant": len(EPISODES) * MAX_TOKENS,
            }
            weights.append(1 / count / denominators[aggregate] if length else 0.0)
    return weights


@pytest.mark.parametrize("aggregate", ["token", "group", "sequence", "constant"])
def test_branches_have_the_gradient_of_separate_sequences_with_the_written_weights(aggregate: str):
    samples = branching_samples()
    weights = written_weights(aggregate)
    loss = LossConfig.model_validate({"aggregate": aggregate})
    found = loss_weights(samples, policy_config(loss={"aggregate": aggregate}))
    assert found.tolist() == pytest.approx(weights, rel=1e-14)
    expected = whole_gradient(float64_model(), samples, 1.0, is_on_policy=True, weights=weights)
    policy = make_policy(loaded(float64_model()), microbatch_tokens=40)
    assert_close(policy.gradient(samples, loss), expected, relative=1e-10)
    # the shares of each episode add up to 1
    for group, index in {(sample.group_id, sample.index) for sample in samples}:
        shares = [
            sample.weight
            for sample in samples
            if (sample.group_id, sample.index) == (group, index) and sample.num_trained_tokens
        ]
        assert sum(shares) == pytest.approx(1.0, abs=1e-15)
    assert any(sample.advantage for sample in samples)


# --- retries

A = [0, {}, {}]
B = [1, {}, {}]


def named(key: str, turns: int = 0) -> list[Any]:
    return [turns, {"Idempotency-Key": key}, {}]


AGAIN = [0, {"x-stainless-retry-count": "1"}, {}]


@for_each_row(
    ("requests", "calls", "retries", "answers"),
    [
        # nothing else was asked since
        ([A, A], 1, 1, 1),
        ([A, A, A], 1, 2, 1),
        ([A, B, B], 2, 1, 2),
        # behind a later turn it is a second sample
        ([A, B, A], 3, 0, 3),
        ([A, B, A, A], 3, 1, 3),
        # unless the client says that it repeats
        ([A, AGAIN], 1, 1, 1),
        ([A, B, AGAIN], 2, 1, 2),
        ([named("x"), named("x")], 1, 1, 1),
        ([named("x"), B, named("x")], 2, 1, 2),
        # a request that is said to be a retry, and was never asked, is new
        ([AGAIN], 1, 0, 1),
        # another name, another request; each is repeated by its own
        ([named("x"), named("y")], 2, 0, 2),
        ([named("x"), named("y"), named("x")], 2, 1, 2),
        ([named("x"), B, named("y"), named("x")], 3, 1, 3),
        # a name does not make another text the same request
        ([named("x"), named("x", turns=1)], 2, 0, 2),
        # second samples that are asked for
        ([A, [0, {}, {"seed": 2}]], 2, 0, 2),
        ([A, [0, {}, {"seed": 2}], [0, {}, {"seed": 2}]], 2, 1, 2),
        ([[0, {}, {"n": 2}]], 2, 0, 1),
        ([A, [0, {}, {"n": 2}]], 3, 0, 2),
        ([A, [0, {}, {"max_tokens": 2}]], 2, 0, 2),
        # what an answer does not depend on makes no second sample
        ([A, [0, {"User-Agent": "other"}, {"user": "x"}]], 1, 1, 1),
    ],
)
def test_a_retry_trains_once_and_a_second_sample_trains_too(
    pool, requests, calls, retries, answers
):
    played = agents_of(pool, OPTIONS)
    (generation,) = played.play([to_play("asks_in_order", requests=requests)]).values()
    assert generation.episode is not None
    assert generation.episode.error is None
    counts = generation.episode.counts
    assert (counts["calls"], counts["retries"]) == (calls, retries)
    assert generation.episode.components == {"answers": answers}
    trained = sum(sum(part.mask) for part in generation.conversations)
    sampled = sum(len(each.token_ids) for each in played.inner.sampled.values())
    assert trained == sampled > 0
