"""Evaluation: estimates, and what does not count."""

import json
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scripted_engine import ScriptedEngine
from dapo.config import RewardConfig, build_config
from dapo.config.data_spec import parse_spec
from dapo.core.errors import ConfigError, DataError
from dapo.core.journal import Journal, open_journal
from dapo.data.problems import load_problems
from dapo.evaluation.evaluate import EngineSampler, evaluate
from dapo.evaluation.pairing import paired_difference
from dapo.evaluation.scores import (
    Beginning,
    Evaluation,
    EvaluationPlan,
    JudgedProblem,
    JudgedResponse,
    pass_at_k,
    require_summary,
)
from dapo.start.evaluate import (
    EvalRequest,
    _settings,
    _width_note,
    evaluate_model,
    evaluation_config,
    evaluation_data,
)
from dapo.start.rows import distinct
from dapo.types import GenerationRequest, Problem, Verdict
from helpers.fake_rollout import FakeEncoder, FakeJudge
from helpers.paths import SHARED_DATA
from helpers.released import aime_parquet

AIME = SHARED_DATA / "aime-2024.parquet"


VERDICTS = {
    "1": Verdict(True, 1.0),
    "0": Verdict(False, -1.0),
    "3": Verdict(None, 0.0, "timed out after 1 s"),
    "5": Verdict(None, 0.5),
}


def evaluated(
    marks: dict[int, str],
    *,
    length: int = 1,
    until_width: float | None = None,
    seed: int = 0,
    **engine: Any,
) -> Evaluation:
    """`marks[problem]` holds one digit a sample."""
    k = len(next(iter(marks.values())))

    def script(request: GenerationRequest) -> tuple[list[int], str]:
        sample = int(request.id.split("/")[-1])
        return [int(marks[request.prompt_ids[0]][sample])] + [7] * (length - 1), "stop"

    plan = EvaluationPlan("toy", k, 1.0, 0.7, 20, (9,), seed)
    problems = [
        Problem(str(number), "?", "!", source="even" if number % 2 == 0 else "odd")
        for number in marks
    ]
    return evaluate(
        EngineSampler(ScriptedEngine(script, **engine), FakeEncoder(), plan),
        FakeJudge(VERDICTS),
        problems,
        until_width=until_width,
    )


def test_avg_at_k_is_the_mean_over_problems_of_the_share_correct():
    summary = evaluated({0: "1100", 1: "0000", 2: "1111", 3: "1000"}).summary()
    assert summary["accuracy"] == pytest.approx((0.5 + 0 + 1 + 0.25) / 4)
    assert summary["by_source"]["even"] == {"accuracy": 0.75, "problems": 2}
    assert (summary["problems"], summary["samples_per_problem"]) == (4, 4)
    assert 0 <= summary["low"] < summary["accuracy"] < summary["high"] <= 1


def test_a_source_with_the_name_of_the_data_leaves_the_accuracy_of_all_problems():
    evaluation = evaluated({0: "1100", 1: "0000", 2: "1111", 3: "1000"})
    named = replace(evaluation, plan=replace(evaluation.plan, name="even"))
    metrics = named.metrics()
    assert metrics["eval/even/accuracy"] == named.summary()["accuracy"]
    assert metrics["eval/odd/accuracy"] == 0.125


def test_an_interrupted_evaluation_goes_on_in_the_same_environment_alone():
    raw: dict[str, Any] = {"model": "none", "data": {"train": "builtin:sums"}}
    plan = EvaluationPlan("toy", 1, 1.0, 1.0, 8, (), 0)
    assert "environment" not in _settings(build_config(raw), plan, [])
    raw["environment"] = "calculator"
    four, eight = (
        _settings(build_config(raw, [f"environment.max_turns={turns}"]), plan, [])
        for turns in (4, 8)
    )
    assert four["environment"]["max_turns"] == 4
    assert four != eight


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


@pytest.mark.parametrize("length", [1, 15, 20, 25])
def test_scores_are_the_verifiers_own_whatever_the_length_of_the_response(length: int):
    """The overlong penalty would take up to 1 from the longest: before the limit of 20 tokens, at
    it, and truncated.
    """
    binary = evaluated({0: "1100"}, length=length)
    graded = evaluated({0: "55"}, length=length)
    assert [response.score for response in binary.problems[0].responses] == [1.0, 1.0, -1.0, -1.0]
    assert [response.score for response in graded.problems[0].responses] == [0.5, 0.5]
    assert (binary.summary()["accuracy"], graded.summary()["accuracy"]) == (0.5, 0.5)
    finishes = {(response.tokens, response.finish) for response in binary.problems[0].responses}
    assert finishes == {(min(length, 20), "stop" if length < 20 else "length")}


