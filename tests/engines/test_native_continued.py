"""Requests that continue a finished response: the native engine computes only the tokens that are
new.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dapo.config.rollout_options import NativeConfig
from dapo.engines.continuation import ContinuingEngine, Unfinished
from dapo.engines.native.engine import NativeEngine, resumed_prompts, similar_batches
from dapo.types import Generation, GenerationRequest
from helpers.fake_engines import answers
from helpers.fake_memory import FakeMemory, bytes_for_cache
from helpers.tiny_models import SERVED, tiny_model

# the second is long enough to be stored once for a group
PROMPTS = [tuple(range(20, 24)), tuple(range(30, 70))]
OBSERVATIONS = [(7, 8, 9), (101, 3, 55, 12, 6), (90,)]


def engine_of(
    name: str = "llama", slots: int = 16, cache_tokens: int | None = None
) -> NativeEngine:
    memory = (
        None if cache_tokens is None else FakeMemory(bytes_for_cache(cache_tokens, slots=slots))
    )
    return NativeEngine(
        tiny_model(name, dtype=torch.float64), NativeConfig(slots=slots), memory=memory
    )


def first_turns(members: int = 4) -> list[GenerationRequest]:
    made = [(p, i, prompt) for p, prompt in enumerate(PROMPTS) for i in range(members)]
    return [
        GenerationRequest(
            f"{p}/{i}/0",
            prompt,
            6 if i else 1,
            0.6,
            1.0,
            seed=10 * p + i,
            stop_ids=tuple(range(0, 200, 9)),
            is_continued=True,
        )
        for p, i, prompt in made
    ]


def next_turns(
    before: Sequence[GenerationRequest], done: dict[str, Generation], turn: int
) -> list[GenerationRequest]:
    return [
        replace(
            r,
            id=f"{r.id[:-2]}/{turn}",
            prompt_ids=(
                *r.prompt_ids,
                *done[r.id].token_ids,
                *OBSERVATIONS[(at + turn) % len(OBSERVATIONS)],
            ),
            seed=r.seed + 1000 * turn,
            previous=r.id,
        )
        for at, r in enumerate(before)
    ]


def play(
    engine: NativeEngine, turns: int, *, keep: bool
) -> tuple[list[GenerationRequest], dict[str, Generation]]:
    """Play as many turns for all requests; without `keep` no request says that it is continued."""
    requests = first_turns()
    asked = []
    done = {}
    for turn in range(turns):
        if turn:
            requests = next_turns(requests, done, turn)
        done |= answers(
            engine, [r if keep else replace(r, is_continued=False, previous=None) for r in requests]
        )
        asked += requests
    return asked, done


def distinct_positions(requests: Sequence[GenerationRequest], done: dict[str, Generation]) -> int:
    """The beginnings of sequences that must be computed: all tokens but those sampled last, each
    beginning once.
    """
    return len(
        {
            (*r.prompt_ids, *done[r.id].token_ids)[:n]
            for r in requests
            for n in range(1, len(r.prompt_ids) + len(done[r.id].token_ids))
        }
    )


@pytest.mark.parametrize("name", SERVED)
def test_turns_are_as_if_all_were_computed_and_no_position_is_computed_twice(name: str) -> None:
    engine = engine_of(name)
    asked, done = play(engine, 3, keep=True)
    _, expected = play(engine_of(name), 3, keep=False)
    # also responses that end in the prefill
    assert {len(g.token_ids) for g in done.values()} >= {1, 6}
    for label, generation in done.items():
        assert list(generation.token_ids) == list(expected[label].token_ids)
        assert list(generation.logprobs) == pytest.approx(list(expected[label].logprobs), abs=1e-9)
    computed = engine.stats.prefill_tokens + engine.stats.decode_slot_steps
    assert computed == distinct_positions(asked, done)


def test_new_weights_and_other_prompts_take_nothing_from_the_responses_before() -> None:
    engine = engine_of()
    requests = first_turns()[:1]
    done = answers(engine, requests)
    (follows,) = next_turns(requests, done, 1)
    other = replace(follows, prompt_ids=(1, *follows.prompt_ids[1:]))
    answers(engine, [other])
    assert engine.stats.prefill_tokens == len(PROMPTS[0]) + len(other.prompt_ids)
    done = answers(engine, requests)
    twin = tiny_model("llama", seed=5, dtype=torch.float64)
    engine.load_weights(_Weights(twin), version=1)
    alone = NativeEngine(twin, NativeConfig(slots=16))
    before = engine.stats.prefill_tokens
    assert list(answers(engine, [follows])[follows.id].token_ids) == list(
        answers(alone, [replace(follows, previous=None)])[follows.id].token_ids
    )
    assert engine.stats.prefill_tokens - before == len(follows.prompt_ids)


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_ends_where_the_stored_states_end_is_computed_anew(count: int) -> None:
    engine = engine_of()
    requests = [replace(r, stop_ids=(), max_new_tokens=4) for r in first_turns()[:count]]
    done = answers(engine, requests)
    (*others, last) = next_turns(requests, done, 1)
    # what was sampled last is cut off, and nothing comes behind it
    shorter = (*requests[-1].prompt_ids, *list(done[requests[-1].id].token_ids)[:-1])
    follows = [*others, replace(last, prompt_ids=shorter)]
    alone = answers(engine_of(), [replace(r, previous=None) for r in follows])
    for label, generation in answers(engine, follows).items():
        assert list(generation.token_ids) == list(alone[label].token_ids)
        assert list(generation.logprobs) == pytest.approx(list(alone[label].logprobs), abs=1e-9)


class _Weights:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def named_tensors(self):
        return iter(self.model.state_dict().items())


def test_responses_that_nobody_continues_are_dropped_and_dropped_ones_computed_again() -> None:
    engine = engine_of(slots=2)
    requests = first_turns()
    done = answers(engine, requests)
    assert len(engine._continued) == 4  # twice the slots, the newest
    follows = next_turns(requests, done, 1)
    expected = answers(engine_of(), [replace(r, previous=None) for r in follows])
    for label, generation in answers(engine, follows).items():
        assert list(generation.token_ids) == list(expected[label].token_ids)
    engine.drop_weights()
    assert not engine._continued


def test_what_continues_is_served_before_what_begins() -> None:
    engine = engine_of(slots=1)
    first = replace(first_turns()[0], max_new_tokens=1, min_new_tokens=0)
    done = answers(engine, [first])
    (follows,) = next_turns([first], done, 1)
    engine.submit([replace(first, id=f"new{i}", max_new_tokens=2) for i in range(3)])
    engine.submit([follows])
    assert engine.in_flight[0] == follows.id


def test_within_a_bound_on_memory_rows_and_kept_responses_share_it() -> None:
    engine = engine_of(slots=8, cache_tokens=400)
    asked, done = play(engine, 3, keep=True)
    _, expected = play(engine_of(), 3, keep=False)
    assert {label: list(g.token_ids) for label, g in done.items()} == {
        label: list(g.token_ids) for label, g in expected.items()
    }
    kept = sum(len(prefix.token_ids) for prefix in engine._continued.values())
    assert kept <= engine._max_continued_tokens < 400 / 3
    assert len(asked) == len(done) == 24


@pytest.mark.parametrize(
    ("name", "tokens"), [*((name, 4) for name in SERVED), ("llama", 1), ("gemma3", 1)]
)
def test_resumed_responses_read_the_prompt_of_their_group_once(name: str, tokens: int) -> None:
    requests = [
        replace(r, max_new_tokens=9, stop_ids=(), is_continued=False) for r in first_turns()
    ]
    expected = answers(engine_of(name), requests)
    inner = engine_of(name)
    engine = ContinuingEngine(inner)
    engine.submit(requests)
    for _ in range(tokens):
        assert engine.poll() == []
    before = inner.stats.prefill_tokens
    parts = [
        part for part in engine.suspend([r.id for r in requests]) if isinstance(part, Unfinished)
    ]
    engine.resume(requests, parts)
    found = {
        generation.request_id: generation for _ in range(9 - tokens) for generation in engine.poll()
    }
    for label, generation in expected.items():
        assert list(found[label].token_ids) == list(generation.token_ids)
        assert list(found[label].logprobs) == pytest.approx(list(generation.logprobs), abs=1e-9)
    rests = {
        (r.prompt_ids, tuple(part.generation.token_ids))
        for r, part in zip(requests, parts, strict=True)
    }
    long = [rest for prompt, rest in rests if prompt == PROMPTS[1]]
    # too short for a prefill
    short = sum(len(prompt) + len(rest) for prompt, rest in rests if prompt == PROMPTS[0])
    once = len(PROMPTS[1]) * (1 if len(long) > 1 else len(long))
    assert inner.stats.prefill_tokens - before == short + once + sum(map(len, long))


def test_prompts_of_like_rests_are_prefilled_together_and_beginnings_are_bounded() -> None:
    rests = {tuple(range(n)): n for n in (3, 200, 5, 150, 160, 4000, 4096)}
    batches = [[rests[prompt] for prompt in batch] for batch in similar_batches(rests)]
    assert batches == [[3, 5, 150], [160, 200], [4000], [4096]]
    long = [tuple(range(n, n + 1500)) for n in range(4)]
    asked = [
        GenerationRequest(f"{p}/{i}", (*p, i), 9, 1.0, 1.0, seed=i, stop_ids=(), offset=1)
        for p in long
        for i in range(2)
    ]
    assert set(resumed_prompts(asked).values()) == set(long[:2])
    assert resumed_prompts([replace(asked[0], offset=0), *asked[1:2]]) == {}


@pytest.mark.parametrize("name", SERVED)
def test_resumed_responses_whose_prompts_begin_alike_read_that_beginning_once(name: str) -> None:
    begin = tuple(range(100, 112))
    ends = [(1, 2, 3), (4, 5)]
    requests = [
        GenerationRequest(f"{p}/{i}", (*begin, *end), 9, 1.0, 1.0, seed=10 * p + i, stop_ids=())
        for p, end in enumerate(ends)
        for i in range(4)
    ]
    expected = answers(engine_of(name), requests)
    inner = engine_of(name)
    engine = ContinuingEngine(inner)
    engine.submit(requests)
    for _ in range(4):
        engine.poll()
    before = inner.stats.prefill_tokens
    parts = [
        part for part in engine.suspend([r.id for r in requests]) if isinstance(part, Unfinished)
    ]
    engine.resume(requests, parts)
    found = {generation.request_id: generation for _ in range(5) for generation in engine.poll()}
    for label, generation in expected.items():
        assert list(found[label].token_ids) == list(generation.token_ids)
        assert list(found[label].logprobs) == pytest.approx(list(generation.logprobs), abs=1e-9)
    rests = {
        (r.prompt_ids, tuple(part.generation.token_ids))
        for r, part in zip(requests, parts, strict=True)
    }
    read = len(begin) + sum(map(len, ends)) + sum(len(rest) for _, rest in rests)
    assert inner.stats.prefill_tokens - before == read
