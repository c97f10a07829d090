"""reasoning-gym as a source: the library's own items, reproducible in any process, scored from
stored entries.
"""

import json
from importlib.util import find_spec

import pytest

from dapo.core.errors import DataError
from dapo.data.problems import load_problems

pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
CHAIN_SUM = {"max_terms": 2, "max_digits": 1}
SPEC = {"gym": {"chain_sum": CHAIN_SUM, "gcd": {}}, "size": 7, "seed": 1}


@pytest.fixture(scope="module")
def problems():
    return load_problems(SPEC)


def error_message(spec):
    with pytest.raises(DataError) as caught:
        load_problems(spec)
    return str(caught.value)


def test_items_are_those_of_the_library_in_round_robin_order(problems):
    from reasoning_gym import create_dataset

    sums = create_dataset("chain_sum", seed=1, size=4, **CHAIN_SUM)
    gcds = create_dataset("gcd", seed=1, size=3)
    items = [sums[0], gcds[0], sums[1], gcds[1], sums[2], gcds[2], sums[3]]
    assert [(p.prompt, p.answer) for p in problems] == [
        (item["question"], item["answer"]) for item in items
    ]
    assert [p.source for p in problems] == ["chain_sum", "gcd"] * 3 + ["chain_sum"]


def test_fields_hold_what_the_verifier_needs_as_json(problems):
    from reasoning_gym import create_dataset

    for problem in problems:
        assert json.loads(json.dumps(problem.fields)) == problem.fields
        task = create_dataset(problem.fields["gym_task"], **problem.fields["gym_config"])
        assert task.score_answer(problem.answer, problem.fields["gym_entry"]) == 1.0
        assert task.score_answer("no", problem.fields["gym_entry"]) < 1.0
    assert problems[0].fields["gym_config"] == {"max_terms": 2, "max_digits": 1, "seed": 1}


def test_tasks_that_use_sets_or_global_generators_are_functions_of_the_seed():
    # each load runs in a fresh process, where Python would shuffle sets of text anew
    spec = {
        "gym": "isomorphic_strings,list_functions,ransom_note,word_ladder",
        "size": 40,
        "seed": 3,
    }
    assert load_problems(spec) == load_problems(spec)


def test_an_evaluation_set_holds_no_question_twice():
    spec = {"gym": {"gcd": {"max_value": 4, "min_value": 1}}, "size": 100, "seed": 0}
    held_out = load_problems(spec, split="eval")
    assert len({p.prompt for p in held_out}) == len(held_out) == 16


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"chain_sums": {}}, "gym: reasoning-gym has no task chain_sums; did you mean chain_sum"),
        (
            {"chain_sum": {"max_term": 2}},
            "gym task chain_sum: unknown option 'max_term'; did you mean max_terms?",
        ),
        (
            {"chain_sum": {"max_terms": 1, "min_terms": 2}},
            "gym task chain_sum: AssertionError: max_terms must be >= min_terms",
        ),
        (
            {"chain_sum": {"max_terms": "two"}},
            "gym task chain_sum: TypeError: '>=' not supported between",
        ),
        (
            {"rush_hour": {}},
            (
                "gym task rush_hour: it gives no reference answer, which every problem needs;"
                " choose another task"
            ),
        ),
        (
            {"rearc": {}},
            (
                "gym task rearc: its own answer scores 0.05 from an entry stored as JSON, so"
                " responses could not be scored; choose another task"
            ),
        ),
        (
            {"gcd": {"seed": 3}},
            "gym task gcd: seed belongs next to gym, as in {gym: {gcd: ...}, seed: 1}",
        ),
        (
            {"gcd": {"x": {1, 2}}},
            "gym: options must be numbers, strings, lists or mappings (Object of type set",
        ),
    ],
)
def test_a_wrong_task_or_option_gives_the_reason_in_one_line(tasks, message):
    error_text = error_message({"gym": tasks, "size": 3})
    assert error_text.startswith(message)
    assert "\n" not in error_text


def test_word_problems_whose_entries_hold_fractions_are_read():
    found = load_problems({"gym": {"gsm_symbolic": {}}, "size": 4})
    assert len(found) == 4
    assert all(
        problem.answer and problem.fields["gym_entry"]["answer"] == problem.answer
        for problem in found
    )