def test_errors_play_no_part_in_the_accuracy():
    summary = evaluated({0: "11", 1: "13"}).summary()
    assert summary["accuracy"] == 1.0
    assert summary["verifier_errors"] == 1
    assert summary["most_frequent_error"] == "timed out after 1 s"


def test_graded_verdicts_average_their_scores_and_have_no_pass_at_k():
    summary = evaluated({0: "55"}).summary()
    assert summary["accuracy"] == 0.5
    assert not summary["binary"]
    assert "pass@1" not in summary


def test_graded_scores_that_do_not_vary_have_no_interval_and_say_so():
    one = evaluated({0: "55"})
    equal = evaluated({0: "55", 1: "55", 2: "55"})
    for evaluation in (one, equal):
        summary = evaluation.summary()
        assert (summary["low"], summary["high"]) == (None, None)
        assert summary["interval_note"].startswith(
            "no interval: fewer than two problems, or all of them with the same"
        )
        assert not {"eval/toy/low", "eval/toy/high"} & evaluation.metrics().keys()
        json.dumps(summary, allow_nan=False)
    assert evaluated({0: "11"}).summary()["interval_note"] is None


def test_every_pass_at_j_is_a_mean_over_the_same_problems_those_with_k_verdicts():
    summary = evaluated({0: "0000", 1: "1113", 2: "1000"}).summary()  # "3" is an error
    assert [summary[f"pass@{j}"] for j in (1, 2, 4)] == pytest.approx([0.125, 0.25, 0.5])
    assert (summary["problems"], summary["complete_problems"]) == (3, 2)
    assert summary["accuracy"] == pytest.approx((0 + 1 + 0.25) / 3)
    nothing_complete = evaluated({0: "0003", 1: "1113"}).summary()
    assert not [name for name in nothing_complete if name.startswith("pass@")]
    assert nothing_complete["complete_problems"] == 0


@settings(max_examples=60)
@given(marks=st.lists(st.text("013", min_size=4, max_size=4), min_size=1, max_size=6))
def test_pass_at_j_grows_with_j_whatever_is_right_wrong_or_an_error(marks: list[str]):
    summary = evaluated(dict(enumerate(marks))).summary()
    found = [summary[f"pass@{j}"] for j in (1, 2, 4) if f"pass@{j}" in summary]
    assert found == sorted(found)
    assert len(found) in (0, 3)


def test_the_result_does_not_depend_on_the_engines_order():
    marks = {number: f"{number % 2}{(number + 1) % 2}0" for number in range(20)}
    assert evaluated(marks, slots=1).summary() == evaluated(marks, slots=64).summary()
    last_first = evaluated(marks, delay=lambda request: 9 - int(request.id.split("/")[-1]))
    assert last_first.table() == evaluated(marks).table(), (
        "each response stands at the index of its sample"
    )


def judged(*answers: str, right: Collection[str] = ("4",)) -> JudgedProblem:
    """A response for each answer; those called `right` are; "!" is an error."""
    responses = [
        (
            JudgedResponse("", None, 0.0, "timed out", None, 1, "stop")
            if answer == "!"
            else JudgedResponse(
                "", answer in right, 1.0 if answer in right else -1.0, None, answer, 1, "stop"
            )
        )
        for answer in answers
    ]
    return JudgedProblem(Problem("p", "?", "4"), tuple(responses))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("4", "4", "5"), 1.0),
        (("5", "4", "5"), 0.0),
        (("4", "5"), 0.5),  # a tie counts as the share that is right
        (("4", "5", "6"), 1 / 3),
        (("", "", "", "4"), 1.0),  # who finds no answer does not vote
        (("", ""), 0.0),
        (("!", "!", "4", "5", "4"), 1.0),
    ],
)
def test_consensus_is_whether_the_most_frequent_answer_is_right(
    answers: tuple[str, ...], expected: float
):
    assert judged(*answers).consensus == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # four right ones against two equal wrong ones
        (("36", "36 km", "x=36", r"36\%", "35", "35"), 1.0),
        (("36", "36 km", "35", "35"), 0.5),
        (("36", "36 km", "35", "35", "35"), 0.0),
        (("36", "36 km", "35", "35", "34", "34"), 1 / 3),
        (("36", "1", "2", "3", "36 km"), 1.0),  # wrong answers do not add up
    ],
)
def test_right_answers_are_one_vote_however_they_are_written(
    answers: tuple[str, ...], expected: float
):
    right = {"36", "36 km", "x=36", r"36\%"}
    assert judged(*answers, right=right).consensus == pytest.approx(expected)


