"""Built-in problems: eight small tasks whose items are a pure function of seed, index and options.

One problem in five is held out: training never draws it, whatever its seed, and evaluation draws nothing else. A
problem's numbers decide, not their order, so 4 + 3 is not a test of what 3 + 4 has taught.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from dapo.data.rows import problem_id
from dapo.data.spec import did_you_mean
from dapo.data.turns import shares, take_turns
from dapo.errors import DataError
from dapo.keyed import keyed_seed, keyed_uniforms
from dapo.types import Problem

Options: TypeAlias = Mapping[str, int]
Split: TypeAlias = Literal["train", "eval"]
HELD_OUT_EVERY = 5
_MAX_TERMS = 16
_MAX_ATTEMPTS = 500
REQUEST = "Reply with only the answer."


class Draw:
    """The numbers of one item, in the order in which the task asks for them."""

    def __init__(self, *key: int | str) -> None:
        self._uniforms = iter(keyed_uniforms(keyed_seed(*key), _MAX_TERMS).tolist())

    def integer(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(next(self._uniforms) * (high - low + 1))

    def integers(self, count: int, low: int, high: int) -> list[int]:
        """Several of them, independent."""
        return [self.integer(low, high) for _ in range(count)]


class Option(NamedTuple):
    """A whole number with its bounds."""

    default: int
    low: int
    high: int


@dataclass(frozen=True)
class Task:
    """One kind of question."""

    make: Callable[[Draw, Options], tuple[str, str]]
    """Question and answer of one item."""
    options: Mapping[str, Option]
    distinct: Callable[[Options], int]
    """How many different questions there are, held-out ones included."""


def sums(draw: Draw, options: Options) -> tuple[str, str]:
    """What is 3 + 14?"""
    numbers = draw.integers(options["terms"], options["low"], options["high"])
    return f"What is {' + '.join(map(str, numbers))}?", str(sum(numbers))


def differences(draw: Draw, options: Options) -> tuple[str, str]:
    """What is 14 - 3? Never below zero."""
    small, large = sorted(draw.integers(2, options["low"], options["high"]))
    return f"What is {large} - {small}?", str(large - small)


def products(draw: Draw, options: Options) -> tuple[str, str]:
    """What is 3 * 7?"""
    numbers = draw.integers(options["terms"], options["low"], options["high"])
    return f"What is {' * '.join(map(str, numbers))}?", str(math.prod(numbers))


def remainders(draw: Draw, options: Options) -> tuple[str, str]:
    """What is the remainder when 47 is divided by 5?"""
    number, divisor = draw.integer(options["low"], options["high"]), draw.integer(2, options["divisor"])
    return f"What is the remainder when {number} is divided by {divisor}?", str(number % divisor)


def gcd(draw: Draw, options: Options) -> tuple[str, str]:
    """What is the greatest common divisor of 12 and 18?"""
    first, second = draw.integers(2, options["low"], options["high"])
    return f"What is the greatest common divisor of {first} and {second}?", str(math.gcd(first, second))


def largest(draw: Draw, options: Options) -> tuple[str, str]:
    """Which is the largest of these numbers: 12, 93, 48, 61?"""
    numbers = draw.integers(options["count"], options["low"], options["high"])
    return f"Which is the largest of these numbers: {', '.join(map(str, numbers))}?", str(max(numbers))


def sort_digits(draw: Draw, options: Options) -> tuple[str, str]:
    """Sort these digits from smallest to largest: 7 2 9."""
    digits = draw.integers(options["count"], 0, 9)
    return (
        f"Sort these digits from smallest to largest: {' '.join(map(str, digits))}.",
        " ".join(map(str, sorted(digits))),
    )


def letter_counts(draw: Draw, options: Options) -> tuple[str, str]:
    """How many times does the letter e appear in the word cheese?"""
    word = _WORDS[draw.integer(0, len(_WORDS) - 1)]
    letters = sorted(set(word))
    letter = letters[draw.integer(0, len(letters) - 1)]
    return f"How many times does the letter {letter} appear in the word {word}?", str(word.count(letter))


_WORDS = (
    "apple banana barrel basket bottle bridge butter button candle carrot castle cheese cherry circle coffee cotton "
    "county cousin dinner doctor eleven energy father finger flower forest freedom garden ginger guitar hammer handle "
    "hollow horror infant island jacket jelly jungle kettle kitten ladder lesson letter little lumber manner marble "
    "meadow middle mirror mitten monkey mother muffin narrow needle nephew noodle number office orange oyster paddle "
    "parrot pebble pencil people pepper pillow planet pocket potato puzzle rabbit ribbon river rubber saddle sailor "
    "school season seven shadow silver sister soccer spirit spring street summer supper sweater tailor teacher temper "
    "tennis thirteen ticket tomato tunnel turtle valley velvet village violin wallet weather window winter wonder yellow"
).split()


def _range(low: int, high: int) -> dict[str, Option]:
    return {"low": Option(low, 0, 10**9), "high": Option(high, 1, 10**9)}


def _span(options: Options) -> int:
    return options["high"] - options["low"] + 1


_TERMS = {"terms": Option(2, 2, _MAX_TERMS)}

TASKS: dict[str, Task] = {
    # 400 questions
    "sums": Task(sums, _range(1, 20) | _TERMS, lambda o: _span(o) ** o["terms"]),
    # 210
    "differences": Task(differences, _range(1, 20), lambda o: _span(o) * (_span(o) + 1) // 2),
    # 144
    "products": Task(products, _range(1, 12) | _TERMS, lambda o: _span(o) ** o["terms"]),
    # 720
    "remainders": Task(
        remainders, _range(10, 99) | {"divisor": Option(9, 2, 10**9)}, lambda o: _span(o) * (o["divisor"] - 1)
    ),
    # 361
    "gcd": Task(gcd, _range(2, 20), lambda o: _span(o) ** 2),
    # 65,610,000
    "largest": Task(largest, _range(10, 99) | {"count": Option(4, 2, _MAX_TERMS)}, lambda o: _span(o) ** o["count"]),
    # 1,000
    "sort_digits": Task(sort_digits, {"count": Option(3, 2, _MAX_TERMS)}, lambda o: 10 ** o["count"]),
    # every word with each of its letters
    "letter_counts": Task(letter_counts, {}, lambda o: sum(len(set(word)) for word in _WORDS)),
}


def builtin_problems(
    tasks: Mapping[str, Mapping[str, Any]], *, size: int, seed: int, split: Split = "train"
) -> list[Problem]:
    """`size` problems of these tasks (name -> options), taking turns: item i is of task i mod n.

    Training draws with replacement, so where `size` exceeds the number of distinct questions there are copies, which
    share an id. An evaluation set holds no question twice: where a task has too few held-out ones, it comes out
    smaller than `size`. Raises DataError for an unknown task or option.
    """
    resolved = {name: resolve_options(name, options) for name, options in tasks.items()}
    lists = [
        list(islice(_items(name, options, seed, split), count))
        if split == "train"
        else _distinct_items(name, options, seed, count)
        for (name, options), count in zip(resolved.items(), shares(size, len(resolved)), strict=True)
    ]
    return list(take_turns(lists))


def resolve_options(name: str, given: Mapping[str, Any]) -> Options:
    """A task's options with defaults filled in; `digits: 2` is short for `low: 10, high: 99`. Raises DataError."""
    if name not in TASKS:
        raise DataError(f"builtin: no task {name}; {did_you_mean(name, TASKS)}")
    known = TASKS[name].options
    given = dict(given)
    if "low" in known and "digits" in given:
        if "low" in given or "high" in given:
            raise DataError(f"builtin task {name}: digits is short for low and high; give it alone")
        digits = _checked(name, "digits", given.pop("digits"), Option(1, 1, 9))
        given |= {"low": 10 ** (digits - 1) if digits > 1 else known["low"].low, "high": 10**digits - 1}
    for option in given:
        if option not in known:
            digits_too = ["digits"] if "low" in known else []
            names = [*known, *digits_too]
            advice = did_you_mean(option, names) if names else "it has no options"
            raise DataError(f"builtin task {name}: unknown option {option!r}; {advice}")
    options = {key: _checked(name, key, given.get(key, option.default), option) for key, option in known.items()}
    if "low" in options and options["low"] >= options["high"]:
        raise DataError(f"builtin task {name}: low={options['low']} must be below high={options['high']}")
    return options


