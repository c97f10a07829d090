"""A script that writes reasoning-gym items as JSON, run in a subprocess.

It imports nothing of this package.

Some tasks iterate over sets of strings, whose order changes with each process, or use the global
random generators. The parent process sets PYTHONHASHSEED, and the generators are seeded for each
item, so an item is a function of (task, options, seed, index) alone.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np


def main() -> None:
    """Read a request from stdin; write `{"entries": {task: [entry]}}` or `{"error": [...]}`."""
    request = json.load(sys.stdin)
    answer_pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # a few tasks print while they work
    os.dup2(2, 1)
    try:
        answer: dict[str, Any] = {
            "entries": {task["name"]: entries(task) for task in request["tasks"]}
        }
    except InvalidRequest as error:
        answer = {"error": error.args}
    with answer_pipe:
        json.dump(answer, answer_pipe)


class InvalidRequest(Exception):
    """Arguments: the message; for an unknown name it, the known ones, and how many to suggest."""


def entries(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a task's first `count` entries, or distinct questions among ten times as many."""
    from reasoning_gym.factory import DATASETS, create_dataset

    name = task["name"]
    options = task["options"]
    seed = task["seed"]
    count = task["count"]
    distinct = task["distinct"]
    if name not in DATASETS:
        raise InvalidRequest(f"gym: reasoning-gym has no task {name}", name, sorted(DATASETS), 3)
    all_options = [field.name for field in fields(DATASETS[name][1])]
    task_options = [option for option in all_options if option not in ("seed", "size")]
    for option in options:
        if option not in task_options:
            raise InvalidRequest(
                f"gym task {name}: unknown option {option!r}", option, task_options, 1
            )
    try:
        fix_global_generators(seed, -1)
        size = 10 * count if distinct else count
        data = create_dataset(name, size=size, seed=seed, **options)
        sampled = (entry_at(data, seed, index) for index in range(len(data)))
        items = list(islice(without_copies(sampled) if distinct else sampled, count))
        if any(not isinstance(entry["answer"], str) for entry in items):
            reason = "it gives no reference answer, which every problem needs"
            raise InvalidRequest(f"gym task {name}: {reason}; choose another task")
        score = data.score_answer(items[0]["answer"], items[0])
    except InvalidRequest:
        raise
    # the library checks options with assertions, and generators raise anything
    except Exception as error:
        raise InvalidRequest(
            " ".join(f"gym task {name}: {type(error).__name__}: {error}".split())
        ) from None
    if score < 1.0:
        reason = (
            f"its own answer scores {score:g} from an entry stored as JSON, so responses could not"
            " be scored"
        )
        raise InvalidRequest(f"gym task {name}: {reason}; choose another task")
    return items


def entry_at(data: Any, seed: int, index: int) -> dict[str, Any]:
    """Return question, answer and metadata of an entry as JSON values, with texts as keys."""
    fix_global_generators(seed, index)
    item = data[index]
    entry = {key: item[key] for key in ("question", "answer", "metadata")}
    return json.loads(json.dumps(entry, default=python_value))


def python_value(value: Any) -> Any:
    """Convert a numpy scalar or a fraction for `json.dumps`. Raises TypeError for other types."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    raise TypeError(f"an entry holds a {type(value).__name__}, which JSON cannot store")


def without_copies(sampled: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the entries without repeated questions."""
    questions = set()
    for entry in sampled:
        if entry["question"] not in questions:
            questions.add(entry["question"])
            yield entry


def fix_global_generators(seed: int, index: int) -> None:
    """Seed the global generators, which some tasks use."""
    random.seed(f"{seed} {index}")
    np.random.seed((seed + index) % 2**32)


if __name__ == "__main__":
    main()
