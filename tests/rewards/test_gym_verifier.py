"""`gym`: reasoning-gym's scorers on extracted answers."""

import json

import pytest

from dapo.rewards import get_verifier
from dapo.types import Problem
from helpers.tables import for_each_row

reasoning_gym = pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def verifier():
    return get_verifier("gym")


def problem_of(task, index=0, **config):
    """A problem as the data source stores it: its fields went through JSON."""
    config = {"seed": 1, "size": 5, **config}
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(task, **config)[index]))
    fields = {"gym_task": task, "gym_config": config, "gym_entry": entry}
    return Problem(f"{task}-{index}", entry["question"], entry["answer"], task, fields)


@pytest.mark.parametrize(
    "task",
    ["chain_sum", "products", "gcd", "count_bits", "letter_counting", "basic_arithmetic", "spell_backward",
     "number_sorting", "simple_equations", "countdown", "word_sorting", "n_queens"],
)  # fmt: skip
def test_the_reference_is_right_and_nonsense_is_wrong(verifier, task):
    for index in range(3):
        problem = problem_of(task, index)
        assert verifier(problem, f"<answer>{problem.answer}</answer>").correct is True
        wrong = verifier(problem, "<answer>qqq</answer>")
        assert (wrong.correct, wrong.score, wrong.error) == (False, -1.0, None)


@for_each_row(
    ("response", "correct"),
    [
        ("{}", True),
        ("**{}**", True),
        ("{}.", True),
        ("I think so.\nAnswer: {}", True),
        ("I think so.\n**Answer:** {}", True),
        ("it is \\boxed{{{}}}, really.\nYes.", True),
        ("<think>5\n6</think> <answer> {} </answer>", True),
        ("<answer>0</answer> <answer>{}</answer>", True),
        ("Answer: 0\n<answer>{}</answer>", True),
        ("the answer is {}", False),
        ("I say\n{}", False),
        ("{}" + " " * 300 + "x", False),
        ("", False),
    ],
)
def test_where_the_answer_is_looked_for(verifier, response, correct):
    problem = problem_of("letter_counting", 2)
    assert verifier(problem, response.format(problem.answer)).correct is correct


def test_partial_credit_is_not_correct_and_graded_keeps_it():
    problem = problem_of("spell_backward")
    response = problem.answer + "x"
    assert get_verifier("gym")(problem, response).correct is False
    partial_credit = get_verifier("gym", partial_credit=True)(problem, response)
    assert partial_credit.correct is None
    assert 0.5 < partial_credit.score < 1.0
    assert get_verifier("gym", partial_credit=True)(problem, "").score == 0.0


@pytest.mark.parametrize(
    "task", ["n_queens", "string_insertion", "binary_matrix", "spiral_matrix", "countdown"]
)
def test_an_answer_is_never_run_as_a_program(verifier, task, tmp_path):
    problem = problem_of(task)
    target = tmp_path / "written"
    for attack in (
        f"open({str(target)!r}, 'w')",
        f"__import__('pathlib').Path({str(target)!r}).touch()",
    ):
        verdict = verifier(problem, f"<answer>{attack}</answer>")
        assert verdict.correct is False
        assert not target.exists()


def test_the_attack_of_the_test_above_works_on_the_bare_scorer(tmp_path):
    problem = problem_of("n_queens")
    target = tmp_path / "written"
    dataset = reasoning_gym.create_dataset("n_queens", **problem.fields["gym_config"])
    attack = f"__import__('pathlib').Path({str(target)!r}).touch()"
    dataset.score_answer(attack, problem.fields["gym_entry"])
    assert target.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "gym: problem 'p' has no field gym_task: it is not from reasoning-gym"),
        ({"gym_task": "chain_sum"}, "gym: problem 'p' has no field gym_entry"),
        (
            {"gym_task": "no_task", "gym_entry": {}},
            "gym: task 'no_task' raised ValueError: Dataset 'no_task' not",
        ),
        (
            {"gym_task": "gcd", "gym_entry": {"question": "?"}},
            "gym: the scorer of task 'gcd' raised KeyError: 'answer'",
        ),
    ],
)
def test_what_cannot_be_scored_is_an_error(verifier, fields, message):
    verdict = verifier(Problem("p", "Q", "1", "", fields), "1")
    assert verdict.correct is None
    assert message in verdict.error