def test_a_right_response_votes_even_where_no_answer_was_extracted_and_a_wrong_one_does_not():
    right = [JudgedResponse("", True, 1.0, None, answer, 1, "stop") for answer in ("", None)]
    wrong = [
        JudgedResponse("", False, -1.0, None, answer, 1, "stop") for answer in ("", None, "", "7")
    ]
    assert JudgedProblem(Problem("p", "?", "4"), (*right, *wrong)).consensus == 1.0


def test_consensus_and_pass_at_j_have_intervals_over_problems():
    plan = EvaluationPlan("toy", 3, 1.0, 0.7, 20, (9,), 0)
    problems = [
        judged("4", "4", "5"),
        judged("5", "5", "4"),
        judged("4", "4", "4"),
        judged("5", "", "5"),
    ]
    summary = Evaluation(plan, tuple(problems)).summary()
    assert summary["cons@3"] == 0.5
    assert summary["pass@1"] == pytest.approx((2 / 3 + 1 / 3 + 1 + 0) / 4)
    assert summary["pass@2"] == pytest.approx((1 + 2 / 3 + 1 + 0) / 4)
    assert summary["no_answer_fraction"] == pytest.approx(1 / 12)
    for name in ("pass@1", "pass@2", "cons@3"):
        low, high = summary["intervals"][name]
        assert 0 <= low < summary[name] < high <= 1


def test_more_than_one_percent_of_errors_is_noted_and_one_percent_is_not():
    plan = EvaluationPlan("toy", 10, 1.0, 0.7, 20, (9,), 0)
    without_errors = [judged(*["4"] * 10) for _ in range(9)]
    one = judged(*"4" * 9, "!")
    two = judged(*"4" * 8, "!", "!")
    assert Evaluation(plan, (*without_errors, one)).summary()["warning"] is None
    warning = Evaluation(plan, (*without_errors, two)).summary()["warning"]
    assert warning == "2 of 100 responses have no verdict (2.0%): metrics of the others only"


def scored(*accuracies: float | None, **settings: Any) -> dict[str, Any]:
    """A stored evaluation with these accuracies of its problems."""
    settings = {
        "name": "toy",
        "temperature": 1.0,
        "top_p": 0.7,
        "max_response_tokens": 20,
        "binary": True,
    } | settings
    settings = RewardConfig(verifier="math").judging | settings
    rows = [{"id": str(i), "accuracy": accuracy} for i, accuracy in enumerate(accuracies)]
    return {**settings, "seed": settings.get("seed", 0), "samples_per_problem": 4, "table": rows}


def test_a_paired_difference_is_narrower_than_the_spread_of_the_problems():
    hard_and_easy = [i % 2 for i in range(40)]
    first = scored(*(0.8 * easy for easy in hard_and_easy))
    second = scored(*(0.8 * easy + 0.05 * (1 + i % 3) for i, easy in enumerate(hard_and_easy)))
    found = paired_difference(first, second | {"table": second["table"][::-1]})
    assert found["difference"] == pytest.approx(0.09875)
    # the differences deviate by 0.041, the accuracies by 0.4
    assert 0.02 < found["high"] - found["low"] < 0.03
    assert found["low"] < 0.09875 < found["high"]
    assert (found["better"], found["worse"], found["equal"]) == (40, 0, 0)


def test_a_difference_that_does_not_vary_has_a_wide_interval_or_none():
    third = paired_difference(scored(0.5, 0.5, 0.5), scored(0.53125, 0.53125, 0.53125))
    assert third["difference"] == 0.03125
    assert third["low"] < -0.5 < 0.5 < third["high"]
    scores = paired_difference(scored(2.5, 7.0, binary=False), scored(3.0, 7.5, binary=False))
    assert (scores["difference"], scores["low"], scores["high"]) == (0.5, None, None)


