"""A user's functions: TRL's convention, our own, and every way they can go wrong; several with
weights.
"""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from dapo.core.errors import DataError, RewardError
from dapo.rewards import InlineJudge, build_verifier, get_verifier
from dapo.rewards.verifiers.function import function_verifier, require_columns
from dapo.types import Problem, Verdict
from helpers.tables import for_each_row

PROBLEM = Problem("1", "Q", "A", "s", {"level": 3})
CHAT = Problem("1", [{"role": "user", "content": "Q"}], "A", "s", {"level": 3})


def judged(name, responses, *, problem=PROBLEM, **options):
    """The verdicts of one function on one group."""
    ids = [[i] for i in range(len(responses))]
    return build_verifier(f"helpers.reward_functions:{name}", options=options).judge_group(
        problem, responses, ids
    )


def errors(name, responses, **arguments):
    """The reasons, None where there is a verdict."""
    return [verdict.error for verdict in judged(name, responses, **arguments)]


@pytest.mark.parametrize("name", ["length", "async_length"])
def test_a_list_of_numbers_is_a_list_of_grades(name):
    assert judged(name, ["a", "bb", ""]) == [
        Verdict(None, 1.0),
        Verdict(None, 2.0),
        Verdict(None, 0.0),
    ]


def test_a_function_that_takes_only_completions_gets_only_completions():
    assert judged("only_completions", ["a" * 5]) == [Verdict(None, 0.5)]


@pytest.mark.parametrize("problem", [PROBLEM, CHAT])
def test_arguments_are_those_of_trl(problem):
    verifier = build_verifier("helpers.reward_functions:sees")
    assert [v.score for v in verifier.judge_group(problem, ["a", "bb"], [[1], [2, 3]])] == [
        1.0,
        1.0,
    ]


def test_an_async_callable_keeps_its_event_loop_from_call_to_call():
    verifier = build_verifier("helpers.reward_functions:same_loop")
    for _ in range(3):
        assert verifier.judge_group(PROBLEM, ["a"], [[1]]) == [Verdict(None, 2.0)]


def test_an_async_function_can_be_judged_under_a_running_loop():
    import asyncio

    async def notebook_cell():
        return judged("async_length", ["abc"])

    assert asyncio.run(notebook_cell()) == [Verdict(None, 3.0)]


def test_a_class_is_instantiated_with_the_options():
    assert judged("SameLoop", ["a"], bonus=5.0) == [Verdict(None, 5.0)]


def test_options_are_further_keywords():
    assert judged("scaled", ["abc"], factor=2.0) == [Verdict(None, 6.0)]
    assert (
        get_verifier("helpers.reward_functions:tolerant", tolerance=2)(
            Problem("1", "Q", "10"), "12"
        ).correct
        is True
    )


def test_a_bool_is_a_binary_verdict():
    assert judged("yes_or_no", ["A", "B"]) == [Verdict(True, 1.0), Verdict(False, -1.0)]
    assert judged("async_verifier", ["A", "B"]) == [Verdict(True, 1.0), Verdict(False, -1.0)]


def test_a_verdict_is_taken_as_it_is():
    assert judged("verdict", ["A", "B"]) == [Verdict(True, 7.0), Verdict(False, 7.0)]


def test_numpy_results_count_as_numbers():
    assert [v.score for v in judged("numpy_array", ["a", "b", "c"])] == [0.0, 1.0, 2.0]
    assert judged("numpy_scalars", ["a", "b", "c"]) == [
        Verdict(None, 0.5),
        Verdict(True, 1.0),
        Verdict(None, 3.0),
    ]


def test_none_alone_is_an_error_that_says_so():
    assert errors("nothing", ["a"]) == [
        "helpers.reward_functions:nothing: no reward function applied"
    ]
    assert get_verifier("helpers.reward_functions:nothing")(PROBLEM, "a").error.endswith(
        "no reward function applied"
    )


@for_each_row(
    ("acc", "correct"),
    [
        *(
            (value, True)
            for value in (
                True,
                1,
                1.0,
                np.bool_(True),
                np.int8(1),
                np.float32(1),
                np.array(1),
                Fraction(1),
            )
        ),
        *(
            (value, False)
            for value in (False, 0, -0.0, np.bool_(False), np.uint8(0), np.float64(0), Decimal(0))
        ),
        (torch.tensor(True), True),
        (torch.tensor(0.0), False),
    ],
)
def test_acc_of_verls_dict_is_any_value_equal_to_one_or_zero(acc, correct):
    verifier = function_verifier("m:score", lambda solution_str: {"score": 0.5, "acc": acc}, {})
    assert verifier.judge(PROBLEM, "5") == Verdict(correct, 0.5)
    assert build_verifier(
        "m:own", functions={"m:own": lambda problem, response: Verdict(acc, 0.5)}
    ).judge_group(PROBLEM, ["5"], [[1]]) == [Verdict(correct, 0.5)]


