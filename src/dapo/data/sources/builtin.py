"""Built-in problems: eight tasks, and problems that are a pure function of task, options, seed and
index.

One question in five is held out: training never samples it, whatever the seed, and evaluation
samples only held-out ones. The split depends on a question's numbers, not on their order, so 4 + 3
does not test what 3 + 4 has taught.
"""

import math
import re
from collections.abc import Callable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from dapo.core.errors import DataError
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.core.text import did_you_mean
from dapo.data.sources.rows import problem_id
from dapo.types import Problem

Split: TypeAlias = Literal["train", "eval"]
Options: TypeAlias = Mapping[str, int]
HELD_OUT_EVERY = 5
REQUEST = "Reply with only the answer."
_MAX_ATTEMPTS = 500
MAX_TERMS = 16


class ItemRng:
    """The random numbers of one item, at most `MAX_TERMS`."""

    def __init__(self, *key: int | str) -> None:
        self._uniforms = iter(keyed_uniforms(keyed_seed(*key), MAX_TERMS).tolist())

    def integer(self, low: int, high: int) -> int:
        """Return a random integer from low to high, both included."""
        return low + int(next(self._uniforms) * (high - low + 1))

    def integers(self, count: int, low: int, high: int) -> list[int]:
        """Return independent random integers from low to high, both included."""
        return [self.integer(low, high) for _ in range(count)]


class Option(NamedTuple):
    """An integer option: its default, and the smallest and largest value that is accepted."""

    default: int
    low: int
    high: int


class Task(NamedTuple):
    """A kind of question: its generator, its options, and the number of distinct questions."""

    make: Callable[[ItemRng, Options], tuple[str, str]]  # the question and the answer of one item
    options: Mapping[str, Option]
    # the number of distinct questions with these options, held-out ones included
    distinct: Callable[[Options], int]


def builtin_problems(
    name: str, options: Mapping[str, Any], *, size: int, seed: int, split: Split = "train"
) -> list[Problem]:
    """Return problems of a task; a smaller `size` gives the first of them.

    Training samples with replacement: where `size` exceeds the number of distinct questions there
    are copies, which share an id. An evaluation set has no copies, so it is smaller than `size`
    where a task has too few held-out questions.

    Args:
        name: the task.
        options: its options.
        size: the number of problems.
        seed: the seed of their numbers.
        split: whether the problems are for training or for evaluation.

    Raises:
        DataError: the task or an option is unknown.
    """
    resolved = resolve_options(name, options)
    items = (_item(name, resolved, seed, index, split) for index in count())
    if split == "train":
        return list(islice(items, size))
    # coupon collector: n distinct questions take about n * log(n) samples
    max_attempts = 4 * min(size, TASKS[name].distinct(resolved)) + 200
    problems: dict[str, Problem] = {}
    for problem in islice(items, max_attempts):
        if len(problems) == size:
            break
        problems.setdefault(problem.id, problem)
    return list(problems.values())


def resolve_options(name: str, options: Mapping[str, Any]) -> Options:
    """Fill in a task's default options; `digits: 2` is short for `low: 10, high: 99`.

    Raises DataError.
    """
    if name not in TASKS:
        raise DataError(f"builtin: no task {name}; {did_you_mean(name, TASKS)}")
    defaults = TASKS[name].options
    settings = dict(options)
    if "low" in defaults and "digits" in settings:
        if "low" in settings or "high" in settings:
            raise DataError(f"builtin task {name}: digits is short for low and high; give it alone")
        digits = _checked(name, "digits", settings.pop("digits"), Option(1, 1, 9))
        settings["high"] = 10**digits - 1
        settings["low"] = 10 ** (digits - 1)
        # numbers of one digit include the smallest that the task takes
        if digits == 1:
            settings["low"] = defaults["low"].low
    for option in settings:
        if option not in defaults:
            raise DataError(
                f"builtin task {name}: unknown option {option!r}; {_option_advice(option, defaults)}"
            )
    resolved = {}
    for key, default in defaults.items():
        value = settings.get(key, default.default)
        resolved[key] = _checked(name, key, value, default)
    if "low" in resolved and resolved["low"] >= resolved["high"]:
        raise DataError(
            f"builtin task {name}: low={resolved['low']} must be below high={resolved['high']}"
        )
    return resolved


def _option_advice(option: str, defaults: Mapping[str, Option]) -> str:
    """Return the option that was meant, for the error about an unknown one."""
    names = list(defaults)
    if "low" in defaults:
        names.append("digits")
    return did_you_mean(option, names) if names else "it has no options"


def is_held_out(name: str, question: str) -> bool:
    """Return True if the question is for evaluation, by its words and numbers in any order."""
    words = sorted(re.findall(r"\w+", question))
    return keyed_seed("held out", name, *words) % HELD_OUT_EVERY == 0