def test_a_problem_without_a_judgement_on_either_side_is_no_pair():
    found = paired_difference(scored(1.0, None, 0.0), scored(0.0, 1.0, 1.0))
    assert (found["problems"], found["difference"]) == (2, 0.0)
    nothing = paired_difference(scored(None, 1.0), scored(0.0, None))
    assert (nothing["problems"], nothing["difference"], nothing["low"], nothing["high"]) == (
        0,
        None,
        None,
        None,
    )
    with pytest.raises(DataError, match="1 problems are only in one of them"):
        paired_difference(scored(1.0), scored(1.0, 0.0))


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("name", "aime"),
        ("temperature", 0.1),
        ("top_p", 1.0),
        ("max_response_tokens", 8),
        ("binary", False),
        ("verifier", "exact"),
        ("threshold", 0.5),
    ],
)
def test_evaluations_with_another_setting_are_never_paired(setting: str, other: Any):
    with pytest.raises(DataError, match=f"^{setting} is .* in one and {other} in the other$"):
        paired_difference(scored(1.0, 0.0), scored(1.0, 0.0, **{setting: other}))


def test_other_options_of_a_verifier_judge_otherwise_and_an_unknown_verifier_is_paired():
    first = scored(1.0, 0.0, verifier="exact", verifier_options={"extract": "final"})
    with pytest.raises(
        DataError, match=r"^verifier_options is {'extract': 'final'} in one and {} in the other$"
    ):
        paired_difference(first, scored(1.0, 0.0, verifier="exact"))
    credited = scored(1.0, verifier="gsm8k", verifier_options={"partial_credit": True})
    flexible = scored(1.0, verifier="gsm8k", verifier_options={"flexible": True})
    assert paired_difference(credited, scored(1.0, verifier="gsm8k"))["equal"] == 1
    with pytest.raises(DataError, match=r"^verifier_options is "):
        paired_difference(credited, flexible)
    unknown = {name: value for name, value in first.items() if name not in RewardConfig().judging}
    assert (
        paired_difference(unknown, first)["equal"]
        == paired_difference(first, unknown)["equal"]
        == 2
    )


def test_an_evaluation_without_any_verdict_has_no_accuracy_and_says_so():
    evaluation = evaluated({0: "33", 1: "33"})
    summary = evaluation.summary()
    assert [summary[name] for name in ("accuracy", "low", "high", "verifier_errors")] == [
        None,
        None,
        None,
        4,
    ]
    assert summary["interval_note"] == "nothing judged: no response has a verdict"
    assert evaluation.metrics() == {
        "eval/toy/response_tokens_mean": 1.0,
        "eval/toy/truncated_fraction": 0.0,
    }
    older = summary | {
        "accuracy": 0.0,
        "low": 0.0,
        "high": 1.0,
        "interval_note": None,
        "table": evaluation.table(),
    }
    assert require_summary(older, "a file") == summary | {"table": evaluation.table()}


def test_another_seed_is_paired_and_said():
    difference = paired_difference(scored(1.0, 0.0), scored(1.0, 0.0, seed=1))
    assert difference["equal"] == 2
    assert difference["note"].startswith("their seeds are 0 and 1")
    assert paired_difference(scored(1.0, 0.0), scored(1.0, 0.0))["note"] is None


def slow_if_right(request: GenerationRequest) -> int:
    return 15 if request.prompt_ids[0] % 4 == 0 else 1


def test_an_evaluation_ends_at_the_width_of_its_interval_whatever_finishes_first():
    """A quarter is right, and takes longest: what has finished first would be wrong."""
    marks = {number: "1" if number % 4 == 0 else "0" for number in range(400)}
    accuracies = []
    for seed in range(20):
        ended = evaluated(marks, until_width=16, seed=seed, slots=40, delay=slow_if_right)
        summary = ended.summary()
        assert 100 * (summary["high"] - summary["low"]) <= 16
        assert summary["problems"] < summary["all_problems"] == 400
        # 1.96 deviations on both sides of a quarter are 16 points at 113 problems
        assert 80 < summary["problems"] < 150
        accuracies.append(summary["accuracy"])
    assert sum(accuracies) / 20 == pytest.approx(0.25, abs=0.03)
    assert evaluated(marks, until_width=16, slots=1, seed=19).table() == ended.table()


def test_all_problems_count_where_the_interval_stays_wider():
    marks = dict.fromkeys(range(40), "10") | {40: "11", 41: "00"}
    ended = evaluated(marks, until_width=0.5).summary()
    assert ended == evaluated(marks).summary()
    assert (ended["problems"], "until_width" in ended) == (42, False)


