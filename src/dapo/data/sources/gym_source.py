"""Problems of reasoning-gym, an optional package of procedural tasks with verifiers."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dapo.core.errors import DataError
from dapo.core.loading import require_package
from dapo.core.text import did_you_mean
from dapo.data.sources.rows import json_value, problem_id
from dapo.types import Problem


def main() -> None:
    """Read a request from stdin; write `{"entries": {task: [entry]}}` or `{"error": [...]}` to stdout."""
    request = json.load(sys.stdin)
    answer_pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # a few tasks print while they work
    os.dup2(2, 1)
    try:
        answer: dict[str, Any] = {"entries": {task["name"]: entries(task) for task in request["tasks"]}}
    except InvalidRequest as error:
        answer = {"error": error.args}
    with answer_pipe:
        json.dump(answer, answer_pipe)


class InvalidRequest(Exception):
    """Arguments: the message; for an unknown name also that name, the known ones, and how many to suggest at most."""


def entries(task: dict[str, Any]) -> list[dict[str, Any]]:
    """A task's first `count` entries, or the first `count` distinct questions among ten times as many."""
    from reasoning_gym.factory import DATASETS, create_dataset

    name, options, seed, count, distinct = (task[key] for key in ("name", "options", "seed", "count", "distinct"))
    if name not in DATASETS:
        raise InvalidRequest(f"gym: reasoning-gym has no task {name}", name, sorted(DATASETS), 3)
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for option in options:
        if option not in known:
            raise InvalidRequest(f"gym task {name}: unknown option {option!r}", option, known, 1)
    try:
        fix_global_generators(seed, -1)
        data = create_dataset(name, size=10 * count if distinct else count, seed=seed, **options)
        sampled = (entry_at(data, seed, index) for index in range(len(data)))
        found = list(islice(without_copies(sampled) if distinct else sampled, count))
        if any(not isinstance(entry["answer"], str) for entry in found):
            reason = "it gives no reference answer, which every problem needs"
            raise InvalidRequest(f"gym task {name}: {reason}; choose another task")
        score = data.score_answer(found[0]["answer"], found[0])
    except InvalidRequest:
        raise
    except Exception as error:  # the library checks options by assertions and lets generators raise anything
        raise InvalidRequest(" ".join(f"gym task {name}: {type(error).__name__}: {error}".split())) from None
    if score < 1.0:
        reason = f"its own answer scores {score:g} from an entry stored as JSON, so responses could not be scored"
        raise InvalidRequest(f"gym task {name}: {reason}; choose another task")
    return found


def entry_at(data: Any, seed: int, index: int) -> dict[str, Any]:
    """Question, answer and metadata as JSON values: tuples become lists, keys strings, numpy scalars Python numbers."""
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
    """The entries without repeated questions."""
    seen = set()
    for entry in sampled:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield entry


def fix_global_generators(seed: int, index: int) -> None:
    """Seed the global generators, which some tasks use."""
    random.seed(f"{seed} {index}")
    np.random.seed((seed + index) % 2**32)


if __name__ == "__main__":
    main()


_SCRIPT = Path(__file__).with_name("gym_items.py")


def gym_problems(
    tasks: Mapping[str, Mapping[str, Any]], sizes: Sequence[int], *, seed: int, distinct: bool = False
) -> list[list[Problem]]:
    """The problems of each task: problem i is `reasoning_gym.create_dataset(task, seed=seed, **options)[i]`.

    They are generated in a subprocess with a fixed hash seed and fixed global generators. `Problem.fields` hold what
    the verifier needs: `gym_task`, `gym_config` and `gym_entry`.

    Args:
        tasks: the library's options by task name.
        sizes: the number of problems of each task.
        seed: the seed of every task.
        distinct: leave out copies of a question, so that there may be fewer problems than `sizes`.

    Raises:
        DataError: the package is missing, a task or option is unknown, or a task cannot be scored from stored entries.
    """
    require_package("reasoning_gym", extra="gym", purpose=f"gym:{','.join(tasks)}")
    requests = [
        {"name": name, "options": dict(options), "seed": seed, "count": count, "distinct": distinct}
        for (name, options), count in zip(tasks.items(), sizes, strict=True)
    ]
    for name, options in tasks.items():
        for option in ("seed", "size"):
            if option in options:
                example = f"{{gym: {{{name}: ...}}, {option}: 1}}"
                raise DataError(f"gym task {name}: {option} belongs next to gym, as in {example}")
    entries = _entries(requests)
    return [_problems(name, tasks[name], seed, entries[name]) for name in tasks]


def _problems(name: str, options: Mapping[str, Any], seed: int, entries: list[dict[str, Any]]) -> list[Problem]:
    config = {**options, "seed": seed}
    problems = []
    for entry in entries:
        question, answer = entry["question"], entry["answer"]
        fields = {"gym_task": name, "gym_config": config, "gym_entry": json_value(entry, f"gym task {name}")}
        problems.append(Problem(problem_id(question, answer), question, answer, name, fields))
    return problems


def _entries(requests: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    try:
        request = json.dumps({"tasks": requests})
    except TypeError as error:
        raise DataError(f"gym: options must be numbers, strings, lists or mappings ({error})") from None
    # -P: modules in the script's folder must not shadow installed ones of the same name
    command = [sys.executable, "-P", str(_SCRIPT)]
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, input=request, capture_output=True, encoding="utf-8", env=env, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DataError(f"gym: the process that generates the problems ended with code {done.returncode}: {last[0]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        message, *unknown = answer["error"]
        if unknown:
            word, known, count = unknown
            message += f"; {did_you_mean(word, known, count=count)}"
        raise DataError(message)
    return answer["entries"]
