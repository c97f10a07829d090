"""Sequences that share rows of the native engine: each prefix of responses is computed once,
whatever the slots.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo.config.rollout_options import NativeConfig
from dapo.engines.native.cache import BLOCK, PromptCache
from dapo.engines.native.cache_rows import Row, RowCopies, Rows
from dapo.engines.native.compatibility import patch_model
from dapo.engines.native.engine import EngineStats, NativeEngine
from dapo.engines.native.forward import Forward, PromptPrefix, common_prefix
from dapo.engines.native.model_kernels import ModelKernels
from dapo.engines.native.scheduler import MIN_SHARED_PROMPT, RunningSequence
from dapo.engines.native.token_sampling import SamplingSettings, UniformDraws, sample
from dapo.libs.cpu_kernels.prepacked import COMPILED, LAYERS
from dapo.types import Generation, GenerationRequest
from helpers.fake_engines import answers
from helpers.fake_memory import FakeMemory, bytes_for_cache
from helpers.tiny_models import COMMON, SERVED, UNSHARED, tiny_model, unshared_model

PROMPTS = [(11, 42, 7, 99), (5, 5, 120), (64, 3, 190, 17, 1, 80)]


def request(label: str, **options: object) -> GenerationRequest:
    defaults = GenerationRequest(
        id=label,
        prompt_ids=PROMPTS[0],
        max_new_tokens=9,
        temperature=0.3,
        top_p=1.0,
        seed=0,
        stop_ids=(5, 90),
    )
    return replace(defaults, **options)


def groups(size: int, **options: object) -> list[GenerationRequest]:
    return [
        request(f"{p}/{i}", prompt_ids=prompt, seed=100 * p + i, **options)
        for p, prompt in enumerate(PROMPTS)
        for i in range(size)
    ]


@cache
def sampled_alone(temperature: float) -> dict[str, Generation]:
    """The answers to `groups(7)`, each sampled before the next one is submitted."""
    alone = engine_of(1)
    found: dict[str, Generation] = {}
    for one in groups(7, temperature=temperature):
        found |= answers(alone, [one])
    return found


def engine_of(slots: int, *, cache_tokens: int | None = None) -> NativeEngine:
    memory = (
        None if cache_tokens is None else FakeMemory(bytes_for_cache(cache_tokens, slots=slots))
    )
    return NativeEngine(
        tiny_model("llama", dtype=torch.float64), NativeConfig(slots=slots), memory=memory
    )


def distinct_beginnings(requests: Sequence[GenerationRequest], done: dict[str, Generation]) -> int:
    """Of responses, those after which another token was sampled."""
    return len(
        {
            (r.prompt_ids, tuple(done[r.id].token_ids[:n]))
            for r in requests
            for n in range(1, len(done[r.id].token_ids))
        }
    )


# --- the tree ---------------------------------------------------------------------------------------------------------


class Cache:
    """Rows of tokens in place of their keys and values: what a row holds can be compared with what
    it should hold.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.tokens = np.full((rows, length), -1)

    def copy(self, copies: RowCopies) -> None:
        self.tokens[copies.targets, : copies.length] = self.tokens[copies.sources, : copies.length]

    def require(self, rows: Rows) -> None:
        """Every branch finds the keys and values of all its tokens but the newest."""
        for at, row in enumerate(rows.in_use):
            for branch in row.branches:
                tokens = branch[0].token_ids[:-1]
                assert self.tokens[at, : len(tokens)].tolist() == list(tokens)