def test_results_that_ended_apart_are_paired_on_what_both_have():
    marks = {number: "1" if number % 4 == 0 else "0" for number in range(400)}
    results = []
    for width in (16, 12):
        ended = evaluated(marks, until_width=width)
        results.append({**ended.summary(), "table": ended.table()})
    assert results[0]["problems"] < results[1]["problems"]
    for pair in (results, results[::-1]):
        difference = paired_difference(*pair)
        assert difference["problems"] == results[0]["problems"]
    whole = evaluated({number: marks[number] for number in range(300)})
    with pytest.raises(DataError, match="only in one of them"):
        paired_difference(results[0], {**whole.summary(), "table": whole.table()})


class EvaluationKilled(Exception):
    pass


def test_an_evaluation_that_was_killed_continues_where_it_was(tmp_path: Path):
    """Breaks after some problems; the second attempt samples only the others, and the result is the
    same.
    """
    plan = EvaluationPlan("toy", 2, 1.0, 0.7, 20, (9,), 0)
    problems = [Problem(str(number), "?", "!") for number in range(6)]
    asked: list[int] = []

    def script(request: GenerationRequest) -> tuple[list[int], str]:
        asked.append(request.prompt_ids[0])
        return [int(request.id[-1])], "stop"

    def run(journal: Journal | None, limit: int = 99) -> Evaluation:
        def stop_at(done: int, total: int, estimate: str) -> None:
            if done == limit:
                raise EvaluationKilled

        sampler = EngineSampler(ScriptedEngine(script, slots=2), FakeEncoder(), plan)
        return evaluate(
            sampler, FakeJudge(VERDICTS), problems, journal=journal, on_progress=stop_at
        )

    uninterrupted = run(None).summary()
    path = tmp_path / "out.json.partial"
    with pytest.raises(EvaluationKilled), open_journal(path, {"plan": 1}) as journal:
        run(journal, limit=3)
    with path.open("a") as file:
        file.write('{"id": "5", "respo')  # killed in the middle of a line
    asked.clear()
    with open_journal(path, {"plan": 1}) as journal:
        assert run(journal).summary() == uninterrupted
    assert sorted(set(asked)) == [3, 4, 5]
    asked.clear()
    with open_journal(path, {"plan": 1}) as journal:
        assert run(journal).summary() == uninterrupted
    assert asked == []
    with pytest.raises(DataError, match="plan was 1 and is now 2"), open_journal(path, {"plan": 2}):
        pass


def test_rows_in_the_form_of_aime_are_three_problems_of_four_samples(tmp_path):
    source = parse_spec(str(aime_parquet(tmp_path)))
    problems, copies = distinct(load_problems(source, split="eval"), source)
    assert (len(problems), copies) == (3, 4)
    assert distinct(load_problems(source, split="eval")[:-1], source)[1] == 1  # not as many of all


@pytest.mark.skipif(
    not AIME.exists(), reason="needs the released evaluation file beside the checkout"
)
def test_the_released_aime_file_is_thirty_problems_of_thirty_two_samples():
    source = parse_spec(str(AIME))
    problems, copies = distinct(load_problems(source, split="eval"), source)
    assert (len(problems), copies) == (30, 32)
    assert distinct(load_problems(source, split="eval")[:-1], source)[1] == 1  # not as many of all


def test_another_model_does_not_inherit_the_trust_that_a_run_has():
    base = build_config(
        {
            "model": {"name": "a", "dtype": "float64", "trust_remote_code": True},
            "data": {"train": "builtin:sums"},
        }
    ).model_dump(mode="json")
    config, _ = evaluation_config("tiny-random", "builtin:sums", EvalRequest("builtin:sums"), base)
    assert (config.model.name, config.model.dtype, config.model.trust_remote_code) == (
        "tiny-random",
        "float64",
        False,
    )


def test_the_texts_of_a_run_are_no_references_to_options():
    instruction = "Write ${x}$"
    options = {"model": "a", "data": {"train": "builtin:sums"}}
    base = build_config(options, [f"data.instruction={instruction}"]).model_dump(mode="json")
    config, _ = evaluation_config("tiny-random", "builtin:sums", EvalRequest("builtin:sums"), base)
    assert config.data.instruction == instruction


