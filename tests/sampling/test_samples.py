"""From groups to samples: shaped rewards, advantages, masks, minibatches."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dapo.algo.estimator_table import ESTIMATORS
from dapo.config import Config, load_config
from dapo.sampling.samples import (
    minibatches,
    shaped_reward,
    with_advantages,
    with_engine_logprobs,
    with_kl_in_rewards,
    with_old_logprobs,
)
from dapo.types import Finish, Generation, Group, Problem, Sample, Verdict
from helpers.paths import TINY


def config(*overrides: str) -> Config:
    return load_config(TINY, overrides)


def group(
    *responses: tuple[int, bool | None], position: int = 0, overrides: Sequence[str] = ()
) -> Group:
    """From lengths and verdicts; None is a verdict with an error, length 8 is truncated."""

    def generation(length: int) -> Generation:
        finish: Finish = "length" if length == 8 else "stop"
        return Generation("r", (5,) * length, (-1.0,) * length, finish, 0)

    verdicts = [
        Verdict(None, 0.0, "died") if v is None else Verdict(v, 1.0 if v else -1.0)
        for _, v in responses
    ]
    generations = tuple(generation(n) for n, _ in responses)
    rewards = tuple(
        shaped_reward(g, v, config(*overrides)) for g, v in zip(generations, verdicts, strict=True)
    )
    return Group(
        Problem("p", "?", "!"), (1, 2), generations, tuple(verdicts), id=position, rewards=rewards
    )


def test_rewards_are_the_score_plus_equation_13_and_advantages_sum_to_zero():
    samples = with_advantages([group((4, True), (5, True), (6, False), (8, False))], config())
    assert [sample.reward for sample in samples] == [1.0, 0.75, -1.5, -2.0]
    # mean -0.4375, sum of squares 7.046875, sample std sqrt(7.046875 / 3) = 1.53263
    expected = [1.4375 / 1.53263, 1.1875 / 1.53263, -1.0625 / 1.53263, -1.5625 / 1.53263]
    assert [sample.advantage for sample in samples] == pytest.approx(expected, abs=1e-5)
    assert all(list(sample.mask) == [True] * len(sample.response_ids) for sample in samples)
    assert all(sample.old_logprobs is None for sample in samples)


def test_a_response_without_a_verdict_neither_trains_nor_counts():
    with_error = with_advantages([group((3, True), (3, None), (3, False))], config())
    without = with_advantages([group((3, True), (3, False))], config())
    assert (
        [s.advantage for s in with_error]
        == [s.advantage for s in without]
        == pytest.approx([0.7071, -0.7071], abs=1e-4)
    )


def test_overlong_filter_masks_truncated_responses_which_still_count_in_the_mean():
    samples = with_advantages(
        [group((3, True), (8, False), (3, False), overrides=["overlong.mode=filter"])],
        config("overlong.mode=filter"),
    )
    assert [sample.reward for sample in samples] == [1.0, -1.0, -1.0]
    assert [tuple(sample.mask) for sample in samples] == [(True,) * 3, (False,) * 8, (True,) * 3]
    assert samples[0].advantage == pytest.approx(1.1547, abs=1e-4)
    assert samples[1].num_trained_tokens == 0


def test_each_estimator_compares_a_response_with_its_group_the_others_or_the_whole_step():
    groups = [
        group((3, True), (3, False), (3, False)),
        group((3, True), (3, True), (3, True), position=1),
    ]

    def advantages(estimator: str) -> list[float]:
        return [
            s.advantage for s in with_advantages(groups, config(f"advantage.estimator={estimator}"))
        ]

    assert advantages("group") == pytest.approx([1.1547, -0.57735, -0.57735, 0, 0, 0], abs=1e-4)
    assert advantages("rloo") == pytest.approx([2, -1, -1, 0, 0, 0], abs=1e-12)
    # mean 1/3, squares 4 (2/3)^2 + 2 (4/3)^2 = 16/3, std sqrt(16/15) = 1.0327956
    up = 2 / 3 / 1.0327956
    down = -4 / 3 / 1.0327956
    assert advantages("reinforce_pp") == pytest.approx([up, down, down, up, up, up], abs=1e-5)
    # differences 4/3, -2/3, -2/3, 0, 0, 0: squares 8/3, std sqrt(8/15) = 0.7302967
    expected = [value / 0.7302967 for value in (4 / 3, -2 / 3, -2 / 3, 0, 0, 0)]
    assert advantages("reinforce_pp_baseline") == pytest.approx(expected, abs=1e-5)


def test_a_step_without_groups_gives_no_samples_with_any_estimator():
    for estimator in ESTIMATORS:
        assert with_advantages([], config(f"advantage.estimator={estimator}")) == []


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
def test_no_order_of_the_groups_and_no_cut_of_the_batch_changes_a_whitened_advantage(
    estimator: str,
):
    options = config(f"advantage.estimator={estimator}", "overlong.mode=off")
    groups = [group((3, True), (3, i > 2), (3, i > 1), position=i) for i in range(4)]
    by_id = {(s.group_id, s.index): s.advantage for s in with_advantages(groups, options)}
    turned = {(s.group_id, s.index): s.advantage for s in with_advantages(groups[::-1], options)}
    assert turned == pytest.approx(by_id, abs=1e-14)
    cut = [
        s for part in minibatches(with_advantages(groups, options), options, step=1) for s in part
    ]
    assert {(s.group_id, s.index): s.advantage for s in cut} == by_id


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
def test_the_divergence_is_taken_from_the_reward_before_the_advantage(estimator: str):
    options = config(
        f"advantage.estimator={estimator}",
        "loss.kl_coef=0.5",
        "loss.kl_in=reward",
        "overlong.mode=off",
    )
    groups = [group((3, True), (3, None), (3, False)), group((3, True), (3, True), position=1)]
    samples = with_advantages(groups, options)
    found = with_kl_in_rewards(samples, [0.4, -0.2, 1.0, 0.0], options)
    assert [sample.reward for sample in found] == pytest.approx([0.8, -0.9, 0.5, 1.0])
    assert [sample.kl for sample in found] == [0.4, -0.2, 1.0, 0.0]
    # the batch: mean 0.35, squares .2025 + 1.5625 + .0225 + .4225 = 2.21, std sqrt(2.21 / 3) =
    # 0.8582929
    expected = {
        "group": [0.707106, -0.707106, -0.707105, 0.707105],
        "rloo": [1.7, -1.7, -0.5, 0.5],
        "reinforce_pp": [value / 0.8582929 for value in (0.45, -1.25, 0.15, 0.65)],
        # differences .85, -.85, -.25, .25: squares 1.57, std sqrt(1.57 / 3) = 0.7234178
        "reinforce_pp_baseline": [value / 0.7234178 for value in (0.85, -0.85, -0.25, 0.25)],
    }[estimator]
    assert [sample.advantage for sample in found] == pytest.approx(expected, abs=1e-5)
    for each, was in zip(found, samples, strict=True):
        assert replace(each, reward=was.reward, kl=None, advantage=was.advantage) == was


def test_minibatches_are_whole_groups_in_a_keyed_order():
    groups = [group((3, True), (4, False), position=position) for position in range(6)]
    samples = with_advantages(groups, config())
    first = minibatches(samples, config(), step=1)
    assert [len(minibatch) for minibatch in first] == [4, 4, 4]  # two groups of two each
    for minibatch in first:
        ids = [sample.group_id for sample in minibatch]
        assert ids[0] == ids[1] != ids[2] == ids[3]
    assert sorted(s.group_id for minibatch in first for s in minibatch) == sorted(
        list(range(6)) * 2
    )
    assert first == minibatches(samples, config(), step=1)
    orders = {
        tuple(s.group_id for m in minibatches(samples, config(), step=step) for s in m)
        for step in range(20)
    }
    assert len(orders) > 10  # no step repeats another's order by design


def test_a_short_batch_makes_fewer_updates_and_its_last_may_be_smaller():
    samples = with_advantages(
        [group((3, True), (4, False), position=position) for position in range(3)], config()
    )
    assert [len(minibatch) for minibatch in minibatches(samples, config(), step=1)] == [4, 2]


def test_old_logprobs_are_asked_for_once_and_from_the_second_minibatch_on():
    samples = with_advantages(
        [group((3, True), (n, False), position=n) for n in (2, 3, 4)], config()
    )
    asked: list[list[Sample]] = []

    def record(minibatch: list[Sample]) -> list[Sample]:
        asked.append(minibatch)
        return [replace(sample, old_logprobs=(-float(i),)) for i, sample in enumerate(minibatch)]

    parts = [samples[4:], samples[:3], samples[3:4]]
    first, *later = with_old_logprobs(parts, record)
    assert first == parts[0]
    assert asked == [parts[1] + parts[2]]
    assert [[sample.old_logprobs for sample in part] for part in later] == [
        [(0.0,), (-1.0,), (-2.0,)],
        [(-3.0,)],
    ]
    assert [[replace(sample, old_logprobs=None) for sample in part] for part in later] == parts[1:]


def test_the_engine_s_logprobs_become_old_ones_unless_the_first_minibatch_compares_nothing():
    def refuse(minibatch: list[Sample]) -> list[Sample]:
        raise AssertionError("the policy was asked")

    samples = with_advantages([group((3, True), (n, False), position=n) for n in (2, 3)], config())
    first, later = with_old_logprobs([samples[:2], samples[2:]], refuse, source="engine")
    assert first == samples[:2]
    for was, sample in zip(samples[2:], later, strict=True):
        assert (sample.old_logprobs, sample.engine_logprobs) == (was.engine_logprobs, ())
    idle = [replace(sample, advantage=0.0) for sample in samples[:2]]
    masked = [replace(sample, mask=(0,) * len(sample.mask)) for sample in samples[:2]]
    for minibatch in (idle, masked):
        assert with_old_logprobs([minibatch, samples[2:]], list, source="engine") == [
            minibatch,
            samples[2:],
        ]


def test_a_ratio_to_the_engine_is_in_every_update_and_the_first_alone_compares_the_two():
    samples = with_advantages([group((3, True), (n, False), position=n) for n in (2, 3)], config())
    first, later = with_engine_logprobs([samples[:2], samples[2:]])
    for was, sample in zip(samples, [*first, *later], strict=True):
        assert sample.old_logprobs == was.engine_logprobs
    assert [sample.engine_logprobs for sample in first] == [s.engine_logprobs for s in samples[:2]]
    assert [sample.engine_logprobs for sample in later] == [(), ()]
