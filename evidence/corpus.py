"""The texts that the base model learns from: solutions of built-in problems, written in several
ways at random.

A pretrained model has read many ways of answering, few of them good, and mixes them. So does this
corpus. How a problem is answered is sampled by `SHARES`, independently of the problem; worked
solutions have slips at a fixed rate. Nothing here depends on how the model will be trained later.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dapo.core.rng import keyed_seed
from dapo.types import Problem

SHARES: Mapping[str, float] = {
    "guessed": 0.38,
    "worked": 0.10,
    "checked": 0.10,
    "unmarked": 0.27,
    "rambling": 0.15,
}
"""The fraction of each way of answering; see `WAYS`."""

RIGHT_GUESSES = 0.3
"""The fraction of answers without working that are right."""

SLIP_RATE = 0.03
"""The probability that a step of the working has a wrong result, from which the next steps
continue.
"""

ENDLESS = 0.4
"""The fraction of rambling texts that repeat a sentence and never reach an answer."""

GO_ON = 0.5
"""The probability that another sentence follows in a rambling text that reaches an answer."""

SENTENCES = (
    "Let me see. ",
    "Hmm. ",
    "Wait. ",
    "One moment. ",
    "I am not sure. ",
    "Let me think. ",
    "Again. ",
    "So. ",
)

MAX_CHARACTERS = 160
"""Longer texts are cut off here, and have no end."""

MIN_ENDLESS = 30
"""Endless texts are cut off between this number of characters and `MAX_CHARACTERS`: longer ones
teach nothing new.
"""


@dataclass(frozen=True)
class Solution:
    """One text that answers a problem."""

    way: str
    """A name of `SHARES`."""
    text: str
    slips: int
    """Steps with a wrong result, and a wrong guess."""
    ends: bool
    """Whether the text has its end token; False if it is cut off."""


class Working(NamedTuple):
    """A problem worked out step by step."""

    text: str
    result: str


class Writer:
    """Writes the numbers of a working, some of them wrong."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.slips = 0
        """Steps with a wrong result, and wrong guesses."""
        self.is_endless = False

    def write(self, value: int, others: Sequence[int], *, slip_rate: float = SLIP_RATE) -> int:
        """The value or, at the slip rate, one of `others`."""
        if self.rng.random() >= slip_rate:
            return value
        self.slips += 1
        return self.rng.choice([other for other in others if other != value])


def add_up(problem: Problem, writer: Writer, *, backwards: bool = False) -> Working:
    """3 + 14 + 5 as `3+14=17, 17+5=22`, or from the last number to the first."""
    total, *numbers = numbers_of(problem)[:: -1 if backwards else 1]
    steps = []
    for number in numbers:
        result = writer.write(total + number, near(total + number))
        steps.append(f"{total}+{number}={result}")
        total = result
    return Working(", ".join(steps), str(total))


def divide(problem: Problem, writer: Writer, *, backwards: bool = False) -> Working:
    """5837 by 7 in long division, `5=7*0+5, 58=7*8+2, 23=7*3+2, 27=7*3+6`; there is no other
    direction.
    """
    number, divisor = numbers_of(problem)
    rest = 0
    steps = []
    for digit in str(number):
        part = 10 * rest + int(digit)
        rest = writer.write(part % divisor, range(divisor))
        steps.append(f"{part}={divisor}*{part // divisor}+{rest}")
    return Working(", ".join(steps), str(rest))


def insert_digits(problem: Problem, writer: Writer, *, backwards: bool = False) -> Working:
    """7 2 9 as `7, 27, 279`: each digit inserted among those before it, or from the last one on."""
    digits = numbers_of(problem)[:: -1 if backwards else 1]
    ordered: list[int] = []
    steps = []
    for digit in digits:
        ordered = sorted([*ordered, writer.write(digit, range(10))])
        steps.append("".join(map(str, ordered)))
    return Working(", ".join(steps), " ".join(map(str, ordered)))


class Method(NamedTuple):
    """The ways to answer the problems of a task."""

    work: Callable[..., Working]
    wrong_guess: Callable[[Problem, random.Random], str]


