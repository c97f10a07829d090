"""Reads the judged groups of a run's steps from `rollouts/step_*.parquet`. Imports no torch."""

import json
import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from dapo.core.errors import DataError
from dapo.core.files import damage_of
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import Outcome
from dapo.runs.rollout_table import (
    all_columns,
    episode_of,
    ranges_of,
    read_rollouts,
    rows_of,
    with_branches,
)
from dapo.runs.stored_config import load_run_config
from dapo.types import EpisodeText, Generation, Group, Problem, Verdict, num_sampled

_TOKEN_CODES = {"response_ids": "i", "engine_logprobs": "f"}
"""The columns with a number per token, with the array type codes that engines use."""


@dataclass(frozen=True)
class StoredGroup:
    """A group as stored by a step."""

    group: Group  # the group, with the problem's columns that the table has, and without prompt ids
    outcome: Outcome


def read_groups(directory: RunDirectory, step: int) -> tuple[StoredGroup, ...]:
    """Read the groups of a finished step, in the order of the stream.

    Raises DataError if its table is gone or damaged.
    """
    path = directory.rollouts(step)
    if not os.path.lexists(path):
        raise no_responses(directory, f"step {step}")
    rows = rows_with_tokens(path)
    with damage_of(path):
        members = (
            list(group_rows) for _, group_rows in groupby(rows, key=lambda row: row["group_id"])
        )
        return tuple(map(_stored_group, members))


SAMPLES_NOTHING = "samples no responses: it imitates demonstrations (schedule=supervised)"
"""Said of a run where its responses are wanted."""


def is_supervised(directory: RunDirectory) -> bool:
    """Return True if a run imitates demonstrations."""
    return load_run_config(directory).is_supervised


def no_responses(directory: RunDirectory, selection: str) -> DataError:
    """Return the error for steps whose judged responses a run does not have."""
    steps = list(directory.rollout_tables())
    if not steps and is_supervised(directory):
        return DataError(f"{directory.path} {SAMPLES_NOTHING}")
    extent = f"steps {steps[0]} to {steps[-1]}" if steps else "none"
    return DataError(
        f"{directory.path} has no judged responses of {selection}; stored: {extent}. log.rollouts"
        " decides which a run keeps: all, no-logprobs, last:N or none"
    )


def rows_with_tokens(path: Path, *, groups: Collection[int] | None = None) -> list[dict[str, Any]]:
    """Read all columns of the responses in a table, or of those of the `groups` with these ids.

    The columns with a number per token are arrays; `engine_logprobs` is empty if the run does not
    keep them. Raises DataError for a table that no run has written.
    """
    table = read_rollouts([path], all_columns(path), groups=groups)
    rows: list[dict[str, Any]] = table.drop_columns(list(_TOKEN_CODES)).to_pylist()
    for name, code in _TOKEN_CODES.items():
        column = table.column(name).combine_chunks()
        if column.null_count:
            values = [array(code) for _ in rows]
        else:
            values = [array(code, numbers.tobytes()) for numbers in rows_of(column)]
        for row, numbers in zip(rows, values, strict=True):
            row[name] = numbers
    return rows


def require_consistent(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for the rows of a group that contradict each other."""
    group = rows[0]["group_id"]
    outcome = rows[0]["outcome"]
    if len({row["sample"] for row in rows}) < len(rows) or any(
        row["outcome"] != outcome for row in rows
    ):
        raise ValueError(f"group {group} has a response twice, or several outcomes")
    for row in rows:
        numbers = (row["score"], row["reward"]) if row["error"] is None else ()
        if not all(
            number is not None and isfinite(number)
            for number in (*numbers, row["advantage"] or 0.0)
        ):
            raise ValueError(
                f"a response of group {group} lacks a finite score, reward or advantage"
            )
        num_ids = len(row["response_ids"])
        num_logprobs = len(row["engine_logprobs"])
        ranges = ranges_of(row)
        num_tokens = num_ids if ranges is None else num_sampled((), ranges)
        if row.get("branches") is not None:
            num_tokens += sum(branch.num_sampled for branch in _generation(row).branches)
        if num_tokens != row["response_tokens"] or num_logprobs not in (0, num_ids):
            raise ValueError(f"a response of group {group} has another number of tokens")


def _generation(row: Mapping[str, Any]) -> Generation:
    """Return a response with its branches. Raises ValueError if no run writes such a row."""
    request = f"{row['step']}/{row['group_id']}/{row['sample']}"
    tokens = (row["response_ids"], row["engine_logprobs"])
    generation = Generation(
        request, *tokens, row["finish"], row["version"], ranges_of(row), episode_of(row)
    )
    return with_branches(generation, row)


def _stored_group(rows: Sequence[Mapping[str, Any]]) -> StoredGroup:
    require_consistent(rows)
    first = rows[0]
    fields = json.loads(first["fields"]) if first["fields"] else {}
    generations = []
    verdicts = []
    for row in rows:
        generations.append(_generation(row))
        components = json.loads(row["components"]) if row["components"] else {}
        score = 0.0 if row["error"] is not None else row["score"]
        verdicts.append(Verdict(row["correct"], score, row["error"], components=components))
    return StoredGroup(
        group=Group(
            problem=Problem(
                first["problem_id"], first["prompt"], first["answer"], first["source"], fields
            ),
            prompt_ids=(),
            generations=tuple(generations),
            verdicts=tuple(verdicts),
            id=first["group_id"],
            texts=tuple(
                row["response"] if generation.episode is None else EpisodeText(generation.episode)
                for row, generation in zip(rows, generations, strict=True)
            ),
            rewards=tuple(row["reward"] for row in rows),
        ),
        outcome=first["outcome"],
    )