def generate(responses: Sequence[Sequence[int]], limit: int) -> tuple[int, int]:
    """Run responses of given tokens in at most `limit` rows; returns the row-steps, and the most
    rows in use.
    """
    sequences = [
        RunningSequence(request(str(i), max_new_tokens=len(tokens), stop_ids=()), order=i)
        for i, tokens in enumerate(responses)
    ]
    rows = Rows()
    cache = Cache(limit, max(map(len, responses)) + len(PROMPTS[0]))
    steps = 0
    most = 0

    def draw(branch: Collection[RunningSequence]) -> None:
        for seq in branch:
            seq.append(responses[seq.order][len(seq.token_ids)], 0.0)

    draw(sequences)
    rows.assign(row := Row(sequences))
    row.split()
    if not row.active:
        return 0, 0
    while len(rows):
        cache.copy(rows.assign_rows(limit))
        cache.copy(rows.compact())
        cache.require(rows)
        most = max(most, len(rows))
        for at, row in enumerate(rows.in_use):
            newest = len(row.active[0].token_ids) - 1
            cache.tokens[at, newest] = row.active[0].token_ids[-1]
            draw(row.active)
            steps += 1
        rows.split()
        cache.copy(rows.compact())
    assert [list(seq.token_ids) for seq in sequences] == [list(tokens) for tokens in responses]
    return steps, most


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(TOKENS, min_size=1, max_size=9), st.integers(1, 5))
def test_row_steps_are_the_distinct_beginnings_in_any_number_of_rows(
    responses: list[list[int]], limit: int
) -> None:
    steps, most = generate(responses, limit)
    assert steps == len({tuple(tokens[:n]) for tokens in responses for n in range(1, len(tokens))})
    assert most <= limit


def test_a_hand_made_tree_takes_its_nodes() -> None:
    #   1 - 2 - 3 - .      the last token of a response is drawn, and never computed
    #         \ 4 - .
    #   9 - .
    responses = [[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 4, 7], [9, 9], [1, 2]]
    for limit in (1, 2, 3, 9):
        assert generate(responses, limit)[0] == 5


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 5, 64])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_a_beginning_is_decoded_once_and_every_token_is_the_one_sampled_alone(
    slots: int, temperature: float
) -> None:
    requests = groups(7, temperature=temperature)
    engine = engine_of(slots)
    done = answers(engine, requests)
    stats = engine.stats
    assert stats.decode_slot_steps == distinct_beginnings(requests, done)
    assert stats.decode_tokens == sum(len(g.token_ids) - 1 for g in done.values())
    assert temperature == 1.0 or stats.decode_slot_steps < 0.9 * stats.decode_tokens
    for name, expected in sampled_alone(temperature).items():
        assert done[name].token_ids == expected.token_ids
        assert done[name].finish == expected.finish
        assert done[name].logprobs == pytest.approx(expected.logprobs, abs=1e-12)


def test_rows_and_memory_stay_within_their_bounds_while_sequences_part() -> None:
    requests = groups(9, temperature=1.0)
    engine = engine_of(4, cache_tokens=3 * 15)
    done = answers(engine, requests)
    position_bytes = 2 * 2 * 2 * 8 * 8  # keys and values, 2 layers, 2 heads of 8, float64
    assert engine.stats.cache_bytes_peak <= 3 * 15 * position_bytes
    assert engine.stats.decode_slot_steps <= 3 * engine.stats.decode_steps
    plenty = answers(engine_of(64), requests)
    assert {i: g.token_ids for i, g in done.items()} == {i: g.token_ids for i, g in plenty.items()}


def test_rows_that_sharing_saves_go_to_groups_that_wait() -> None:
    requests = [
        request(f"{p}/{i}", prompt_ids=(p, 1), temperature=0.0, stop_ids=(), max_new_tokens=20)
        for p in range(8)
        for i in range(8)
    ]
    engine = engine_of(8)
    answers(engine, requests)
    # one group starts with each poll; one after the other they would take 8 x 19
    assert engine.stats.decode_steps == 7 + 19
    assert engine.stats.decode_slot_steps == 8 * 19


def test_members_of_one_row_end_at_their_own_limits_and_leave_it_when_aborted() -> None:
    requests = [
        request(f"a{i}", temperature=0.0, stop_ids=(), max_new_tokens=n)
        for i, n in enumerate((3, 9, 5, 9))
    ]
    engine = engine_of(2)
    engine.submit(requests)
    for _ in range(4):
        finished = engine.poll()
    assert (finished, engine.in_flight) == ([], ["a1", "a2", "a3"])
    (stopped,) = engine.abort(["a1"])
    assert (stopped.finish, len(stopped.token_ids)) == ("aborted", 4)
    done: dict[str, Generation] = {}
    while engine.in_flight:
        done |= {g.request_id: g for g in engine.poll()}
    assert [len(done[name].token_ids) for name in ("a2", "a3")] == [5, 9]
    assert done["a3"].token_ids[:4] == stopped.token_ids
    assert engine.stats.decode_slot_steps == 8


