"""No text that a model writes makes a verifier slow: runs of one kind of character, alone and in
frames.
"""

import itertools
import re
import time
from functools import lru_cache

import pytest

from dapo.rewards import get_verifier
from dapo.rewards.verifiers import gym
from dapo.rewards.verifiers.code import program_in
from dapo.types import Problem

SIZE = 100_000
MAX_CPU_S = 1.5
"""A quadratic pattern takes over five seconds at this size, a linear one a hundredth of one."""
RUNS = [
    *" \t\n\r\xa0\u2009\u3000",
    *"90aA½²₂９一👍\u0301\u200b\ud83d\0√°−⁄",
    *"{}[]()\\,.:;$*_`#-+=<>|\"'%^&/!?~@",
    "ab ",
    "1 ",
    "1,",
    "1.",
    "{}",
    "()",
    "\\a",
    " \\",
    "a\\",
    "a.",
    "$ ",
    "_ ",
    "- ",
    "> ",
    "**a",
    "\\,",
    "1\\,",
    "1 1/",
    "\\boxed{",
    "\\boxed{1}",
    "1\\boxed{",
    "\\text{",
    "\\text{a}",
    "{1 \\over ",
    "\\frac",
    "\\sqrt{",
    "\\left(",
    "\\pm ",
    "Answer:",
    "Answer: 1\n",
    "```\n",
    "```a\n",
    "#### 1\n",
    "<answer>",
    "</think>",
    "[[",
    '{"a":',
    "\r\n",
    "\n\n ",
    "two ",
    "twenty-",
    "is ",
    "the ",
    "of the ",
    "so ",
    " in the box",
    " or ",
    " and ",
    "(B) ",
    "x 10^",
    " km per hour",
    ". I hope it is correct",
    "half of ",
    "a total of ",
    "not ",
    "<|a|>",
    "A) ",
    "1e",
    "\\begin{array}",
    " & ",
    "≤",
    "x = ",
    "wait. ",
    "no, ",
    "\\to ",
    "at least ",
    "per ",
    "1) ",
    "$x$, ",
]
FRAMES = [
    "{}",
    "Answer: {}",
    "Answer: 8{}9",
    "Answer: {}9",
    "Answer: 9{}",
    "\\boxed{{{}}}",
    "\\boxed{{8{}9}}",
    "{}\nAnswer: 9",
    "Answer: \\boxed{{8{}9}}",
    "Answer: The answer is 8{}",
    "Answer: The {} is 9",
    "8{}\n",
    "#### {}9",
    "Answer: B) {}",
    "```python\n{}\n```",
    "(B){}.",
    "Answer: \\text{{{}}}",
    "\\boxed{{9}}{}\\boxed{{9}}",
    "Answer: ${}$",
    "Answer: x{}=9",
    "Answer: 9 in{} total",
    "$8{}",
    "<answer>{}</answer>",
    '{{"x": {}}}',
    "Answer: $\\boxed{{8}}{}$",
    "Answer: 8{}apples",
    "5{0}\\boxed{{9}}{0}9",
    "So $x {0} \\boxed{{9}} {0}$",
    "\\boxed{{9}}. {}",
    "The answer is B) {}",
]
READERS = {
    "math": ("math", {}, "13"),
    "math, an interval": ("math", {}, "x \\in [2, 3)"),
    "math, words": ("math", {}, "\\text{July 4}"),
    "gsm8k": ("gsm8k", {"flexible": True}, "13"),
    "gsm8k, partial credit": ("gsm8k", {"partial_credit": True}, "2 * 8 - 3 = 13 #### 13"),
    "exact": ("exact", {}, "13"),
    "exact, answer line": ("exact", {"extract": "answer_line"}, "13"),
    "exact, last number": ("exact", {"extract": "last_number"}, "13"),
    "exact, final": ("exact", {"extract": "final"}, "13"),
    "choice": ("choice", {}, "B"),
    "json_schema": ("json_schema", {"schema": {"properties": {"x": {"type": "integer"}}}}, ""),
    "math_dapo": ("math_dapo", {}, "13"),
    "regex": ("regex", {"pattern": "x=(1+)"}, "13"),
}
TEXT_READERS = {"code": program_in, "gym": gym.extract}


@lru_cache
def verifier(name):
    named, options, _ = READERS[name]
    return get_verifier(named, **options)


def seconds(name, text):
    """The processor time of one verdict."""
    began = time.process_time()
    if name in TEXT_READERS:
        TEXT_READERS[name](text)
    else:
        verdict = verifier(name)(
            Problem("1", "How many apples are in the box? A) 1 B) 2", READERS[name][2]), text
        )
        assert verdict.error is None
    return time.process_time() - began


@pytest.mark.parametrize("name", [*READERS, *TEXT_READERS])
def test_runs_in_frames_take_linear_time(name):
    """A third of the pairs, most of them at a tenth of the size; one that is slow there is judged
    at the whole size.

    The expression that a parser accepts is bounded in length and may take a tenth of a second at
    every size.
    """
    turn = [*READERS, *TEXT_READERS].index(name)
    seconds(name, "Answer: 1")  # imports
    slow = []
    for (row, run), (column, frame) in itertools.product(enumerate(RUNS), enumerate(FRAMES)):
        if (row + column + turn) % 3:
            continue
        sizes = [SIZE] if (row + column + turn) % 14 == 0 else [SIZE // 10, SIZE]
        if all(
            exceeds(name, frame.format((run * (size // len(run) + 1))[:size]), size)
            for size in sizes
        ):
            slow.append((run, frame))
    assert slow == []


def exceeds(name, text, size):
    """Whether three verdicts in a row take longer than the limit of their size: a machine stalls
    single ones.
    """
    return all(seconds(name, text) > MAX_CPU_S * size / SIZE for _ in range(3))


def test_the_limit_finds_a_quadratic_pattern():
    began = time.process_time()
    size = SIZE // 10
    re.search(r"\s+(?:in total|altogether|overall)$", "8" + " " * size + "9")
    assert time.process_time() - began > MAX_CPU_S * size / SIZE
