"""Built-in tasks: correct answers, pure items, and a held-out fifth that training never samples."""

import math
import re
from collections import Counter

import pytest

from dapo.core.errors import DataError
from dapo.data.problems import load_problems, remove_overlap
from dapo.data.sources.builtin import TASKS, is_held_out, resolve_options

EVERY_TASK = sorted(TASKS)


def builtin_problems(tasks, *, size, seed, split="train"):
    return load_problems({"builtin": tasks, "size": size, "seed": seed}, split=split)


def texts(problems):
    return [problem.prompt for problem in problems]


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def solve(source, prompt):
    """Compute the answer from the text of the question, as an oracle."""
    found = numbers(prompt)
    if source == "letter_counts":
        letter, word = re.search(r"the letter (\w) appear in the word (\w+)\?", prompt).groups()
        return str(len(word) - len(word.replace(letter, "")))
    if source == "sort_digits":
        return " ".join(sorted(map(str, found)))
    return str(
        {
            "sums": lambda: sum(found),
            "differences": lambda: found[0] - found[1],
            "products": lambda: math.prod(found),
            "remainders": lambda: found[0] - found[1] * (found[0] // found[1]),
            "gcd": lambda: max(d for d in range(1, 100) if found[0] % d == found[1] % d == 0),
            "largest": lambda: sorted(found)[-1],
        }[source]()
    )


@pytest.mark.parametrize("task", EVERY_TASK)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_answer_is_correct_and_every_question_asks_for_only_the_answer(task, split):
    problems = builtin_problems({task: {}}, size=60, seed=3, split=split)
    assert len(problems) == (
        29 if (task, split) == ("products", "eval") else 60 if split == "train" else len(problems)
    )
    for problem in problems:
        assert problem.source == task
        assert problem.prompt.endswith(" Reply with only the answer.")
        assert problem.answer == solve(task, problem.prompt)


def test_an_item_is_a_function_of_seed_and_index_whatever_the_size():
    long = builtin_problems({"sums": {}, "gcd": {}}, size=40, seed=5)
    assert builtin_problems({"sums": {}, "gcd": {}}, size=12, seed=5) == long[:12]
    assert builtin_problems({"sums": {}, "gcd": {}}, size=40, seed=6) != long


def test_items_never_change_from_release_to_release():
    assert [
        (p.id, p.prompt, p.answer)
        for p in load_problems({"builtin": "sums,largest", "size": 4, "seed": 1})
    ] == [
        ("e086f2a154bab2ee", "What is 2 + 13? Reply with only the answer.", "15"),
        (
            "44c332ad1be0c518",
            "Which is the largest of these numbers: 45, 23, 77, 47? Reply with only the answer.",
            "77",
        ),
        ("412173501a10b33f", "What is 6 + 20? Reply with only the answer.", "26"),
        (
            "9dac57091d327390",
            "Which is the largest of these numbers: 67, 17, 45, 14? Reply with only the answer.",
            "67",
        ),
    ]


def test_tasks_alternate_round_robin():
    problems = builtin_problems({"sums": {}, "gcd": {}, "largest": {}}, size=8, seed=0)
    assert [p.source for p in problems] == [
        "sums",
        "gcd",
        "largest",
        "sums",
        "gcd",
        "largest",
        "sums",
        "gcd",
    ]


@pytest.mark.parametrize("task", EVERY_TASK)
def test_training_and_evaluation_never_share_a_question_whatever_the_seeds(task):
    train = [p for seed in range(3) for p in builtin_problems({task: {}}, size=300, seed=seed)]
    held_out = builtin_problems({task: {}}, size=50, seed=0, split="eval")
    assert held_out
    assert remove_overlap(train, held_out) == (train, 0)


def test_the_same_numbers_in_another_order_are_on_the_same_side():
    for a in range(1, 21):
        for b in range(1, 21):
            assert is_held_out("sums", f"What is {a} + {b}?") == is_held_out(
                "sums", f"What is {b} + {a}?"
            )
    held_out = texts(builtin_problems({"sums": {}}, size=500, seed=0, split="eval"))
    mirrored = [re.sub(r"(\d+) \+ (\d+)", r"\2 + \1", text) for text in held_out]
    assert sorted(mirrored) == sorted(held_out)


@pytest.mark.parametrize(
    ("task", "options", "distinct", "held_out"),
    [
        ("sums", {}, 400, 76),
        ("sums", {"digits": 1}, 100, None),
        ("differences", {}, 210, 57),
        ("products", {}, 144, 29),
        ("remainders", {}, 720, 139),
        ("gcd", {}, 361, 68),
        ("largest", {"count": 2, "digits": 1}, 100, None),
        ("sort_digits", {"count": 2}, 100, None),
        ("letter_counts", {}, 573, 116),
    ],
)
def test_the_stated_number_of_distinct_questions_is_what_sampling_finds(
    task, options, distinct, held_out
):
    assert TASKS[task].distinct(resolve_options(task, options)) == distinct
    for_training = set(texts(builtin_problems({task: options}, size=12 * distinct, seed=0)))
    for_evaluation = texts(builtin_problems({task: options}, size=distinct, seed=0, split="eval"))
    assert len(for_evaluation) == len(set(for_evaluation))
    assert held_out is None or len(for_evaluation) == held_out
    assert len(for_training) + len(for_evaluation) == distinct


def test_training_repeats_questions_and_evaluation_does_not():
    train = builtin_problems({"products": {"digits": 1}}, size=500, seed=0)
    assert len(train) == 500
    assert len(set(texts(train))) <= 100
    assert {len({p.id for p in train if p.prompt == text}) for text in texts(train)} == {1}


def test_an_evaluation_mix_is_shared_equally_where_there_is_enough():
    problems = load_problems(
        {"builtin": "sums,products,largest", "size": 150, "seed": 2}, split="eval"
    )
    assert Counter(p.source for p in problems) == {"sums": 50, "products": 29, "largest": 50}


def test_default_sizes_are_1000_to_train_and_200_to_evaluate():
    assert len(load_problems("builtin:largest")) == 1000
    assert len(load_problems("builtin:largest", split="eval")) == 200


def test_options_change_the_numbers():
    for problem in builtin_problems({"sums": {"terms": 3, "digits": 2}}, size=50, seed=0):
        found = numbers(problem.prompt)
        assert len(found) == 3
        assert all(10 <= number <= 99 for number in found)
    sampled = {
        n
        for p in builtin_problems({"products": {"digits": 1}}, size=300, seed=0)
        for n in numbers(p.prompt)
    }
    assert sampled == set(range(10))
    sampled = {
        n
        for p in builtin_problems({"sums": {"low": 7, "high": 8}}, size=40, seed=0)
        for n in numbers(p.prompt)
    }
    assert sampled <= {7, 8}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"summs": {}}, "builtin: no task summs; did you mean sums?"),
        (
            {"xyz": {}},
            (
                "builtin: no task xyz; known: sums, differences, products, remainders, gcd,"
                " largest, sort_digits, letter_counts"
            ),
        ),
        ({"sums": {"digit": 1}}, "builtin task sums: unknown option 'digit'; did you mean digits?"),
        (
            {"sums": {"qqq": 1}},
            "builtin task sums: unknown option 'qqq'; known: low, high, terms, digits",
        ),
        (
            {"sort_digits": {"digits": 1}},
            "builtin task sort_digits: unknown option 'digits'; known: count",
        ),
        (
            {"letter_counts": {"count": 1}},
            "builtin task letter_counts: unknown option 'count'; it has no options",
        ),
        (
            {"sums": {"digits": 0}},
            "builtin task sums: digits must be an integer from 1 to 9, got 0",
        ),
        (
            {"sums": {"terms": True}},
            "builtin task sums: terms must be an integer from 2 to 16, got True",
        ),
        (
            {"gcd": {"low": 0}},
            "builtin task gcd: low must be an integer from 1 to 1000000000, got 0",
        ),
        ({"sums": {"low": 30}}, "builtin task sums: low=30 must be below high=20"),
        (
            {"sums": {"digits": 1, "low": 2}},
            "builtin task sums: digits is short for low and high; give it alone",
        ),
    ],
)
def test_a_wrong_task_or_option_is_named_with_the_nearest(tasks, message):
    with pytest.raises(DataError) as caught:
        builtin_problems(tasks, size=4, seed=0)
    assert str(caught.value) == message


def test_a_task_without_held_out_questions_is_an_error_instead_of_an_endless_search():
    (low,) = [n for n in range(1, 60) if no_sum_is_held_out(n)][:1]
    with pytest.raises(DataError) as caught:
        builtin_problems({"sums": {"low": low, "high": low + 1}}, size=4, seed=0, split="eval")
    assert (
        str(caught.value)
        == "builtin task sums: 500 samples gave no problem for eval: it has only 4 different"
        " questions with these options; widen them"
    )


def no_sum_is_held_out(low):
    pairs = [(low, low), (low, low + 1), (low + 1, low + 1)]
    return not any(is_held_out("sums", f"What is {a} + {b}?") for a, b in pairs)


def test_fewer_problems_than_tasks_are_refused():
    with pytest.raises(DataError, match="size=1 is less than the 2 tasks it names"):
        load_problems({"builtin": "sums,gcd", "size": 1})