def test_a_branch_that_waits_goes_on_when_the_one_before_it_is_aborted() -> None:
    requests = [request(f"a{i}", seed=i, temperature=2.0, stop_ids=()) for i in range(5)]
    expected = answers(engine_of(8), requests)
    engine = engine_of(1)
    engine.submit(requests)
    engine.poll()
    engine.poll()
    stopped = engine.abort(["a3", "a0"])
    assert [len(g.token_ids) for g in stopped] == [1, 2]
    done: dict[str, Generation] = {}
    while engine.in_flight:
        done |= {g.request_id: g for g in engine.poll()}
    assert list(done) == ["a1", "a2", "a4"]
    for name, generation in done.items():
        assert generation.token_ids == expected[name].token_ids


def test_statistics_of_an_engine_begin_at_zero() -> None:
    assert engine_of(1).stats == EngineStats()


# --- several draws from a row -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_from_shared_rows_are_those_from_copies_of_the_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [3, 1, 4, 2, 1, 5]
    values = np.array(
        [(1.0, 1.0), (1.0, 0.4), (0.0, 1.0), (0.7, 1.0), (1.0, 0.999), (2.0, 0.9)]
    ).T.copy()
    logits = torch.randn(6, 3000, generator=generator, dtype=dtype) * 2
    logits[4] = 0.0  # a nucleus that its first candidates do not hold
    uniforms = torch.rand(sum(counts), 1, generator=generator, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(6), torch.tensor(counts))
    shared = SamplingSettings.of(
        values, torch.from_numpy(values), UniformDraws(uniforms, counts, rows)
    )
    repeated = values[:, rows.numpy()]
    copied = SamplingSettings.of(repeated, torch.from_numpy(repeated), UniformDraws(uniforms))
    found = sample(logits, shared)
    expected = sample(logits[rows], copied)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert len(set(found[0].tolist())) > 8
    assert math.isfinite(float(found[1].sum()))


# --- a common prefix of prompts ------------------------------------------------------------------------------------

SYSTEM = tuple(range(20, 33))


def with_system(*ends: tuple[int, ...], **options: object) -> list[GenerationRequest]:
    return [
        request(f"{p}/{i}", prompt_ids=SYSTEM + end, seed=10 * p + i, **options)
        for p, end in enumerate(ends)
        for i in range(3)
    ]


ENDS = [(1, 2, 3), (1, 2, 9, 9), (7,), (8, 8), (1, 2, 3, 4, 5, 6), (7, 7)]


@pytest.mark.parametrize("name", SERVED)
def test_prompts_prefilled_after_their_beginning_are_those_prefilled_whole(name: str) -> None:
    forward = patch_model(tiny_model(name, dtype=torch.float64), rows=4)
    prompts = [SYSTEM + end for end in ENDS]
    with torch.inference_mode():
        whole = forward.prefill(prompts)
        after = forward.prefill(
            prompts, PromptPrefix(tuple(SYSTEM), forward.prefill([SYSTEM]).cache)
        )
    assert torch.allclose(after.logits, whole.logits, rtol=0, atol=1e-12)
    for computed in ("keys", "values"):
        for layer, expected in zip(
            getattr(after.cache, computed), getattr(whole.cache, computed), strict=True
        ):
            assert torch.allclose(layer, expected, rtol=0, atol=1e-12)


def test_the_padding_of_a_prefill_has_no_position_behind_the_longest_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = patch_model(tiny_model("llama"), rows=4)
    compute = forward._hidden
    positions: list[list[list[int]]] = []

    def recorded(ids: torch.Tensor, at: torch.Tensor, kept: PromptCache) -> torch.Tensor:
        positions.append(at.tolist())
        return compute(ids, at, kept)

    with torch.inference_mode():
        prefixes = [
            PromptPrefix(prompt, forward.prefill([prompt]).cache)
            for prompt in (tuple(range(12)), tuple(range(3)))
        ]
        monkeypatch.setattr(forward, "_hidden", recorded)
        forward.prefill([tuple(range(14)), tuple(range(9))], prefixes)
    assert positions == [[[12, 13, 13, 13, 13, 13], [3, 4, 5, 6, 7, 8]]]


