"""The selection of problems: posteriors from the history, keyed decisions, weights, and metrics
that add up.
"""

import json
from collections.abc import Iterable
from functools import cache
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.scripted_engine import ScriptedEngine
from dapo.algo.advantages import group_advantages
from dapo.algo.chance import Beta, chance_at, expected_chance, largest_chance
from dapo.core.errors import RewardError
from dapo.data.stream import ProblemStream
from dapo.training.problem_stats import (
    HALF_LIFE_STEPS,
    ProblemStats,
    read_problem_stats,
    write_problem_stats,
)
from dapo.training.rollout import Batch, Sampling, collect
from dapo.training.selection import CALIBRATION_SHARE, FLOOR, Decision, Prediction, ProblemSelector
from dapo.types import Generation, Group, Problem, Verdict
from helpers.fake_rollout import (
    RIGHT,
    VERDICTS,
    FakeEncoder,
    FakeJudge,
    plan,
    random_script,
    sampler,
)

G = 8
MODES = ("proportional", "thompson")


def group(problem: Problem, correct: int, size: int = G, position: int = 0) -> Group:
    verdicts = tuple(Verdict(i < correct, 1.0 if i < correct else -1.0) for i in range(size))
    generations = tuple(Generation(str(i), (1,), (0.0,), "stop", 0) for i in range(size))
    return Group(problem, (1,), generations, verdicts, id=position)


def seen(groups: Iterable[tuple[str, str, int]], *, step: int = 1) -> ProblemStats:
    """A history: (problem, source, right responses of G)."""
    stats = ProblemStats()
    stats.record(
        [group(Problem(name, "?", "!", source), correct) for name, source, correct in groups],
        step=step,
    )
    return stats


def selector(
    stats: ProblemStats,
    predict: str = "proportional",
    *,
    step: int = 2,
    weights: str = "none",
    **kw: int,
) -> ProblemSelector:
    options = {"group_size": G, "seed": 0} | kw
    return ProblemSelector(stats.history(), step=step, predict=predict, weights=weights, **options)


MIXED = seen(
    [(f"e{i}", "easy", 8 if i % 9 else 7) for i in range(40)]
    + [(f"h{i}", "hard", 0) for i in range(40)]
    + [(f"m{i}", "medium", 1 + i % 7) for i in range(40)]
)


def test_what_a_problem_has_shown_counts_half_after_the_half_life():
    stats = seen([("a", "s", 6)], step=3)
    prior = selector(stats, step=3).posterior(Problem("new", "?", "!", "s"))
    fresh = selector(stats, step=3).posterior(Problem("a", "?", "!", "s"))
    assert fresh == pytest.approx((prior.a + 6, prior.b + 2))
    later = selector(stats, step=3 + HALF_LIFE_STEPS).posterior(Problem("a", "?", "!", "s"))
    assert later == pytest.approx((prior.a + 3, prior.b + 1), rel=1e-6)
    stats.record([group(Problem("a", "?", "!", "s"), 1)], step=3 + HALF_LIFE_STEPS)
    history = stats.history()
    assert (history.correct[0], history.wrong[0]) == (6 / 2 + 1, 2 / 2 + 7)


def test_a_problem_never_seen_has_the_distribution_of_its_source_or_else_the_uniform_one():
    found = selector(MIXED)
    means = {
        s: found.posterior(Problem("new", "?", "!", s)) for s in ("easy", "hard", "medium", "other")
    }
    rates = {source: beta.a / sum(beta) for source, beta in means.items()}
    assert rates["easy"] > 0.95 > 0.55 > rates["medium"] > 0.45 > 0.05 > rates["hard"]
    assert means["other"] == Beta(1.0, 1.0)


@pytest.mark.parametrize("predict", MODES)
def test_problems_are_sampled_as_often_as_the_probability_says(predict: str):
    found = selector(MIXED, predict)
    for source in ("easy", "hard", "medium"):
        decisions = [found.decide(i, Problem("new", "?", "!", source)) for i in range(4000)]
        (probability,) = {each.probability for each in decisions}
        assert np.mean([each.is_sampled for each in decisions]) == pytest.approx(
            probability, abs=0.02
        )
        assert np.mean([each.is_calibration for each in decisions]) == pytest.approx(
            CALIBRATION_SHARE, abs=0.007
        )
        assert all(each.is_sampled for each in decisions if each.is_calibration)
    least = CALIBRATION_SHARE + (1 - CALIBRATION_SHARE) * FLOOR
    assert found.decide(0, Problem("new", "?", "!", "hard")).probability == pytest.approx(
        least, abs=0.06
    )
    assert found.decide(0, Problem("new", "?", "!", "medium")).probability > 0.8


