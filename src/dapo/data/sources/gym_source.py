"""Problems of reasoning-gym, an optional package of procedural tasks with verifiers."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.core.environment import worker_environment
from dapo.core.errors import DataError
from dapo.core.loading import require_package
from dapo.core.text import did_you_mean
from dapo.data.sources.rows import json_value, problem_id
from dapo.types import Problem

_SCRIPT = Path(__file__).with_name("gym_items.py")


def gym_problems(
    tasks: Mapping[str, Mapping[str, Any]],
    sizes: Sequence[int],
    *,
    seed: int,
    distinct: bool = False,
) -> list[list[Problem]]:
    """Return each task's problems: item i of `reasoning_gym.create_dataset(task, seed, **options)`.

    They are generated in a subprocess with a fixed hash seed and fixed global generators. The
    verifier reads the fields `gym_task`, `gym_config` and `gym_entry`.

    Args:
        tasks: the options of each task by its name.
        sizes: the number of problems of each task.
        seed: the seed of all tasks.
        distinct: whether copies of a question are left out; there may then be fewer problems.

    Raises:
        DataError: the package is missing, a task or option is unknown, or a task cannot be scored
            from stored entries.
    """
    require_package("reasoning_gym", purpose=f"gym:{','.join(tasks)}")
    requests = []
    for (name, options), count in zip(tasks.items(), sizes, strict=True):
        for option in ("seed", "size"):
            if option in options:
                example = f"{{gym: {{{name}: ...}}, {option}: 1}}"
                raise DataError(f"gym task {name}: {option} belongs next to gym, as in {example}")
        requests.append(
            {
                "name": name,
                "options": dict(options),
                "seed": seed,
                "count": count,
                "distinct": distinct,
            }
        )
    entries = _entries(requests)
    return [list(_problems(name, tasks[name], seed, entries[name])) for name in tasks]


def _problems(
    name: str, options: Mapping[str, Any], seed: int, entries: list[dict[str, Any]]
) -> Iterator[Problem]:
    """Yield the problems of a task's entries."""
    shared = {"gym_task": name, "gym_config": {**options, "seed": seed}}
    for entry in entries:
        question = entry["question"]
        answer = entry["answer"]
        fields = shared | {"gym_entry": json_value(entry, f"gym task {name}")}
        yield Problem(problem_id(question, answer), question, answer, name, fields)


def _entries(requests: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the entries by task, generated in a process of their own."""
    try:
        request = json.dumps({"tasks": requests})
    except TypeError as error:
        raise DataError(
            f"gym: options must be numbers, strings, lists or mappings ({error})"
        ) from None
    # -P: modules in the script's folder must not shadow installed ones of the same name
    command = [sys.executable, "-P", str(_SCRIPT)]
    env = worker_environment() | {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, input=request, capture_output=True, encoding="utf-8", env=env, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DataError(
            f"gym: the process that generates the problems ended with code {done.returncode}:"
            f" {last[0]}"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        message, *unknown = answer["error"]
        if unknown:
            word, choices, count = unknown
            message += f"; {did_you_mean(word, choices, count=count)}"
        raise DataError(message)
    return answer["entries"]
