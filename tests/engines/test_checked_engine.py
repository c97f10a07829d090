"""An engine that breaks its contract is found out, named with its request, and nothing of it is
trained on.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.errors import EngineError
from dapo.engines.checked import CheckedEngine, with_arrays
from dapo.engines.engine import RolloutEngine
from dapo.evaluation.evaluate import EngineSampler, evaluate
from dapo.evaluation.scores import EvaluationPlan
from dapo.sampling.batch import Sampling, collect
from dapo.sampling.queue import Batch
from dapo.types import Generation, GenerationRequest, Problem
from helpers.fake_engines import FaultyEngine
from helpers.fake_rollout import (
    END,
    FILL,
    RIGHT,
    FakeEncoder,
    FakeJudge,
    in_order,
    plan,
    random_script,
    sampler,
)

VOCABULARY = 10
LIMIT = 12
Corrupt = Callable[[list[Generation]], list[Generation]]


def full_length(request: GenerationRequest) -> tuple[list[int], str]:
    """Right or wrong in turn, and as many tokens as are allowed."""
    return [RIGHT + int(request.id[-1]) % 2] + [FILL] * LIMIT, "length"


def collected(engine: RolloutEngine, *, version: int = 3) -> Batch:
    engine.load_weights(None, version=version)  # type: ignore[arg-type]
    return collect(
        Sampling(
            in_order(20), engine, FakeJudge(), sampler(prompts=4), FakeEncoder(), plan(limit=LIMIT)
        ),
        step=1,
    )


def each(**changes: object) -> Corrupt:
    """Every answer with some fields replaced; a function is given the old value."""

    def corrupt(found: list[Generation]) -> list[Generation]:
        return [
            replace(g, **{k: v(getattr(g, k)) if callable(v) else v for k, v in changes.items()})  # type: ignore[arg-type]
            for g in found
        ]

    return corrupt


def failing(found: list[Generation]) -> list[Generation]:
    raise RuntimeError("device lost")


ANSWER = "the engine's answer to request '1/"
FAULTS: dict[str, tuple[Corrupt, str, str]] = {
    "raises": (
        failing,
        (
            "the engine failed in poll with 16 requests in flight: RuntimeError: device lost "
            "(test_checked_engine.py, line "
        ),
        "",
    ),
    "returns None": (
        lambda found: None,
        "the engine's poll returned a NoneType, expected a list of Generation",
        "",
    ),  # type: ignore[arg-type,return-value]
    "returns text": (
        lambda found: ["x"],
        "the engine's poll returned a str, expected a Generation",
        "",
    ),  # type: ignore[list-item]
    "unknown": (
        each(request_id="other"),
        "the engine answered request 'other', which is not in flight",
        "",
    ),
    "duplicate": (lambda found: found * 2, "the engine answered request '1/", "' twice"),
    "too long": (
        each(token_ids=lambda ids: (*ids, FILL)),
        ANSWER,
        "': expected at most 12 tokens, got 13",
    ),
    "out of vocabulary": (
        each(token_ids=lambda ids: (*ids[:2], 10, *ids[3:])),
        ANSWER,
        "': expected token ids from 0 to 9, got 10 at token 2",
    ),
    "negative token": (
        each(token_ids=lambda ids: (-1, *ids[1:])),
        ANSWER,
        "': expected token ids from 0 to 9, got -1 at token 0",
    ),
    "no token": (
        each(token_ids=lambda ids: (*ids[1:], 2.0)),
        ANSWER,
        "': expected token ids from 0 to 9, got 2.0 at token 11",
    ),
    "one log-probability too few": (
        each(logprobs=lambda values: values[1:]),
        ANSWER,
        "': expected 12 log-probabilities, one per token, got 11",
    ),
    "NaN": (
        each(logprobs=lambda values: (*values[1:], nan)),
        ANSWER,
        "': expected finite log-probabilities of at most 0, got nan at token 11",
    ),
    "infinite": (
        each(logprobs=lambda values: (-inf, *values[1:])),
        ANSWER,
        "': expected finite log-probabilities of at most 0, got -inf at token 0",
    ),
    "positive": (
        each(logprobs=lambda values: (-1.0, 0.5, *values[2:])),
        ANSWER,
        "': expected finite log-probabilities of at most 0, got 0.5 at token 1",
    ),
    "old version": (each(version=2), ANSWER, "': expected weights of version 3, got version 2"),
    "stop without a stop id": (
        each(finish="stop"),
        ANSWER,
        "': expected a last token among 9 with finish 'stop', got token 4",
    ),
    "stop without a token": (
        each(finish="stop", token_ids=(), logprobs=()),
        ANSWER,
        "': expected a last token among 9 with finish 'stop', got no token",
    ),
    "short for a length": (
        each(token_ids=lambda ids: ids[:5], logprobs=lambda values: values[:5]),
        ANSWER,
        "': expected 12 tokens with finish 'length', got 5 tokens",
    ),
    "aborted unasked": (
        each(finish="aborted"),
        ANSWER,
        "': expected finish 'stop' or 'length', got 'aborted'",
    ),
    "unknown finish": (
        each(finish="eos"),
        ANSWER,
        "': expected finish 'stop' or 'length', got 'eos'",
    ),
    "goes on after the end": (
        each(token_ids=lambda ids: (ids[0], END, *ids[2:])),
        ANSWER,
        "': expected an end at the first stop id (9, token 1), got 12 tokens",
    ),
    "an end called a length": (
        each(token_ids=lambda ids: (*ids[:-1], END)),
        ANSWER,
        "': expected finish 'stop', since the last token is 9, got 'length'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_engine_error_that_names_the_request_and_what_was_expected(fault: str):
    corrupt, start, end = FAULTS[fault]
    seen = 0

    def later(found: list[Generation]) -> list[Generation]:
        """The first answers are sound: one bad one is enough."""
        nonlocal seen
        seen += bool(found) or corrupt is failing
        return corrupt(found) if seen else found

    engine = CheckedEngine(FaultyEngine(full_length, later, slots=4), vocabulary=VOCABULARY)
    with pytest.raises(EngineError) as caught:
        collected(engine)
    assert str(caught.value).startswith(start)
    assert end in str(caught.value)


@pytest.mark.parametrize("fault", ["raises", "duplicate", "NaN", "too long"])
def test_evaluation_reports_faults_as_well(fault: str):
    corrupt, start, _ = FAULTS[fault]
    engine = CheckedEngine(FaultyEngine(full_length, corrupt), vocabulary=VOCABULARY)
    problems = [Problem(str(i), "?", "!") for i in range(4)]
    sampler = EngineSampler(
        engine, FakeEncoder(), EvaluationPlan("toy", 4, 1.0, 1.0, LIMIT, (END,), 0)
    )
    with pytest.raises(EngineError) as caught:
        evaluate(sampler, FakeJudge(), problems)
    assert str(caught.value).startswith(start.replace("'1/", "'eval/"))


def test_an_engine_that_finishes_nothing_for_ever_has_hung():
    never = FaultyEngine(full_length, lambda found: [], slots=1)
    with pytest.raises(EngineError) as caught:
        collected(CheckedEngine(never, vocabulary=VOCABULARY, stall_s=0.05))
    assert str(caught.value).startswith("the engine has finished nothing for 0 s and ")
    assert str(caught.value).endswith(
        "polls with 16 requests in flight (the first: '1/0/0'); it has hung"
    )
    assert never.polls > 1000


def test_the_longest_request_in_flight_is_not_looked_up_at_every_idle_poll():
    class CountedRequest(GenerationRequest):
        def __getattribute__(self, name: str) -> object:
            reads[name] = reads.get(name, 0) + 1
            return super().__getattribute__(name)

    reads: dict[str, int] = {}
    engine = CheckedEngine(
        FaultyEngine(full_length, lambda found: [], slots=1), vocabulary=VOCABULARY
    )
    engine.submit([CountedRequest("1/0/0", (1,), 3, 1.0, 1.0, 0, ())])
    engine.poll()
    once = reads["max_new_tokens"]
    for _ in range(50):
        engine.poll()
    assert reads["max_new_tokens"] == once


def test_a_slow_engine_with_one_token_per_poll_has_not_hung_however_long_it_takes():
    slow = CheckedEngine(
        ScriptedEngine(random_script, slots=1), vocabulary=VOCABULARY, stall_s=1e-9
    )
    assert len(collected(slow).groups) == 4


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda found: found[1:], "the engine did not answer the abort of request '1/"),
        (each(finish="stop"), "': expected a last token among "),
        (each(finish="length"), f"': expected {LIMIT} tokens with finish 'length', got "),
        (
            each(token_ids=(99,), logprobs=(-1.0,)),
            "': expected token ids from 0 to 9, got 99 at token 0",
        ),
    ],
)
def test_what_an_abort_returns_is_looked_at_too(corrupt: Corrupt, message: str):
    def only_aborts(found: list[Generation]) -> list[Generation]:
        return corrupt(found) if found and found[0].finish == "aborted" else found

    chosen = sampler(prompts=2)
    chosen.load_state_dict({"kept": 1.0, "decided": 4.0})  # eight groups are put in flight for two
    engine = CheckedEngine(FaultyEngine(full_length, only_aborts, slots=4), vocabulary=VOCABULARY)
    with pytest.raises(EngineError) as caught:
        collect(
            Sampling(in_order(30), engine, FakeJudge(), chosen, FakeEncoder(), plan(limit=LIMIT)),
            step=1,
        )
    assert message in str(caught.value)


def test_a_correct_engine_passes_unchanged_and_ids_may_recur_in_another_step():
    checked = CheckedEngine(ScriptedEngine(random_script), vocabulary=VOCABULARY)
    plain = [
        replace(group, generations=tuple(map(with_arrays, group.generations)))
        for group in collected(ScriptedEngine(random_script)).groups
    ]
    assert list(collected(checked).groups) == plain
    assert list(collected(checked).groups) == plain


@pytest.mark.parametrize(
    ("logprobs", "typecode"), [((-0.5, -0.25), "f"), ([-0.1, -0.25], "d"), ((), "f")]
)
def test_the_numbers_of_an_answer_become_arrays_that_change_none_of_them(
    logprobs: Sequence[float], typecode: str
):
    tokens = tuple(range(len(logprobs)))
    for ids in (tokens, list(tokens), np.array(tokens, np.int64), array("i", tokens)):
        for scores in (logprobs, np.array(logprobs), array("d", logprobs)):
            found = with_arrays(Generation("1/0/0", ids, scores, "stop", 3))
            assert (found.token_ids, found.logprobs) == (array("i", tokens), array("d", logprobs))
            assert (found.token_ids.typecode, found.logprobs.typecode) == ("i", typecode)
            assert with_arrays(found) == found
