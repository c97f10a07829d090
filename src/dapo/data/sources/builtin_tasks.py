"""The built-in tasks: each is a function from random numbers to a question with its answer."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from dapo.core.rng import keyed_seed, keyed_uniforms

Options: TypeAlias = Mapping[str, int]
MAX_TERMS = 16


class ItemRng:
    """The random numbers of one item, at most `MAX_TERMS`."""

    def __init__(self, *key: int | str) -> None:
        self._uniforms = iter(keyed_uniforms(keyed_seed(*key), MAX_TERMS).tolist())

    def integer(self, low: int, high: int) -> int:
        """A random integer from low to high, both included."""
        return low + int(next(self._uniforms) * (high - low + 1))

    def integers(self, count: int, low: int, high: int) -> list[int]:
        """`count` independent random integers from low to high, both included."""
        return [self.integer(low, high) for _ in range(count)]


class Option(NamedTuple):
    """An integer option: its default, and the smallest and largest value that is accepted."""

    default: int
    low: int
    high: int


class Task(NamedTuple):
    """How one kind of question is made."""

    make: Callable[[ItemRng, Options], tuple[str, str]]  # the question and the answer of one item
    options: Mapping[str, Option]
    distinct: Callable[[Options], int]  # the number of distinct questions with these options, held-out ones included


def sums(rng: ItemRng, options: Options) -> tuple[str, str]:
    """What is 3 + 14?"""
    numbers = rng.integers(options["terms"], options["low"], options["high"])
    return f"What is {' + '.join(map(str, numbers))}?", str(sum(numbers))


def differences(rng: ItemRng, options: Options) -> tuple[str, str]:
    """What is 14 - 3? Never below zero."""
    small, large = sorted(rng.integers(2, options["low"], options["high"]))
    return f"What is {large} - {small}?", str(large - small)


def products(rng: ItemRng, options: Options) -> tuple[str, str]:
    """What is 3 * 7?"""
    numbers = rng.integers(options["terms"], options["low"], options["high"])
    return f"What is {' * '.join(map(str, numbers))}?", str(math.prod(numbers))


def remainders(rng: ItemRng, options: Options) -> tuple[str, str]:
    """What is the remainder when 47 is divided by 5?"""
    number, divisor = rng.integer(options["low"], options["high"]), rng.integer(2, options["divisor"])
    return f"What is the remainder when {number} is divided by {divisor}?", str(number % divisor)


def gcd(rng: ItemRng, options: Options) -> tuple[str, str]:
    """What is the greatest common divisor of 12 and 18?"""
    first, second = rng.integers(2, options["low"], options["high"])
    return f"What is the greatest common divisor of {first} and {second}?", str(math.gcd(first, second))


def largest(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Which is the largest of these numbers: 12, 93, 48, 61?"""
    numbers = rng.integers(options["count"], options["low"], options["high"])
    return f"Which is the largest of these numbers: {', '.join(map(str, numbers))}?", str(max(numbers))


def sort_digits(rng: ItemRng, options: Options) -> tuple[str, str]:
    """Sort these digits from smallest to largest: 7 2 9."""
    digits = rng.integers(options["count"], 0, 9)
    given, answer = (" ".join(map(str, shown)) for shown in (digits, sorted(digits)))
    return f"Sort these digits from smallest to largest: {given}.", answer


def letter_counts(rng: ItemRng, options: Options) -> tuple[str, str]:
    """How many times does the letter e appear in the word cheese?"""
    word = _WORDS[rng.integer(0, len(_WORDS) - 1)]
    letters = sorted(set(word))
    letter = letters[rng.integer(0, len(letters) - 1)]
    return f"How many times does the letter {letter} appear in the word {word}?", str(word.count(letter))


_WORD_LIST = """
apple banana barrel basket bottle bridge butter button candle carrot castle cheese cherry circle coffee cotton county
cousin dinner doctor eleven energy father finger flower forest freedom garden ginger guitar hammer handle hollow
horror infant island jacket jelly jungle kettle kitten ladder lesson letter little lumber manner marble meadow middle
mirror mitten monkey mother muffin narrow needle nephew noodle number office orange oyster paddle parrot pebble pencil
people pepper pillow planet pocket potato puzzle rabbit ribbon river rubber saddle sailor school season seven shadow
silver sister soccer spirit spring street summer supper sweater tailor teacher temper tennis thirteen ticket tomato
tunnel turtle valley velvet village violin wallet weather window winter wonder yellow
"""
_WORDS = tuple(_WORD_LIST.split())


def _range(low: int, high: int, *, minimum: int = 0) -> dict[str, Option]:
    return {"low": Option(low, minimum, 10**9), "high": Option(high, 1, 10**9)}


def _span(options: Options) -> int:
    return options["high"] - options["low"] + 1


_TERMS = {"terms": Option(2, 2, MAX_TERMS)}

TASKS: dict[str, Task] = {
    "sums": Task(sums, _range(1, 20) | _TERMS, lambda o: _span(o) ** o["terms"]),
    "differences": Task(differences, _range(1, 20), lambda o: _span(o) * (_span(o) + 1) // 2),
    "products": Task(products, _range(1, 12) | _TERMS, lambda o: _span(o) ** o["terms"]),
    "remainders": Task(
        remainders, _range(10, 99) | {"divisor": Option(9, 2, 10**9)}, lambda o: _span(o) * (o["divisor"] - 1)
    ),
    "gcd": Task(gcd, _range(2, 20, minimum=1), lambda o: _span(o) ** 2),
    "largest": Task(largest, _range(10, 99) | {"count": Option(4, 2, MAX_TERMS)}, lambda o: _span(o) ** o["count"]),
    "sort_digits": Task(sort_digits, {"count": Option(3, 2, MAX_TERMS)}, lambda o: 10 ** o["count"]),
    "letter_counts": Task(letter_counts, {}, lambda o: sum(len(set(word)) for word in _WORDS)),
}
