"""The selection of problems: posteriors from the history, keyed decisions, and metrics that add
up.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scripted_engine import ScriptedEngine
from dapo.algo.chance import Beta, chance_at, expected_chance, largest_chance
from dapo.core.errors import RewardError
from dapo.data.stream import ProblemStream
from dapo.sampling.batch import Sampling, collect
from dapo.sampling.problem_stats import (
    HALF_LIFE_STEPS,
    ProblemStats,
    read_problem_stats,
    write_problem_stats,
)
from dapo.sampling.queue import Batch
from dapo.sampling.selection import CALIBRATION_SHARE, FLOOR, Prediction, ProblemSelector
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


def selector(stats: ProblemStats, *, step: int = 2, group_size: int = G) -> ProblemSelector:
    return ProblemSelector(stats.history(), step=step, group_size=group_size, seed=0)


def probability(posterior: Beta) -> float:
    """q: how often a problem is sampled, from 100,000 success rates of its posterior."""
    rates = np.random.Generator(np.random.Philox(key=3)).beta(*posterior, size=100_000)
    is_likely = [chance_at(p, G) >= largest_chance(G) / 2 for p in rates]
    return CALIBRATION_SHARE + (1 - CALIBRATION_SHARE) * max(FLOOR, float(np.mean(is_likely)))


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


def test_problems_are_sampled_as_often_as_the_probability_says():
    found = selector(MIXED)
    rates = {}
    for source in ("easy", "hard", "medium"):
        problem = Problem("new", "?", "!", source)
        posterior = found.posterior(problem)
        decisions = [found.decide(i, problem) for i in range(4000)]
        assert {each.chance for each in decisions} == {expected_chance(posterior, G)}
        rates[source] = np.mean([each.is_sampled for each in decisions])
        assert rates[source] == pytest.approx(probability(posterior), abs=0.02)
        assert np.mean([each.is_calibration for each in decisions]) == pytest.approx(
            CALIBRATION_SHARE, abs=0.007
        )
        assert all(each.is_sampled for each in decisions if each.is_calibration)
    least = CALIBRATION_SHARE + (1 - CALIBRATION_SHARE) * FLOOR
    assert rates["hard"] == pytest.approx(least, abs=0.06)
    assert rates["medium"] > 0.8


def test_a_problem_without_a_chance_is_sampled_with_the_floor_and_the_calibration_sample():
    hopeless = Problem("a", "?", "!", "s")
    stats = ProblemStats()
    stats.record([group(hopeless, 0)] * 100, step=1)
    found = selector(stats)
    assert found.decide(0, hopeless).chance < FLOOR / 2
    sampled_fraction = np.mean([found.decide(i, hopeless).is_sampled for i in range(20_000)])
    assert sampled_fraction == pytest.approx(0.02 + 0.98 * 0.05, abs=0.006)


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
    ours, theirs = (selector(each, step=9) for each in (stats, copy))
    assert [ours.decide(i, each) for i, each in enumerate(problems)] == [
        theirs.decide(i, each) for i, each in enumerate(problems)
    ]


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
    sampling = Sampling(stream, engine, FakeJudge(), sampler(prompts, bound), FakeEncoder(), plan())
    return collect(sampling, step=step, selector=found), sampling


@pytest.fixture(scope="module")
def history() -> ProblemStats:
    """What a step without predictions has seen of the five sources."""
    stats, (batch, _) = ProblemStats(), sampled(None, prompts=40, bound=400, step=1)
    stats.record([group for group, _ in batch.decided], step=1)
    return stats


@pytest.mark.parametrize("bound", [60, 8])
def test_every_problem_up_to_the_end_of_the_batch_is_skipped_or_decided(
    history: ProblemStats, bound: int
):
    found = selector(history, group_size=4)
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
    assert sum(batch.group_counts.values()) == len(batch.judged) + batch.group_counts["aborted"]
    assert bool(batch.shortfall) == (bound == 8)


def test_the_selection_does_not_depend_on_the_speed_of_the_engine(history: ProblemStats):
    batches = [sampled(selector(history, group_size=4), delay=delay)[0] for delay in (0, 1, 5)]
    assert len({tuple(group.id for group, _ in batch.decided) for batch in batches}) == 1
    assert batches[0].prediction == batches[1].prediction == batches[2].prediction


def test_skipping_problems_without_a_signal_generates_fewer_groups_for_as_full_a_batch(
    history: ProblemStats,
):
    everything, _ = sampled(None, prompts=20, bound=400)
    thinned, _ = sampled(selector(history, group_size=4), prompts=20, bound=400)
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
    calibration = found.summarize(decisions, judged).calibration
    expected = [each for each in decisions if each.is_calibration]
    assert [chance for chance, _ in calibration] == [each.chance for each in expected]
    assert [had_signal for _, had_signal in calibration] == [
        each.position % 2 == 0 for each in expected
    ]
    assert 40 < len(calibration) < 120


def test_a_prediction_is_the_same_after_a_round_trip_through_json():
    prediction = Prediction(3, 0.1 + 0.2, ((0.3, True), (1 / 3, False)))
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
    )
    with pytest.raises(
        RewardError, match="predict=true needs a reward that decides correct or wrong"
    ):
        collect(graded, step=2, selector=found)
