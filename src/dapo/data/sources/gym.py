"""Problems of reasoning-gym, the optional package of procedural tasks with verifiers."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.core.errors import DataError
from dapo.core.optional import require_package
from dapo.core.suggest import did_you_mean
from dapo.data.sources.rows import json_value, problem_id
from dapo.data.sources.turns import items_per_task, round_robin
from dapo.types import Problem

_SCRIPT = Path(__file__).with_name("gym_items.py")


def gym_problems(
    tasks: Mapping[str, Mapping[str, Any]], *, size: int, seed: int, distinct: bool = False
) -> list[Problem]:
    """`size` problems of these tasks (name -> the library's options), taking turns.

    Problem i of a task is `reasoning_gym.create_dataset(task, seed=seed, **options)[i]`, drawn in a process of its own
    where sets and global generators are fixed too. `distinct`: no question twice, so maybe fewer than `size`.
    `fields` carry what judges a response: `gym_task`, `gym_config` and `gym_entry`. Raises DataError without the
    package, for an unknown task or option, and for a task that cannot be judged from a stored entry.
    """
    require_package("reasoning_gym", extra="gym", purpose=f"gym:{','.join(tasks)}")
    requests = [
        {"name": name, "options": dict(options), "seed": seed, "count": count, "distinct": distinct}
        for (name, options), count in zip(tasks.items(), items_per_task(size, len(tasks)), strict=True)
    ]
    for name, options in tasks.items():
        for option in ("seed", "size"):
            if option in options:
                raise DataError(
                    f"gym task {name}: {option} stands beside gym, as in {{gym: {{{name}: ...}}, {option}: 1}}"
                )
    entries = _entries(requests)
    return list(round_robin([_problems(name, tasks[name], seed, entries[name]) for name in tasks]))


def _problems(name: str, options: Mapping[str, Any], seed: int, entries: list[dict[str, Any]]) -> list[Problem]:
    config = {**options, "seed": seed}
    return [
        Problem(
            id=problem_id(entry["question"], entry["answer"]),
            prompt=entry["question"],
            answer=entry["answer"],
            source=name,
            fields={"gym_task": name, "gym_config": config, "gym_entry": json_value(entry, f"gym task {name}")},
        )
        for entry in entries
    ]


def _entries(requests: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    try:
        request = json.dumps({"tasks": requests})
    except TypeError as error:
        raise DataError(f"gym: options must be numbers, text, lists or mappings ({error})") from None
    # -P: the script's folder holds modules of common names, which must not hide others
    done = subprocess.run(
        [sys.executable, "-P", str(_SCRIPT)],
        input=request,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DataError(f"gym: the process that draws the problems ended with code {done.returncode}: {last[0]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise DataError(_format_error(**answer["error"]))
    return answer["entries"]


def _format_error(kind: str, name: str, **error: Any) -> str:
    if kind == "task":
        return f"gym: reasoning-gym has no task {name}; {did_you_mean(name, error['known'], count=3)}"
    if kind == "option":
        return f"gym task {name}: unknown option {error['option']!r}; {did_you_mean(error['option'], error['known'])}"
    if kind == "no_reference_answer":
        return f"gym task {name}: it gives no reference answer, which every problem needs; choose another task"
    if kind == "not_scorable":
        return (
            f"gym task {name}: its own answer scores {error['score']:g} from an entry stored as JSON, so responses "
            "could not be judged; choose another task"
        )
    return f"gym task {name}: {' '.join(error['reason'].split())}"
