"""Evaluation: estimates, intervals, and what does not count."""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import combinations

import pytest

from dapo.engines.scripted import ScriptedEngine
from dapo.evaluation import Evaluation, EvaluationPlan, evaluate, mean_interval, pass_at_k
from dapo.types import GenerationRequest, Problem, Verdict


class Digits:
    def encode(self, problem: Problem) -> tuple[int, ...]:
        return (int(problem.id),)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(str, ids))

    decode_prompt = decode


class FirstDigit:
    """1 is right, 0 is wrong, 3 is an error, 5 is a grade of a half."""

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        verdicts = {
            "1": Verdict(True, 1.0),
            "0": Verdict(False, -1.0),
            "3": Verdict(None, 0.0, "timed out after 1 s"),
            "5": Verdict(None, 0.5),
        }
        future: Future[tuple[Verdict, ...]] = Future()
        future.set_result(tuple(verdicts[text[0]] for text in responses))
        return future


def evaluated(marks: dict[int, str], *, length: int = 1, **engine: int) -> Evaluation:
    """`marks[problem]` holds one digit a sample."""
    k = len(next(iter(marks.values())))

    def script(request: GenerationRequest) -> tuple[list[int], str]:
        sample = int(request.id.split("/")[-1])
        return [int(marks[request.prompt_ids[0]][sample])] + [7] * (length - 1), "stop"

    plan = EvaluationPlan("toy", k, 1.0, 0.7, 20, (9,), 0)
    problems = [Problem(str(number), "?", "!", source="even" if number % 2 == 0 else "odd") for number in marks]
    return evaluate(ScriptedEngine(script, **engine), FirstDigit(), Digits(), problems, plan)


def test_avg_at_k_is_the_mean_over_problems_of_the_share_correct():
    summary = evaluated({0: "1100", 1: "0000", 2: "1111", 3: "1000"}).summary()
    assert summary["accuracy"] == pytest.approx((0.5 + 0 + 1 + 0.25) / 4)
    assert summary["by_source"]["even"] == {"accuracy": 0.75, "problems": 2}
    assert (summary["problems"], summary["samples_per_problem"]) == (4, 4)
    assert 0 <= summary["low"] < summary["accuracy"] < summary["high"] <= 1


def test_pass_at_k_is_the_unbiased_estimate():
    assert pass_at_k(32, 1, 32) == 1.0  # a bootstrap with replacement would say 0.64
    assert pass_at_k(32, 1, 1) == pytest.approx(1 / 32)
    assert pass_at_k(10, 0, 5) == 0.0
    for correct in range(6):  # over all ways to choose k of five
        marks = [True] * correct + [False] * (5 - correct)
        for k in range(1, 6):
            chosen = [any(some) for some in combinations(marks, k)]
            assert pass_at_k(5, correct, k) == pytest.approx(sum(chosen) / len(chosen))
    with pytest.raises(ValueError, match=r"pass@k needs"):
        pass_at_k(4, 1, 5)


def test_pass_at_powers_of_two_are_reported_up_to_k():
    summary = evaluated({0: "1000", 1: "0000"}).summary()
    assert [summary[f"pass@{j}"] for j in (1, 2, 4)] == pytest.approx([0.125, 0.25, 0.5])


def test_the_overlong_penalty_and_errors_play_no_part_in_the_accuracy():
    longest = evaluated({0: "11", 1: "13"}, length=20).summary()
    assert longest["accuracy"] == 1.0
    assert longest["verifier_errors"] == 1
    assert longest["most_frequent_error"] == "timed out after 1 s"


def test_graded_verdicts_average_their_scores_and_have_no_pass_at_k():
    summary = evaluated({0: "55"}).summary()
    assert summary["accuracy"] == 0.5
    assert not summary["binary"]
    assert "pass@1" not in summary


def test_the_result_does_not_depend_on_the_engines_order():
    marks = {number: f"{number % 2}{(number + 1) % 2}0" for number in range(20)}
    assert evaluated(marks, slots=1).summary() == evaluated(marks, slots=64).summary()


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    from dapo.keyed import keyed_uniforms

    truth, covered = 0.3, 0
    for trial in range(200):
        sample = [float(u < truth) for u in keyed_uniforms(trial, 80)]
        low, high = mean_interval(sample)
        covered += low <= truth <= high
    assert 180 <= covered <= 199  # 95 % of 200 is 190, standard deviation 3.1


def test_an_interval_of_equal_marks_has_a_width_and_none_of_nothing():
    assert mean_interval([1.0] * 20) == pytest.approx((0.8389, 1.0), abs=1e-3)  # Wilson
    assert mean_interval([0.0] * 20) == pytest.approx((0.0, 0.1611), abs=1e-3)
    assert mean_interval([]) == (0.0, 1.0)