def near(value: int) -> list[int]:
    """The wrong results that one writes for a sum: some units or a ten away, not negative."""
    return [value + difference for difference in (-10, -2, -1, 1, 2, 10) if value + difference >= 0]


def _wrong_sum(problem: Problem, rng: random.Random) -> str:
    return str(max(0, int(problem.answer) + rng.choice((-1, 1)) * rng.randint(1, 9)))


def _wrong_remainder(problem: Problem, rng: random.Random) -> str:
    divisor = numbers_of(problem)[1]
    return rng.choice([str(rest) for rest in range(divisor) if str(rest) != problem.answer])


def _wrong_order(problem: Problem, rng: random.Random) -> str:
    digits = [int(digit) for digit in problem.answer.split()]
    index = rng.randrange(len(digits))
    digits[index] = (digits[index] + rng.randint(1, 9)) % 10
    return " ".join(map(str, sorted(digits)))


METHODS: Mapping[str, Method] = {
    "sums": Method(add_up, _wrong_sum),
    "remainders": Method(divide, _wrong_remainder),
    "sort_digits": Method(insert_digits, _wrong_order),
}
"""The tasks that the base model learns, by their names among the built-in ones."""


def numbers_of(problem: Problem) -> list[int]:
    """The numbers of the question, in order."""
    assert isinstance(problem.prompt, str)
    return [int(number) for number in re.findall(r"\d+", problem.prompt)]


def answered(result: str) -> str:
    """The line that the verifier reads."""
    return f"Answer: {result}"


def guess(problem: Problem, writer: Writer) -> str:
    """`Answer: 22` at once, right with the probability `RIGHT_GUESSES`."""
    if writer.rng.random() < RIGHT_GUESSES:
        return answered(problem.answer)
    writer.slips += 1
    return answered(METHODS[problem.source].wrong_guess(problem, writer.rng))


def work_out(problem: Problem, writer: Writer) -> str:
    """The steps, then the answer."""
    working = METHODS[problem.source].work(problem, writer)
    return f"{working.text}\n{answered(working.result)}"


def check(problem: Problem, writer: Writer) -> str:
    """The steps twice, the second time in the other direction if there is one; where results
    differ, once more.
    """
    work = METHODS[problem.source].work
    first = work(problem, writer)
    second = work(problem, writer, backwards=True)
    text = f"{first.text}\nCheck: {second.text}"
    result = first.result
    if first.result != second.result:
        third = work(problem, writer)
        text = f"{text}\nAgain: {third.text}"
        result = third.result
    return f"{text}\n{answered(result)}"


def leave_unmarked(problem: Problem, writer: Writer) -> str:
    """The steps without the line that the verifier reads: wrong, however right they are."""
    return METHODS[problem.source].work(problem, writer).text


def ramble(problem: Problem, writer: Writer) -> str:
    """Sentences that say nothing, then a guess or the steps; or one of them over and over."""
    rng = writer.rng
    if rng.random() < ENDLESS:
        writer.is_endless = True
        return (rng.choice(SENTENCES) * MAX_CHARACTERS)[: rng.randint(MIN_ENDLESS, MAX_CHARACTERS)]
    text = rng.choice(SENTENCES)
    while rng.random() < GO_ON:
        text += rng.choice(SENTENCES)
    return text.rstrip() + "\n" + rng.choice((guess, work_out))(problem, writer)


WAYS: Mapping[str, Callable[[Problem, Writer], str]] = {
    "guessed": guess,
    "worked": work_out,
    "checked": check,
    "unmarked": leave_unmarked,
    "rambling": ramble,
}


def solve(problem: Problem, *key: int | str) -> Solution:
    """A text that answers the problem, a function of the problem and the key of its random numbers.

    Raises KeyError for a problem of another task than those of `METHODS`.
    """
    rng = random.Random(keyed_seed("evidence corpus", *key))
    way = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    writer = Writer(rng)
    text = WAYS[way](problem, writer)
    ends = not writer.is_endless and len(text) <= MAX_CHARACTERS
    return Solution(way, text[:MAX_CHARACTERS], writer.slips, ends)