def test_without_data_a_run_is_evaluated_on_its_own_held_out_problems():
    base = {"data": {"train": "builtin:gcd", "eval": {"builtin": {"sums": {}}, "size": 8}}}
    assert evaluation_data(EvalRequest(None), base) == {"builtin": {"sums": {}}, "size": 8}
    assert evaluation_data(EvalRequest("builtin:gcd"), base) == "builtin:gcd"
    with pytest.raises(ConfigError, match=r"needs --data SOURCE, except for a run with data\.eval"):
        evaluation_data(EvalRequest(None), None)
    with pytest.raises(ConfigError, match=r"the run was trained without data\.eval"):
        evaluation_data(EvalRequest(None), {"data": {"eval": None}})


def test_the_number_of_samples_may_be_given_in_two_ways():
    assert EvalRequest("d", samples_per_problem=4).sets_samples_per_problem
    assert EvalRequest("d", overrides=("eval.samples_per_problem=4",)).sets_samples_per_problem
    assert EvalRequest("d", overrides=("eval={samples_per_problem: 4}",)).sets_samples_per_problem
    assert not EvalRequest("d", overrides=("eval.temperature=1",)).sets_samples_per_problem


def test_what_check_raises_at_a_poll_ends_the_evaluation():
    polls = 0

    def check() -> None:
        nonlocal polls
        polls += 1
        if polls == 2:
            raise EvaluationKilled

    engine = ScriptedEngine(lambda request: ([1, 7, 7], "stop"), slots=1)
    sampler = EngineSampler(engine, FakeEncoder(), EvaluationPlan("toy", 1, 1.0, 0.7, 20, (9,), 0))
    with pytest.raises(EvaluationKilled):
        evaluate(sampler, FakeJudge(), [Problem("1", "?", "!")] * 3, check=check)
    assert polls == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("samples", "rates", "width"), [(1, None, 10), (4, (0.3, 3.0), 4), (4, (0.2, 1.5), 5)]
)
def test_the_interval_at_the_end_covers_the_true_mean(
    samples: int, rates: tuple[float, float] | None, width: float
):
    """400 simulated evaluations, as in docs/evaluation.md; rates None: all are a half."""
    generator = np.random.default_rng(0)
    mean = 0.5 if rates is None else rates[0] / sum(rates)
    verdicts = {
        right: JudgedResponse("", right, float(right), None, "", 1, "stop")
        for right in (True, False)
    }
    problem = Problem("1", "?", "!")
    num_covered = 0
    num_problems = 0
    for _ in range(400):
        chances = np.full(900, 0.5) if rates is None else generator.beta(*rates, 900)
        drawn = generator.random((900, samples)) < chances[:, None]
        judged = {
            index: JudgedProblem(problem, tuple(verdicts[bool(right)] for right in row))
            for index, row in enumerate(drawn)
        }
        beginning = Beginning(range(900), width)
        beginning.extend(judged)
        assert beginning.suffices
        counted = tuple(judged[index] for index in range(beginning.num_problems))
        plan = EvaluationPlan("toy", samples, 1.0, 0.7, 20, (9,), 0)
        summary = Evaluation(plan, counted).summary()
        num_covered += summary["low"] <= mean <= summary["high"]
        num_problems += beginning.num_problems
    print(
        f"k = {samples}, width {width}: {num_problems / 400:.0f} problems, {num_covered / 400:.1%}"
    )
    assert 0.92 <= num_covered / 400 <= 0.98


def test_an_output_replaces_an_evaluation_and_nothing_else(tmp_path: Path):
    output = tmp_path / "data.jsonl"
    request = EvalRequest("builtin:sums", output=output)
    for text in (
        '{"prompt": "1 + 1", "answer": "2"}\n',
        '{"prompt": "a"}\n{"prompt": "b"}\n',
        "[1]",
    ):
        output.write_text(text)
        with pytest.raises(ConfigError, match="holds something else than an evaluation"):
            evaluate_model("no/model", request)
        assert output.read_text() == text
    for text in ('{"table": []}', '{"comparison": {}}', ""):
        output.write_text(text)
        with pytest.raises(ConfigError, match="no_such_model"):  # the next check
            evaluate_model("no_such_model", request)


def test_all_problems_and_a_wide_interval_are_told():
    summary = {"problems": 8, "low": 0.409, "high": 0.929}
    assert _width_note(summary, 4) == (
        "all 8 problems are judged, and the interval is 52.0 points wide, not 4: more problems or"
        " more samples per problem narrow it"
    )
    assert _width_note(summary, 60) == _width_note(summary, None) == ""
    assert _width_note({**summary, "until_width": 4}, 4) == ""
    assert _width_note({**summary, "low": None, "high": None}, 4) == ""
