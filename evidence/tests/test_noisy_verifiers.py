"""The verifiers that err on purpose: keyed, at the rate that they state, and never in an
evaluation.
"""

from math import sqrt
from statistics import fmean, stdev

import pytest

from dapo.config import load_config
from dapo.core.errors import RewardError
from dapo.data.problems import load_problems
from dapo.rewards.combine import build_verifier
from dapo.types import Problem
from evidence.rewards import TRUE_VERDICT, FlippedVerdicts, NoisyGrades, quality
from helpers.paths import ROOT

SPEC = {"builtin": {"sums": {"terms": 5, "high": 12}, "sort_digits": {"count": 6}}, "size": 400}
TRAIN = load_problems(SPEC, split="train")
HELD_OUT = load_problems(SPEC, split="eval")


def responses(problem: Problem) -> list[str]:
    """Ten responses to a problem, of which four are right."""
    return [
        f"Case {i}.\nAnswer: {problem.answer if i < 4 else f'{i}{problem.answer}'}"
        for i in range(10)
    ]


PAIRS = [
    (problem, response)
    for problem in {p.id: p for p in TRAIN}.values()
    for response in responses(problem)
]


def flips(verifier: FlippedVerdicts, pairs: list[tuple[Problem, str]]) -> list[bool]:
    return [verifier(*pair).correct is not TRUE_VERDICT(*pair).correct for pair in pairs]


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_verdicts_are_flipped_at_the_stated_rate_right_and_wrong_alike(rate: float):
    flipped = flips(FlippedVerdicts(rate), PAIRS)
    right = [flip for flip, pair in zip(flipped, PAIRS, strict=True) if TRUE_VERDICT(*pair).correct]
    assert (len(flipped), len(right)) == (len(PAIRS), 0.4 * len(PAIRS))
    for found in (flipped, right):
        assert abs(fmean(found) - rate) < 3 * sqrt(rate * (1 - rate) / len(found))
    scores = {
        (verdict.correct, verdict.score)
        for verdict in (FlippedVerdicts(rate)(*pair) for pair in PAIRS)
    }
    assert scores == {(True, 1.0), (False, -1.0)}


def test_a_flip_is_a_function_of_seed_problem_and_response_alone():
    first = flips(FlippedVerdicts(0.2, seed=1), PAIRS)
    assert flips(FlippedVerdicts(0.2, seed=1), PAIRS[::-1])[::-1] == first
    other = flips(FlippedVerdicts(0.2, seed=2), PAIRS)
    both = fmean(a and b for a, b in zip(first, other, strict=True))
    assert abs(both - 0.04) < 0.01, "seeds flip independently of each other"
    more = flips(FlippedVerdicts(0.4, seed=1), PAIRS)
    assert all(flip for flip, was in zip(more, first, strict=True) if was), (
        "a higher rate flips the same ones and more"
    )


def test_grades_are_quality_plus_noise_of_the_stated_size_and_decide_nothing():
    judge = NoisyGrades(0.25, seed=3)
    verdicts = [judge(*pair) for pair in PAIRS]
    assert {verdict.correct for verdict in verdicts} == {None}
    assert verdicts == [judge(*pair) for pair in PAIRS]
    noise = [
        verdict.score - NoisyGrades(0.0)(*pair).score
        for verdict, pair in zip(verdicts, PAIRS, strict=True)
    ]
    assert abs(fmean(noise)) < 3 * 0.25 / sqrt(len(noise))
    assert stdev(noise) == pytest.approx(0.25, rel=0.05)
    assert sorted(noise)[len(noise) // 40] == pytest.approx(-1.96 * 0.25, rel=0.1), "Gaussian"


def test_the_quality_of_a_wrong_answer_is_its_share_of_right_digits():
    assert (quality("42", "142"), quality("142", "42"), quality("143", "142")) == (
        2 / 3,
        2 / 3,
        2 / 3,
    )
    assert (quality("1 2 3", "1 2 4"), quality("1 2 3", "4 5 6")) == (2 / 3, 0)
    assert (quality("", "7"), quality("7", ""), quality("", ""), quality("8", "7")) == (0, 0, 0, 0)
    problem = next(problem for problem in TRAIN if len(problem.answer) == 2)
    texts = (f"Answer: {problem.answer}", f"Answer: 1{problem.answer}", "I do not know.")
    assert [NoisyGrades(0.0)(problem, text).score for text in texts] == [1.0, 2 / 3, 0.0]


@pytest.mark.parametrize("verifier", [FlippedVerdicts(1.0), NoisyGrades(5.0)])
def test_held_out_questions_get_the_true_verdict(verifier: FlippedVerdicts | NoisyGrades):
    pairs = [(problem, response) for problem in HELD_OUT for response in responses(problem)]
    assert len(pairs) > 1000
    assert [verifier(*pair) for pair in pairs] == [TRUE_VERDICT(*pair) for pair in pairs]
    assert all(verifier(*pair) != TRUE_VERDICT(*pair) for pair in PAIRS)


def test_the_true_verdict_is_that_of_the_base_configuration():
    reward = load_config(ROOT / "evidence" / "base.yaml").reward
    assert (reward.verifier, reward.options) == ("exact", {"extract": TRUE_VERDICT.extract})


def test_they_are_verifiers_by_name_that_refuse_options_and_problems_that_make_no_sense():
    judge = build_verifier("evidence.rewards:FlippedVerdicts", options={"rate": 1.0, "seed": 4})
    problem = TRAIN[0]
    (verdict,) = judge.judge_group(problem, [f"Answer: {problem.answer}"], [()])
    assert (verdict.correct, verdict.score) == (False, -1.0)
    for name, options in (
        ("FlippedVerdicts", {"rate": 1.5}),
        ("NoisyGrades", {"noise": -0.1}),
        ("NoisyGrades", {}),
    ):
        with pytest.raises(
            RewardError,
            match=r"rate must be from 0 to 1|noise must be at least 0|missing .*'noise'",
        ):
            build_verifier(f"evidence.rewards:{name}", options=options)
    elsewhere = Problem("1", "Q", "7", source="mine")
    (verdict,) = judge.judge_group(elsewhere, ["Answer: 7"], [()])
    assert verdict.error is not None
    assert "only builtin: problems say which are held out" in verdict.error