def test_thin_asks_by_the_chance_and_thompson_by_that_of_a_sampled_success_rate():
    problem = Problem("new", "?", "!", "medium")
    posterior = selector(MIXED).posterior(problem)
    proportional, thompson = (selector(MIXED, predict).decide(0, problem) for predict in MODES)
    assert proportional.chance == thompson.chance == expected_chance(posterior, G)
    share = proportional.chance / largest_chance(G)
    assert proportional.probability == pytest.approx(
        CALIBRATION_SHARE + (1 - CALIBRATION_SHARE) * share
    )
    rates = np.random.Generator(np.random.Philox(key=3)).beta(*posterior, size=100_000)
    is_likely = [chance_at(p, G) >= largest_chance(G) / 2 for p in rates]
    assert thompson.probability == pytest.approx(
        CALIBRATION_SHARE + (1 - CALIBRATION_SHARE) * np.mean(is_likely), abs=0.005
    )


@pytest.mark.parametrize("predict", MODES)
def test_a_problem_without_a_chance_is_sampled_with_the_floor_and_the_calibration_sample(
    predict: str,
):
    hopeless = Problem("a", "?", "!", "s")
    stats = ProblemStats()
    stats.record([group(hopeless, 0)] * 100, step=1)
    decision = selector(stats, predict).decide(0, hopeless)
    assert decision.chance < FLOOR / 2
    assert decision.probability == 0.02 + 0.98 * 0.05


def test_a_selector_does_not_change_while_its_step_is_sampled():
    stats = seen([("a", "s", 6), ("b", "s", 3)])
    found = selector(stats)
    asked = [Problem(name, "?", "!", "s") for name in ("a", "b", "c")]
    before = [found.decide(i, problem) for i, problem in enumerate(asked)]
    stats.record([group(problem, 8) for problem in asked], step=2)
    assert [found.decide(i, problem) for i, problem in enumerate(asked)] == before
    assert [selector(stats, step=3).decide(i, problem) for i, problem in enumerate(asked)] != before


def test_a_history_from_the_disk_decides_as_the_one_that_was_written(tmp_path: Path):
    stats = seen([("a", "s\ud83d", 6), ("b", "", 3)], step=4)
    stats.record([group(Problem("a", "?", "!", "s\ud83d"), 1)], step=7)
    write_problem_stats(tmp_path / "stats", stats.table())
    copy = read_problem_stats(tmp_path / "stats")
    assert copy.table() == stats.table()
    problems = [
        Problem(name, "?", "!", source)
        for name, source in (("a", "s\ud83d"), ("n", "s\ud83d"), ("b", ""))
    ]
    for predict in MODES:
        ours, theirs = (selector(each, predict, step=9) for each in (stats, copy))
        assert [ours.decide(i, each) for i, each in enumerate(problems)] == [
            theirs.decide(i, each) for i, each in enumerate(problems)
        ]


# A synthetic policy: problem j is answered correctly with probability rates[j], the gradient of the
# log-probability of a right answer is (1 - rates[j]) directions[j], and that of a wrong one
# -rates[j] directions[j]. Most problems are almost always or almost never answered correctly, and
# what they teach differs.
EASY = 30
HARD = 30
USEFUL = 8


def synthetic() -> tuple[list[Problem], np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(key=11))
    rates = np.concatenate(
        [np.full(EASY, 0.97), np.full(HARD, 0.04), rng.uniform(0.3, 0.7, USEFUL)]
    )
    kinds = np.repeat(np.arange(3), [EASY, HARD, USEFUL])
    directions = np.eye(3)[kinds] + 0.1 * rng.normal(size=(len(rates), 3))
    return [Problem(str(j), "?", "!", "s") for j in range(len(rates))], rates, directions