@for_each_row(
    "acc",
    [0.5, 2, -1, "1", "True", None, [1], np.nan, np.array([1, 1]), torch.tensor([0.5])],
)
def test_any_other_acc_is_an_error_that_shows_it(acc):
    verifier = function_verifier("m:score", lambda solution_str: {"score": 0.5, "acc": acc}, {})
    assert (
        verifier.judge(PROBLEM, "5").error
        == f"m:score returned acc={acc!r}, expected a value equal to 1 or 0"
    )


def test_a_number_as_pred_is_the_answer_for_votes_as_a_text_is():
    for pred, answer in ((5, "5"), ("5", "5"), (0.5, "0.5"), (None, None), ([5], None)):
        verifier = function_verifier(
            "m:score", lambda solution_str, pred=pred: {"score": 1.0, "pred": pred}, {"pred": pred}
        )
        assert verifier.judge(PROBLEM, "5").answer == answer


@for_each_row(
    ("name", "responses", "expected"),
    [
        ("not_a_number", ["a", "nan", "inf"], [None, "returned nan, expected a finite number", "returned inf"]),
        ("words", ["bad", "a"], ["returned 'good', expected a finite number, a bool or None", None]),
        ("huge", ["a"], ["returned 1000"]),
        ("one_too_few", ["a", "b"], ["returned 1 results for 2 responses"] * 2),
        ("one_number", ["a", "b"], ["returned 0.5, expected a list with one number for each response (2)"] * 2),
        ("no_return", ["a"], ["returned None, expected a list"]),
        ("raises_on_bad", ["a", "bad", "c"], [None, "raised ValueError: no bad ones (reward_functions.py", None]),
        ("leaves", ["a"], ["raised SystemExit: 5"]),
        ("leaves_later", ["a"], ["raised RuntimeError: sys.exit(5)"]),
        ("needs_solution", ["a"], ["needs solution, which the problem does not have; it has answer"]),
        ("verdict_without_score", ["a"], ["returned Verdict(correct=True, score='high'"]),
        ("verdict_with_error", ["a"], [": the judge is out"]),
        ("tolerant", ["x"], ["raised ValueError: invalid literal for int()"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_result_is_reported_for_the_responses_it_concerns(
    name, responses, expected
):
    for got, part in zip(errors(name, responses), expected, strict=True):
        if part is None:
            assert got is None
        else:
            assert got.startswith(f"helpers.reward_functions:{name}")
            assert part in got
            assert "\n" not in got


def test_an_error_has_no_correct_and_no_grade():
    (verdict,) = judged("needs_solution", ["a"])
    assert (verdict.correct, verdict.score) == (None, 0.0)


def test_a_missing_column_is_not_missing_when_the_data_has_it():
    with_column = Problem("1", "Q", "A", "", {"solution": "S"})
    assert judged("needs_solution", ["a"], problem=with_column) == [Verdict(None, 1.0)]


# several verifiers


def combined(spec, responses, *, problem=PROBLEM, **arguments):
    return build_verifier(spec, **arguments).judge_group(
        problem, responses, [[1] for _ in responses]
    )


F = "helpers.reward_functions:"


def test_scores_add_up_by_weight_and_binary_verdicts_decide():
    spec = {"exact": 1.0, f"{F}length": 0.25}
    assert combined(spec, ["A", "BB"]) == [Verdict(True, 1.25), Verdict(False, -0.5)]


def test_each_verifiers_own_score_is_kept_with_the_sum_where_it_applied():
    spec = {"exact": 1.0, "helpers.reward_functions:length": 0.25}
    right, wrong = combined(spec, ["A", "BB"], problem=Problem("1", "Q", "A"))
    assert right.components == {"exact": 1.0, "helpers.reward_functions:length": 1.0}
    assert (wrong.score, wrong.components) == (
        -0.5,
        {"exact": -1.0, "helpers.reward_functions:length": 2.0},
    )
    assert combined("exact", ["A"])[0].components == {}


def test_all_binary_verifiers_must_say_right():
    spec = {f"{F}yes_or_no": 1.0, "exact": 1.0}
    assert combined(spec, ["A", "a", "b"]) == [
        Verdict(True, 2.0),
        Verdict(False, 0.0),
        Verdict(False, -2.0),
    ]


def test_what_does_not_apply_is_left_out():
    spec = {f"{F}not_applicable_to_short": 1.0, f"{F}length": 0.5}
    assert combined(spec, ["ab", "abc"]) == [Verdict(None, 1.0), Verdict(None, 2.5)]


def test_one_error_is_the_error_of_the_whole():
    spec = {"exact": 1.0, f"{F}raises_on_bad": 1.0, "gsm8k": 1.0}
    good, bad = combined(spec, ["7", "bad"], problem=Problem("1", "Q", "7"))
    assert good == Verdict(False, 1.0)  # exact +1, gsm8k without a mark -1, the function +1
    assert bad.error.startswith("helpers.reward_functions:raises_on_bad raised ValueError")
    both = combined(spec, ["bad"])[0]
    assert both.error.startswith("helpers.reward_functions:raises_on_bad raised ValueError")
    assert "; gsm8k: the reference 'A' does not end in a number" in both.error


def test_nothing_that_applies_is_an_error():
    spec = {f"{F}nothing": 1.0, f"{F}not_applicable_to_short": 1.0}
    assert combined(spec, ["a"])[0].error.endswith(": no reward function applied")


def test_a_threshold_decides_graded_scores_only():
    assert combined(f"{F}length", ["a", "bb"], threshold=2.0) == [
        Verdict(False, 1.0),
        Verdict(True, 2.0),
    ]
    assert combined({f"{F}length": 0.5}, ["a", "bb"], threshold=1.0) == [
        Verdict(False, 0.5),
        Verdict(True, 1.0),
    ]
    assert combined("exact", ["A"], threshold=5.0) == [Verdict(True, 1.0)]


def test_options_of_several_are_by_verifier():
    spec = {"exact": 1.0, f"{F}scaled": 1.0}
    options = {"exact": {"ignore_case": False}, f"{F}scaled": {"factor": 3.0}}
    assert combined(spec, ["a", "A"], options=options) == [Verdict(False, 2.0), Verdict(True, 4.0)]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ({}, None, "no verifier: expected a name"),
        (
            {"exact": float("nan")},
            None,
            "the weight of verifier exact must be a finite number, got nan",
        ),
        ({"exact": "1"}, None, "the weight of verifier exact must be a finite number, got '1'"),
        ({"exact": True}, None, "the weight of verifier exact must be a finite number, got True"),
        (
            {"exact": 1.0},
            {"ignore_case": False},
            "options of 'ignore_case', which is not among the verifiers (exact)",
        ),
        ({"exact": 1.0}, {"exact": 3}, "the options of verifier exact must be a mapping, got 3"),
        ({"exact": 1.0, "exakt": 1.0}, None, "unknown verifier 'exakt'; did you mean exact?"),
    ],
)
def test_a_reward_that_makes_no_sense_is_refused(spec, options, message):
    with pytest.raises(RewardError) as caught:
        build_verifier(spec, options=options)
    assert message in str(caught.value)


def test_the_inline_judge_answers_at_once():
    with InlineJudge("exact") as judge:
        future = judge.submit(PROBLEM, ["A", "B"], [[1], [2]])
        assert future.done()
        assert future.result() == (Verdict(True, 1.0), Verdict(False, -1.0))
        assert judge.submit(PROBLEM, [], []).result() == ()
    with pytest.raises(RewardError, match="closed"):
        judge.submit(PROBLEM, ["A"], [[1]])


# verl's compute_score

VERL = Problem(
    "1",
    [{"role": "user", "content": "Q"}],
    "7",
    "openai/gsm8k",
    {
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": 7, "style": "rule"},
        "extra_info": {"index": 3},
    },
)


def test_verls_compute_score_gets_its_arguments_for_each_response():
    assert judged("compute_score", ["7", "8"], problem=VERL) == [
        Verdict(None, 1.0),
        Verdict(None, 0.0),
    ]
    # all four, and nothing else
    assert judged("compute_score_of_any", ["7"], problem=VERL) == [Verdict(None, 4.0)]
    # and a column that the function names beside **kwargs
    assert judged("compute_score_by_level", ["A"]) == [Verdict(None, 3.0)]
    assert judged("compute_score_by_level", ["A"], level=5) == [Verdict(None, 5.0)]


def test_verls_arguments_come_from_other_data_as_well():
    assert judged("compute_score", ["A"], problem=PROBLEM) == [Verdict(None, 1.0)]
    with_columns = Problem("1", "Q", "no", "s", {"ground_truth": "yes", "data_source": "d"})
    assert judged("compute_score", ["yes"], problem=with_columns) == [Verdict(None, 1.0)]


def test_options_of_compute_score_are_further_keywords():
    assert judged("compute_score", ["8"], problem=VERL, format_score=0.1) == [Verdict(None, 0.1)]


def test_a_dict_with_score_is_a_verdict_with_verls_accuracy_and_prediction():
    right, wrong = judged("compute_score_with_details", ["7", "8"], problem=VERL)
    assert (right, wrong) == (Verdict(True, 1.0), Verdict(False, -1.0))
    assert (right.answer, wrong.answer) == ("7", "8")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("no score", "returned a dict without score; its keys: acc, pred"),
        ("text", "returned 'high', expected a finite number, a bool or None"),
        ("list", "returned [1.0], expected a finite number, a bool or None"),
        ("nan", "returned nan, expected a finite number"),
        ("nested nan", "returned nan, expected a finite number"),
        ("raise", "raised ValueError: as asked"),
    ],
)
def test_what_compute_score_must_not_return_is_an_error_that_quotes_it(response, expected):
    (error,) = errors("compute_score_gone_wrong", [response], problem=VERL)
    assert error.startswith(f"helpers.reward_functions:compute_score_gone_wrong {expected}")