def _checked(task: str, name: str, value: object, option: Option) -> int:
    """Return the value of an option. Raises DataError if it is not in the option's range."""
    # True is an int for Python
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not option.low <= value <= option.high
    ):
        expected = f"an integer from {option.low} to {option.high}"
        raise DataError(f"builtin task {task}: {name} must be {expected}, got {value!r}")
    return value


def _item(name: str, options: Options, seed: int, index: int, split: Split) -> Problem:
    """Return the problem of an index: the first attempt whose question is of the split."""
    for attempt in range(_MAX_ATTEMPTS):
        question, answer = TASKS[name].make(ItemRng("builtin", name, seed, index, attempt), options)
        if is_held_out(name, question) == (split == "eval"):
            prompt = f"{question} {REQUEST}"
            return Problem(problem_id(prompt, answer), prompt, answer, source=name)
    raise DataError(
        f"builtin task {name}: {_MAX_ATTEMPTS} samples gave no problem for {split}: it has only "
        f"{TASKS[name].distinct(options)} different questions with these options; widen them"
    )


def sums(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Sum: `What is 3 + 14?`"""
    numbers = rng.integers(options["terms"], options["low"], options["high"])
    terms = " + ".join(map(str, numbers))
    return f"What is {terms}?", str(sum(numbers))


def differences(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Difference, never below zero: `What is 14 - 3?`"""
    small, large = sorted(rng.integers(2, options["low"], options["high"]))
    return f"What is {large} - {small}?", str(large - small)


def products(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Product: `What is 3 * 7?`"""
    numbers = rng.integers(options["terms"], options["low"], options["high"])
    factors = " * ".join(map(str, numbers))
    return f"What is {factors}?", str(math.prod(numbers))


def remainders(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Remainder: `What is the remainder when 47 is divided by 5?`"""
    number = rng.integer(options["low"], options["high"])
    divisor = rng.integer(2, options["divisor"])
    return f"What is the remainder when {number} is divided by {divisor}?", str(number % divisor)


def gcd(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Greatest common divisor: `What is the greatest common divisor of 12 and 18?`"""
    first, second = rng.integers(2, options["low"], options["high"])
    question = f"What is the greatest common divisor of {first} and {second}?"
    return question, str(math.gcd(first, second))


def largest(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Maximum: `Which is the largest of these numbers: 12, 93, 48, 61?`"""
    numbers = rng.integers(options["count"], options["low"], options["high"])
    question = f"Which is the largest of these numbers: {', '.join(map(str, numbers))}?"
    return question, str(max(numbers))


def sort_digits(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Sorted digits: `Sort these digits from smallest to largest: 7 2 9.`"""
    digits = rng.integers(options["count"], 0, 9)
    shown_digits = " ".join(map(str, digits))
    answer = " ".join(map(str, sorted(digits)))
    return f"Sort these digits from smallest to largest: {shown_digits}.", answer


def letter_counts(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Number of occurrences: `How many times does the letter e appear in the word cheese?`"""
    word = _WORDS[rng.integer(0, len(_WORDS) - 1)]
    letters = sorted(set(word))
    letter = letters[rng.integer(0, len(letters) - 1)]
    question = f"How many times does the letter {letter} appear in the word {word}?"
    return question, str(word.count(letter))


_WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())


def _range(low: int, high: int, *, minimum: int = 0) -> dict[str, Option]:
    """Return the options of a range of numbers with these defaults."""
    return {
        "low": Option(low, minimum, 10**9),
        "high": Option(high, 1, 10**9),
    }


def _span(options: Options) -> int:
    """Return the number of integers in the range of a task."""
    return options["high"] - options["low"] + 1


_TERMS = {"terms": Option(2, 2, MAX_TERMS)}

TASKS: dict[str, Task] = {
    "sums": Task(
        sums,
        _range(1, 20) | _TERMS,
        lambda o: _span(o) ** o["terms"],
    ),
    "differences": Task(
        differences,
        _range(1, 20),
        lambda o: _span(o) * (_span(o) + 1) // 2,
    ),
    "products": Task(
        products,
        _range(1, 12) | _TERMS,
        lambda o: _span(o) ** o["terms"],
    ),
    "remainders": Task(
        remainders,
        _range(10, 99) | {"divisor": Option(9, 2, 10**9)},
        lambda o: _span(o) * (o["divisor"] - 1),
    ),
    "gcd": Task(
        gcd,
        _range(2, 20, minimum=1),
        lambda o: _span(o) ** 2,
    ),
    "largest": Task(
        largest,
        _range(10, 99) | {"count": Option(4, 2, MAX_TERMS)},
        lambda o: _span(o) ** o["count"],
    ),
    "sort_digits": Task(
        sort_digits,
        {"count": Option(3, 2, MAX_TERMS)},
        lambda o: 10 ** o["count"],
    ),
    "letter_counts": Task(
        letter_counts,
        {},
        lambda o: sum(len(set(word)) for word in _WORDS),
    ),
}