@pytest.mark.parametrize("slots", [1, 64])
def test_the_common_beginning_of_prompts_is_computed_once_and_changes_no_token(slots: int) -> None:
    requests = with_system(*ENDS)
    engine = engine_of(slots)
    done = answers(engine, requests)
    if slots == 64:  # all prompts are known at once
        assert engine.stats.prefill_tokens == len(SYSTEM) + sum(map(len, ENDS))
    else:  # the first prompt is computed as a whole
        assert engine.stats.prefill_tokens <= 2 * len(SYSTEM) + sum(map(len, ENDS))
    assert engine.stats.prefill_prompts == len(ENDS)
    alone = engine_of(1)
    for r in requests:
        expected = answers(alone, [r])[r.id]
        assert done[r.id].token_ids == expected.token_ids
        assert done[r.id].logprobs == pytest.approx(expected.logprobs, abs=1e-12)


def test_a_common_beginning_becomes_shorter_and_is_taken_anew_where_too_little_is_left() -> None:
    first = (*SYSTEM, 1, 2, 3, 4)
    second = (*SYSTEM, 1, 2, 9)
    other = tuple(range(100, 120))
    engine = engine_of(1)
    counts = []
    for at, prompt in enumerate(
        (first, second, (*SYSTEM, 5), other, (*other[:18], 3, 3), (*SYSTEM, 6))
    ):
        engine.submit([request(str(at), prompt_ids=prompt, max_new_tokens=3, stop_ids=())])
    while engine.in_flight:
        before = engine.stats.prefill_tokens
        engine.poll()
        counts += [engine.stats.prefill_tokens - before] * (engine.stats.prefill_tokens > before)
    # they share with those before them: nothing, 15 tokens, the system part, nothing, 18 tokens,
    # nothing
    assert counts == [17, 16 - 15, 14 - 13, 20, 20 - 18, 14]


def test_an_idle_engine_remembers_no_prompt() -> None:
    engine = engine_of(4)
    requests = with_system(*ENDS[:2])
    polls = []
    for _ in range(2):
        before = engine.stats.prefill_tokens
        done = answers(engine, requests)
        polls.append(
            (engine.stats.prefill_tokens - before, {i: list(g.logprobs) for i, g in done.items()})
        )
    assert polls[0] == polls[1]  # to the last bit


def test_a_prompt_that_comes_twice_in_a_poll_is_prefilled_once() -> None:
    engine = engine_of(64)
    requests = [request(str(i), prompt_ids=PROMPTS[i % 3], seed=i) for i in range(9)]
    answers(engine, requests)
    assert (engine.stats.prefill_prompts, engine.stats.prefill_tokens) == (
        3,
        sum(map(len, PROMPTS)),
    )


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=4))
def test_the_common_beginning_is_the_longest(sequences: list[list[int]]) -> None:
    length = common_prefix(sequences)
    assert len({tuple(tokens[:length]) for tokens in sequences}) == 1
    assert (
        length == min(map(len, sequences))
        or len({tuple(tokens[: length + 1]) for tokens in sequences}) > 1
    )


# --- a long prompt, read once for its group ---------------------------------------------------------------------------

LONG = tuple((7 * i + 3 * i * i) % 197 for i in range(MIN_SHARED_PROMPT))
FULL_ATTENTION = ["llama", "tied llama", "qwen2", "qwen3", "smollm3", "gemma"]