def test_compute_score_without_a_ground_truth_names_the_columns_there_are():
    (error,) = errors("compute_score", ["7"], problem=Problem("1", "Q", "", "s", {"level": 3}))
    assert error.endswith(
        "needs ground_truth, which the problem does not have; it has level, prompt, source"
    )


def test_a_needed_column_is_found_for_all_rows_before_anything_is_sampled():
    needed = build_verifier(
        {f"{F}needs_solution": 1.0, f"{F}compute_score": 1.0, f"{F}length": 1.0, "exact": 1.0}
    )
    assert needed.needed_columns == {
        f"{F}needs_solution": ["solution"],
        f"{F}compute_score": ["data_source", "ground_truth"],
        f"{F}length": [],
    }
    rows = [Problem("1", "Q", "A", "s", {"solution": None}), PROBLEM, PROBLEM]
    require_columns(rows[:1], needed.needed_columns, where="data.train")
    with pytest.raises(DataError) as caught:
        require_columns(rows, needed.needed_columns, where="data.train")
    assert (
        str(caught.value)
        == "helpers.reward_functions:needs_solution needs solution, which 2 rows (the first: 2) of"
        " the 3 of data.train do not have; columns there: answer, level, prompt, source. Rename"
        " a column, give the parameter a default value, or set it in reward.options"
    )


