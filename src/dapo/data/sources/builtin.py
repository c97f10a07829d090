"""Built-in problems: each is a pure function of task, options, seed and index.

One question in five is held out: training never samples it, whatever the seed, and evaluation samples only held-out
ones. The split depends on a question's numbers, not on their order, so 4 + 3 does not test what 3 + 4 has taught.
"""

import re
from collections.abc import Mapping
from itertools import count, islice
from typing import Any, Literal, TypeAlias

from dapo.core.errors import DataError
from dapo.core.rng import keyed_seed
from dapo.core.suggest import did_you_mean
from dapo.data.sources.builtin_tasks import TASKS, ItemRng, Option, Options
from dapo.data.sources.rows import problem_id
from dapo.types import Problem

Split: TypeAlias = Literal["train", "eval"]
HELD_OUT_EVERY = 5
REQUEST = "Reply with only the answer."
_MAX_ATTEMPTS = 500


def builtin_problems(
    name: str, options: Mapping[str, Any], *, size: int, seed: int, split: Split = "train"
) -> list[Problem]:
    """`size` problems of the task `name`; a smaller `size` gives the first of them.

    Training samples with replacement: where `size` exceeds the number of distinct questions there are copies, which
    share an id. An evaluation set has no copies, so it is smaller than `size` where a task has too few held-out
    questions. Raises DataError for an unknown task or option.
    """
    resolved = resolve_options(name, options)
    items = (_item(name, resolved, seed, index, split) for index in count())
    if split == "train":
        return list(islice(items, size))
    # coupon collector: n distinct questions take about n * log(n) samples; after these there is nothing new
    found: dict[str, Problem] = {}
    for problem in islice(items, 4 * min(size, TASKS[name].distinct(resolved)) + 200):
        if len(found) == size:
            break
        found.setdefault(problem.id, problem)
    return list(found.values())


def resolve_options(name: str, given: Mapping[str, Any]) -> Options:
    """Fill in a task's default options; `digits: 2` is short for `low: 10, high: 99`. Raises DataError."""
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
            names = [*known, *(["digits"] if "low" in known else [])]
            advice = did_you_mean(option, names) if names else "it has no options"
            raise DataError(f"builtin task {name}: unknown option {option!r}; {advice}")
    options = {key: _checked(name, key, given.get(key, option.default), option) for key, option in known.items()}
    if "low" in options and options["low"] >= options["high"]:
        raise DataError(f"builtin task {name}: low={options['low']} must be below high={options['high']}")
    return options


def is_held_out(name: str, question: str) -> bool:
    """Whether the question belongs to evaluation: a function of its words and numbers, not of their order."""
    return keyed_seed("held out", name, *sorted(re.findall(r"\w+", question))) % HELD_OUT_EVERY == 0


def _checked(task: str, name: str, value: object, option: Option) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not option.low <= value <= option.high:
        expected = f"an integer from {option.low} to {option.high}"
        raise DataError(f"builtin task {task}: {name} must be {expected}, got {value!r}")
    return value


def _item(name: str, options: Options, seed: int, index: int, split: Split) -> Problem:
    for attempt in range(_MAX_ATTEMPTS):
        question, answer = TASKS[name].make(ItemRng("builtin", name, seed, index, attempt), options)
        if is_held_out(name, question) == (split == "eval"):
            prompt = f"{question} {REQUEST}"
            return Problem(problem_id(prompt, answer), prompt, answer, source=name)
    raise DataError(
        f"builtin task {name}: {_MAX_ATTEMPTS} samples gave no problem for {split}: it has only "
        f"{TASKS[name].distinct(options)} different questions with these options; widen them"
    )
