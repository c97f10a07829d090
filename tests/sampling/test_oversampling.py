"""How many groups are in flight: enough to fill the batch in one wave, and no batch depends on it."""

import math
from math import ceil, exp, lgamma

import pytest

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.engines.vllm.start import default_slots
from dapo.sampling.batch import Sampling, collect
from dapo.sampling.dynamic_sampling import CONFIDENCE
from dapo.sampling.queue import Batch, GroupQueue
from dapo.start.build import engine_slots
from dapo.types import GenerationRequest
from helpers.fake_rollout import (
    END,
    FILL,
    RIGHT,
    WRONG,
    FakeEncoder,
    FakeJudge,
    in_order,
    plan,
    random_script,
    sampler,
)
from helpers.tables import for_each_row
from helpers.tiny_runs import tiny


def chance_of_at_least(least: int, n: int, a: float, b: float) -> float:
    """The chance that a beta-binomial number of n is at least that: by its sum."""

    def log_beta(x: float, y: float) -> float:
        return lgamma(x) + lgamma(y) - lgamma(x + y)

    def log_choose(k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    total = log_beta(a, b)
    return sum(exp(log_choose(k) + log_beta(k + a, n - k + b) - total) for k in range(least, n + 1))


@for_each_row(
    ("prompts", "keep_rate", "decided"),
    [(512, 1 / 3, 2048.0), (512, 0.9, 2048.0), (128, 0.2, 512.0), (32, 0.5, 128.0), (8, 0.6, 32.0)],
)
def test_the_groups_in_flight_suffice_with_the_confidence_of_the_exact_distribution(
    prompts: int, keep_rate: float, decided: float
):
    chosen = sampler(prompts=prompts)
    chosen.load_state_dict({"kept": keep_rate * decided, "decided": decided})
    n = chosen.sufficient_target(prompts, oversampling=10.0)
    known = 2 * decided  # a mean with weights d^i over 4 batches is as certain as that of 8
    a = keep_rate * known
    chance = chance_of_at_least(prompts, n, a, known - a)
    assert chance == pytest.approx(CONFIDENCE, abs=0.015)
    expected = chance_of_at_least(prompts, chosen.in_flight_target(prompts), a, known - a)
    assert 0.45 < expected < 0.7


def test_oversampling_bounds_the_groups_beyond_the_expected_number():
    chosen = sampler(prompts=8)
    # nothing is known: none in vain
    assert chosen.sufficient_target(8, oversampling=0.25) == 8
    chosen.load_state_dict({"kept": 2.0, "decided": 10.0})
    assert [chosen.sufficient_target(8, oversampling=share) for share in (0, 0.25, 0.5)] == [
        40,
        50,
        60,
    ]
    # of two decided groups one was kept: no number suffices, and the bound holds
    chosen.load_state_dict({"kept": 1.0, "decided": 2.0})
    assert chosen.sufficient_target(8, oversampling=3.0) == 64
    # a batch that is full needs none
    assert chosen.sufficient_target(0, oversampling=3.0) == 0


def equal_lengths(request: GenerationRequest) -> tuple[list[int], str]:
    """Half of the problems carry a signal; every response takes ten polls."""
    carries = keyed_uniforms(keyed_seed("signal", request.prompt_ids[0]), 1)[0] < 0.5
    is_right = carries and request.id.endswith("/0")
    return [RIGHT if is_right else WRONG, *[FILL] * 8, END], "stop"


def sampled(
    oversampling: float, *, steps: int, slots: int | None = None, script=equal_lengths
) -> tuple[list[Batch], list[int], ScriptedEngine]:
    """Batches of 32 groups of 2, and the polls that each took."""
    engine = ScriptedEngine(script, slots=slots)
    sampling = Sampling(
        in_order(4000),
        engine,
        FakeJudge(),
        sampler(prompts=32, bound=320),
        FakeEncoder(),
        plan(2),
        oversampling=oversampling,
        slots=slots,
    )
    batches = []
    polls = []
    for step in range(1, steps + 1):
        before = engine.polls
        batches.append(collect(sampling, step=step))
        polls.append(engine.polls - before)
    return batches, polls, engine


def trained(batches: list[Batch]) -> list[list[int]]:
    return [[group.id for group in batch.groups] for batch in batches]


def test_most_batches_take_one_wave_and_every_one_trains_on_the_same_groups():
    expected, polls, _ = sampled(0.0, steps=34)
    enough, polls_with, _ = sampled(1.0, steps=34)
    waves = [ceil(count / 14) for count in polls[4:]]
    waves_with = [ceil(count / 14) for count in polls_with[4:]]
    assert waves.count(1) < 0.7 * len(waves)
    assert waves_with.count(1) >= 0.9 * len(waves_with)
    assert trained(enough) == trained(expected)
    for batch in enough:
        undecided = batch.group_counts["excess"] + batch.group_counts["aborted"]
        assert sum(batch.group_counts.values()) == len(batch.decided) + undecided


def tokens(batches: list[Batch]) -> int:
    return sum(batch.num_generated_tokens for batch in batches)


def test_groups_beyond_the_expected_number_begin_in_free_slots_only():
    # about 130 groups of 2 for 200 slots
    expected, polls, _ = sampled(0.0, steps=12, slots=200, script=random_script)
    enough, polls_with, _ = sampled(1.0, steps=12, slots=200, script=random_script)
    assert trained(enough) == trained(expected)
    assert sum(polls_with) <= sum(polls)
    assert 1.0 < tokens(enough) / tokens(expected) < 1.1


def test_a_group_in_vain_is_worth_its_time_only_where_it_is_a_small_share_of_the_engine():
    _, _, expected = sampled(0.0, steps=4, slots=16, script=random_script)
    _, _, full = sampled(1.0, steps=4, slots=16, script=random_script)
    assert [each.id for each in full.submitted] == [each.id for each in expected.submitted]
    chosen = sampler(prompts=512)
    chosen.load_state_dict({"kept": 2048 / 3, "decided": 2048.0})
    # the groups needed have a standard deviation of 65: z is 0 up to sqrt(2 pi) 65 = 163
    beyond = {
        groups: chosen.sufficient_target(512, oversampling=0.25, engine_groups=groups) - 1536
        for groups in (64, 160, 256, 1024, math.inf)
    }
    assert list(beyond.values()) == [0, 0, 61, 110, 110]


def test_a_batch_that_was_undone_asks_for_the_same_groups_again():
    def ids_of(*, undo: bool) -> list[str]:
        engine = ScriptedEngine(equal_lengths)
        sampling = Sampling(
            in_order(400),
            engine,
            FakeJudge(),
            sampler(prompts=16, bound=160),
            FakeEncoder(),
            plan(2),
            oversampling=0.5,
        )
        for step in (1, 2, 3):
            begun = len(engine.submitted)
            collect(sampling, step=step)
            if undo:
                sampling.roll_back(finished_steps=step - 1)
                begun = len(engine.submitted)
                collect(sampling, step=step)
        return [request.id for request in engine.submitted[begun:]]

    assert ids_of(undo=True) == ids_of(undo=False)


def test_a_schedule_that_begins_later_batches_needs_no_oversampling():
    chosen = sampler(prompts=8, bound=80)
    chosen.load_state_dict({"kept": 8.0, "decided": 24.0})
    queue = GroupQueue(chosen)
    numbers = [
        [queue.num_to_submit(oversampling=share, lookahead=lookahead) for share in (0.0, 0.5)]
        for lookahead in (0, 1)
    ]
    assert numbers == [[24, 36], [48, 48]]
    assert queue.num_to_submit(oversampling=0.5, free_groups=30) == 30
    assert queue.num_to_submit(oversampling=0.5, free_groups=-3) == 24


def test_auto_oversamples_on_a_gpu_and_slots_are_those_of_all_engines():
    assert tiny("train.device=cpu").oversampling == 0
    assert tiny("train.device=cuda").oversampling == 0.25
    assert tiny("train.device=cpu", "dynamic_sampling.oversampling=0.1").oversampling == 0.1
    assert tiny("rollout.native.slots=12").rollout.slots == 12
    assert tiny("rollout.native.slots=12", "rollout.engines=3").rollout.slots == 36
    two_of_vllm = tiny("rollout.engine=vllm", "rollout.engines=2")
    assert engine_slots(two_of_vllm) == 2 * default_slots()
    limited = "rollout.vllm.options={max_num_seqs: 700}"
    assert engine_slots(tiny("rollout.engine=vllm", "rollout.engines=2", limited)) == 1400