def test_a_parameter_of_a_verifier_that_nobody_gives_is_found_when_it_is_loaded():
    with pytest.raises(RewardError, match=r"needs limit: set reward\.options\.limit"):
        build_verifier("helpers.reward_functions:within")
    assert (
        build_verifier(f"{F}within", options={"limit": 2})
        .judge_group(PROBLEM, ["abc"], [()])[0]
        .correct
        is False
    )


def test_a_column_reaches_a_function_of_trl_under_its_own_name():
    verifier = build_verifier(f"{F}accuracy_reward")
    problem = Problem("1", [{"role": "user", "content": "3+4?"}], "7", "f", {"solution": "7"})
    assert [v.score for v in verifier.judge_group(problem, ["7", "8"], [(), ()])] == [1.0, 0.0]


def test_a_function_gets_no_answer_where_the_data_has_none():
    with_answer, without = (
        judged("names_columns", ["a"], problem=Problem("1", "Q", a, "s")) for a in ("7", "")
    )
    assert with_answer[0].error.endswith(
        "'answer completion_ids data_source ground_truth prompt prompts source'"
    )
    assert without[0].error.endswith("'completion_ids data_source prompt prompts source'")


@for_each_row(
    ("name", "problem", "is_told"),
    [
        ("counts_letters", CHAT, True),
        ("strips", CHAT, True),
        ("divides", CHAT, False),
        ("divides", PROBLEM, False),
    ],
)
def test_a_function_of_texts_that_is_given_messages_is_told_what_a_completion_is(
    name, problem, is_told
):
    (error,) = errors(name, ["12"], problem=problem)
    assert ("use c[0]['content']" in error) == is_told