def gradients_of(rate: float, direction: np.ndarray) -> np.ndarray:
    """`[G + 1, 3]` the mean of A_i grad log pi(response i) for each number of right responses, A as
    in Eq. 9.
    """
    found = np.zeros((G + 1, 3))
    for k in range(1, G):
        responses = np.repeat([1.0, 0.0], [k, G - k])
        advantages = group_advantages(torch.tensor(2 * responses - 1)).numpy()
        found[k] = np.mean(advantages * (responses - rate)) * direction
    return found


def uniform_gradient() -> np.ndarray:
    """What sampling every problem and keeping the informative groups (Eq. 11) gives in expectation,
    exactly.
    """
    total = np.zeros(3)
    kept = 0.0
    for _, rate, direction in zip(*synthetic(), strict=True):
        chances = np.array([comb(G, k) * rate**k * (1 - rate) ** (G - k) for k in range(G + 1)])
        total += chances @ gradients_of(rate, direction)
        kept += chances[1:G].sum()
    return total / kept


def sampled_gradients(predict: str, *, batches: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """`[n, 3]` the gradients of the groups that train, 50 in each batch, and `[n, 1]` their inverse
    weights.
    """
    problems, rates, directions = synthetic()
    stats = ProblemStats()
    rng = np.random.Generator(np.random.Philox(key=2))
    for step in (1, 2, 3):
        stats.record(map(group, problems, rng.binomial(G, rates).tolist()), step=step)
    by_count = [
        gradients_of(rate, direction) for rate, direction in zip(rates, directions, strict=True)
    ]
    found = selector(stats, predict, step=4, weights="inverse")
    stream = ProblemStream(problems, seed=1)
    gradients = []
    weights = []
    of_batches = sampler()
    for _ in range(batches):
        decisions: list[Decision] = []
        trained: dict[int, tuple[Group, np.ndarray]] = {}
        while len(trained) < 50:
            position, problem = stream.take()
            decisions.append(found.decide(position, problem))
            j = int(problem.id)
            if decisions[-1].is_sampled and 0 < (k := rng.binomial(G, rates[j])) < G:
                trained[position] = group(problem, k, position=position), by_count[j][k]
        scale = of_batches.weight_scale
        groups = [each for each, _ in trained.values()]
        of_batch = found.summarize(decisions, [], groups, scale=scale).weights
        of_batches.count_selection([(each.probability, each.chance) for each in decisions])
        gradients += [gradient for _, gradient in trained.values()]
        weights += [of_batch[i] for i in trained]
    return np.array(gradients), np.array(weights)[:, None]


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


@pytest.mark.parametrize("predict", MODES)
def test_with_inverse_weights_2000_groups_have_the_gradient_of_sampling_every_problem(predict: str):
    expected = uniform_gradient()
    plain, weights = sampled_gradients(predict)
    weighted = weights * plain
    assert len(weighted) == len(plain) == 2000
    assert cosine(weighted.mean(axis=0), expected) > 0.99
    assert cosine(plain.mean(axis=0), expected) < 0.98  # the bias without weights
    # the mean weight is 1 as far as predictions hold, and the gradient as long
    assert np.linalg.norm(weighted.mean(axis=0)) == pytest.approx(
        np.linalg.norm(expected), rel=0.25
    )
    # what it costs: the variance of one group's gradient
    assert 1 < weighted.var(axis=0).sum() / plain.var(axis=0).sum() < 10


@cache
def exactly_predicted(predict: str) -> tuple[list[Decision], list[Group], set[int]]:
    """A long stream of `synthetic` problems with exact predictions: decisions, groups that train,
    the useful ones.
    """
    problems, rates, _ = synthetic()
    chances = [chance_at(rate, G) for rate in rates]
    likely = [float(chance >= largest_chance(G) / 2) for chance in chances]
    shares = likely if predict == "thompson" else [chance / largest_chance(G) for chance in chances]
    q = [CALIBRATION_SHARE + (1 - CALIBRATION_SHARE) * max(FLOOR, share) for share in shares]
    rng = np.random.Generator(np.random.Philox(key=5))
    kinds = rng.permuted(np.tile(np.arange(len(rates)), (6000, 1)), axis=1).ravel()
    keeps = rng.random(len(kinds)) < np.array(q)[kinds] * np.array(chances)[kinds]
    decisions = [Decision(i, chances[j], q[j], True, False) for i, j in enumerate(kinds)]
    trained = [Group(problems[kinds[i]], (), (), (), id=int(i)) for i in np.flatnonzero(keeps)]
    return decisions, trained, {each.id for each in trained if kinds[each.id] >= EASY + HARD}


@pytest.mark.parametrize("predict", MODES)
@pytest.mark.parametrize("prompts", [1, 2, 4, 8, 16, 512])
def test_inverse_weights_are_unbiased_at_every_batch_size(predict: str, prompts: int):
    decisions, trained, useful = exactly_predicted(predict)
    chances = [chance_at(rate, G) for rate in synthetic()[1]]
    truth = sum(chances[EASY + HARD :]) / sum(chances)
    assert truth == pytest.approx(0.346, abs=0.002)
    found = selector(ProblemStats(), predict, weights="inverse")
    k = sampler()
    start = 0
    weights = {}
    for first in range(0, len(trained) - prompts + 1, prompts):
        groups = trained[first : first + prompts]
        of_batch = decisions[start : groups[-1].id + 1]
        weights |= found.summarize(of_batch, [], groups, scale=k.weight_scale).weights
        k.count_selection([(each.probability, each.chance) for each in of_batch])
        start = groups[-1].id + 1
    assert len(weights) > 50_000
    share = sum(weight for i, weight in weights.items() if i in useful) / sum(weights.values())
    assert share == pytest.approx(truth, abs=0.01)
    # the same draws with a K that cannot be biased
    constant = {i: 1 / decisions[i].probability for i in weights}
    assert share == pytest.approx(
        sum(constant[i] for i in weights if i in useful) / sum(constant.values()), abs=0.004
    )
    # and K keeps the gradient as long
    assert np.mean(list(weights.values())) == pytest.approx(1, abs=0.03)


# collecting a batch

FEW = [Problem(str(i), "?", "!", source=f"s{i % 5}") for i in range(400)]


def sampled(
    found: ProblemSelector | None,
    *,
    prompts: int = 6,
    bound: int = 60,
    delay: int = 0,
    step: int = 2,
) -> tuple[Batch, Sampling]:
    engine = ScriptedEngine(
        random_script, delay=lambda request: 1 + delay * (int(request.id.split("/")[1]) % 7)
    )
    stream = ProblemStream(FEW, seed=0)
    sampling = Sampling(
        stream, engine, FakeJudge(), sampler(prompts, bound), FakeEncoder(), plan(), selector=found
    )
    return collect(sampling, step=step), sampling


@pytest.fixture(scope="module")
def history() -> ProblemStats:
    """What a step without predictions has seen of the five sources."""
    stats, (batch, _) = ProblemStats(), sampled(None, prompts=40, bound=400, step=1)
    stats.record([group for group, _ in batch.decided], step=1)
    return stats


@pytest.mark.parametrize("predict", MODES)
@pytest.mark.parametrize("bound", [60, 8])
def test_every_problem_up_to_the_end_of_the_batch_is_skipped_or_decided(
    history: ProblemStats, predict: str, bound: int
):
    found = selector(history, predict, group_size=4, weights="inverse")
    batch, sampling = sampled(found, bound=bound)
    assert batch.prediction is not None
    assert batch.prediction.skipped > 0
    assert batch.prediction.skipped + len(batch.decided) == sampling.stream.position
    chances = [
        found.decide(i, sampling.stream.problem_at(i)) for i in range(sampling.stream.position)
    ]
    assert batch.prediction.skipped_chance == pytest.approx(
        sum(e.chance for e in chances if not e.is_sampled)
    )
    assert {e.position for e in chances if e.is_sampled} == {group.id for group, _ in batch.decided}
    assert batch.prediction.weights.keys() == {group.id for group in batch.groups}
    assert sum(batch.group_counts.values()) == len(batch.judged) + batch.group_counts["aborted"]
    assert bool(batch.shortfall) == (bound == 8)


def test_the_selection_does_not_depend_on_the_speed_of_the_engine(history: ProblemStats):
    batches = [
        sampled(selector(history, group_size=4, weights="inverse"), delay=delay)[0]
        for delay in (0, 1, 5)
    ]
    assert len({tuple(group.id for group, _ in batch.decided) for batch in batches}) == 1
    assert batches[0].prediction == batches[1].prediction == batches[2].prediction


def test_the_scale_of_weights_is_of_the_batches_before_and_survives_a_checkpoint(
    history: ProblemStats,
):
    """K = sum q chance / sum chance, each batch half as heavy after ten; at first q of an unknown
    problem.
    """
    found = selector(history, group_size=4, weights="inverse")
    unknown = selector(ProblemStats(), group_size=4).decide(0, FEW[0]).probability
    _, sampling = sampled(found)
    sampling.stream.rewind(0)
    sampling.sampler = sampler(6, 60)
    scale = unknown
    above = 0.0
    below = 0.0
    start = 0
    for step in range(2, 6):
        batch = collect(sampling, step=step)
        assert batch.prediction is not None
        decided = [
            found.decide(i, sampling.stream.problem_at(i))
            for i in range(start, sampling.stream.position)
        ]
        expected = {
            group.id: scale / decided[group.id - start].probability for group in batch.groups
        }
        assert batch.prediction.weights == pytest.approx(expected)
        above = above * 0.5**0.1 + sum(each.probability * each.chance for each in decided)
        below = below * 0.5**0.1 + sum(each.chance for each in decided)
        scale = above / below
        start = sampling.stream.position
        copy = sampler(6, 60)
        copy.load_state_dict(json.loads(json.dumps(sampling.sampler.state_dict())))
        assert copy.weight_scale == sampling.sampler.weight_scale == pytest.approx(scale)
        assert copy.state_dict() == sampling.sampler.state_dict()
    sampling.roll_back(finished_steps=4)
    # the failed step's decisions do not count
    assert sampling.sampler.weight_scale != copy.weight_scale
    old = sampling.sampler.state_dict()
    old.pop("selection")
    copy.load_state_dict(old)
    assert copy.weight_scale is None


def test_skipping_problems_without_a_signal_generates_fewer_groups_for_as_full_a_batch(
    history: ProblemStats,
):
    everything, _ = sampled(None, prompts=20, bound=400)
    for predict in MODES:
        thinned, _ = sampled(selector(history, predict, group_size=4), prompts=20, bound=400)
        assert len(thinned.groups) == len(everything.groups) == 20
        assert len(thinned.decided) < 0.8 * len(everything.decided)


def test_the_calibration_sample_shows_whether_predictions_hold(history: ProblemStats):
    found = selector(history, group_size=4)
    decisions = [found.decide(i, FEW[i % 400]) for i in range(4000)]
    judged = [
        group(FEW[i % 400], 1 + i % 2, size=2, position=i)
        for i in range(4000)
        if decisions[i].is_sampled
    ]
    calibration = found.summarize(decisions, judged, []).calibration
    expected = [each for each in decisions if each.is_calibration]
    assert [chance for chance, _ in calibration] == [each.chance for each in expected]
    assert [had_signal for _, had_signal in calibration] == [
        each.position % 2 == 0 for each in expected
    ]
    assert 40 < len(calibration) < 120


def test_a_prediction_is_the_same_after_a_round_trip_through_json():
    prediction = Prediction(3, 0.1 + 0.2, ((0.3, True), (1 / 3, False)), {7: 1 / 7, 12: 3.0})
    assert Prediction.of_state(json.loads(json.dumps(prediction.state()))) == prediction


def test_a_reward_that_gives_a_score_alone_is_refused_at_the_first_group(history: ProblemStats):
    scores = {**VERDICTS, str(RIGHT): Verdict(None, 0.5)}
    stream = ProblemStream(FEW, seed=0)
    found = selector(history, group_size=4)
    graded = Sampling(
        stream,
        ScriptedEngine(random_script),
        FakeJudge(scores),
        sampler(),
        FakeEncoder(),
        plan(),
        selector=found,
    )
    with pytest.raises(
        RewardError, match="predict=proportional needs a reward that decides correct or wrong"
    ):
        collect(graded, step=2)