def compiled_engine(name: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> NativeEngine:
    """Compiled attention, which serves heads of 32 or wider, reads a shared prompt."""
    monkeypatch.setitem(COMMON, "head_dim", 32)
    monkeypatch.setitem(COMMON, "hidden_size", 192)
    return NativeEngine(tiny_model(name), NativeConfig(slots=slots, kernels={LAYERS: COMPILED}))


def long_groups(sizes: Sequence[int] = (6, 4, 3)) -> list[GenerationRequest]:
    """Groups of such prompts, the last of them too small, and one of a short prompt."""
    ends = [(), (1, 2), (3,), None]
    return [
        request(
            f"{p}/{i}",
            prompt_ids=PROMPTS[0] if end is None else LONG + end,
            seed=50 * p + i,
            temperature=0.8,
        )
        for p, (end, size) in enumerate(zip(ends, (*sizes, 5), strict=True))
        for i in range(size)
    ]


@pytest.mark.needs_kernels
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_a_prompt_read_once_for_its_group_gives_the_tokens_of_one_in_each_row(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled() -> dict[str, Generation]:
        return answers(compiled_engine(name, 8, monkeypatch), long_groups())

    together = sampled()
    monkeypatch.setattr("dapo.engines.native.scheduler.MIN_SHARED_PROMPT", 10**6)
    for label, expected in sampled().items():
        assert together[label].token_ids == expected.token_ids
        assert together[label].logprobs == pytest.approx(expected.logprobs, abs=2e-5)


@pytest.mark.needs_kernels
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_prompts_without_a_common_beginning_are_each_read_once_for_their_group(
    name: str, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        request(
            f"{p}/{i}", prompt_ids=(p + 1, *LONG[p:], *range(p)), seed=50 * p + i, temperature=0.8
        )
        for p in range(prompts)
        for i in range(4)
    ]
    together = answers(compiled_engine(name, 16, monkeypatch), asked)
    monkeypatch.setattr("dapo.engines.native.scheduler.MIN_SHARED_PROMPT", 10**6)
    for label, expected in answers(compiled_engine(name, 16, monkeypatch), asked).items():
        assert together[label].token_ids == expected.token_ids
        assert together[label].logprobs == pytest.approx(expected.logprobs, abs=2e-5)


@pytest.mark.needs_kernels
@pytest.mark.parametrize("name", SERVED)
def test_a_model_with_windows_keeps_each_prompt_in_its_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled_engine(name, 8, monkeypatch)._forward.shares_prompts == (name in FULL_ATTENTION)
    for kernels, dtype in (({}, torch.float32), ({LAYERS: COMPILED}, torch.float64)):
        assert not patch_model(
            tiny_model(name, dtype=dtype), rows=4, kernels=kernels
        ).shares_prompts


@pytest.mark.needs_kernels
@pytest.mark.parametrize("name", UNSHARED)
def test_a_model_that_changes_its_cached_states_keeps_each_prompt_in_its_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMON, "head_dim", 32)
    monkeypatch.setitem(COMMON, "hidden_size", 192)
    compiled = ModelKernels(fuses_weights=False, compiled=True)
    assert Forward(tiny_model("llama"), compiled).shares_prompts
    assert not Forward(unshared_model(name), compiled).shares_prompts


@pytest.mark.needs_kernels
def test_a_prompt_that_a_group_shares_takes_memory_once_and_no_longer_than_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = compiled_engine("llama", 16, monkeypatch)
    engine.submit(long_groups()[:6])
    engine.poll()
    engine.poll()
    position_bytes = 2 * 2 * 2 * 32 * 4  # keys and values, 2 layers, 2 heads of 32, float32
    assert engine.cache_bytes <= (len(LONG) + 6 * BLOCK) * position_bytes
    engine.abort([name for name in engine.in_flight if name != "0/3"])
    assert engine.cache_bytes >= len(LONG) * position_bytes
    engine.abort(["0/3"])
    assert engine.cache_bytes == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_shared_prompts_and_rows_stay_within_cache_tokens(rows: int) -> None:
    # a row of a short prompt may become longer than those of the long ones
    requests = [*long_groups(), request("long", max_new_tokens=300, stop_ids=())]
    engine = engine_of(16, cache_tokens=rows * 320)
    done = answers(engine, requests)
    assert engine.stats.cache_bytes_peak <= rows * 320 * 2 * 2 * 2 * 8 * 8
    expected = answers(engine_of(64), requests)
    assert {i: g.token_ids for i, g in done.items()} == {
        i: g.token_ids for i, g in expected.items()
    }


def test_whether_a_prompt_is_shared_does_not_depend_on_what_else_runs() -> None:
    requests = long_groups()
    expected = answers(engine_of(64), requests)
    engine = engine_of(3)
    for first, last in ((0, 6), (6, 10), (10, 13)):
        done = answers(engine, requests[first:last])
        for label, generation in done.items():
            assert generation.token_ids == expected[label].token_ids
            assert generation.logprobs == pytest.approx(expected[label].logprobs, abs=1e-12)