def is_held_out(name: str, question: str) -> bool:
    """Does the question belong to evaluation? Its words and numbers decide, in whatever order."""
    return keyed_seed("held out", name, *sorted(re.findall(r"\w+", question))) % HELD_OUT_EVERY == 0


def _checked(task: str, name: str, value: object, option: Option) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not option.low <= value <= option.high:
        raise DataError(
            f"builtin task {task}: {name} must be a whole number from {option.low} to {option.high}, got {value!r}"
        )
    return value


def _items(name: str, options: Options, seed: int, split: Split) -> Iterator[Problem]:
    index = 0
    while True:
        yield _item(name, options, seed, index, split)
        index += 1


def _item(name: str, options: Options, seed: int, index: int, split: Split) -> Problem:
    for attempt in range(_MAX_ATTEMPTS):
        question, answer = TASKS[name].make(Draw("builtin", name, seed, index, attempt), options)
        if is_held_out(name, question) == (split == "eval"):
            prompt = f"{question} {REQUEST}"
            return Problem(problem_id(prompt, answer), prompt, answer, source=name)
    raise DataError(
        f"builtin task {name}: {_MAX_ATTEMPTS} draws gave no problem for {split}: it has only "
        f"{TASKS[name].distinct(options)} different questions with these options; widen them"
    )


def _distinct_items(name: str, options: Options, seed: int, count: int) -> list[Problem]:
    # about count * log(count) draws meet every question of a task that has `count`; then nothing new comes
    draws = islice(_items(name, options, seed, "eval"), 20 * count + 200)
    found: dict[str, Problem] = {}
    for problem in draws:
        found.setdefault(problem.id, problem)
        if len(found) == count:
            break
    return list(found.values())
