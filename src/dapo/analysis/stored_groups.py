"""Reads the judged groups of a run's steps from `rollouts/step_*.parquet`, with the problems of the
run's data.
"""

import json
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite
from typing import Any, TypeAlias

import pyarrow as pa

from dapo.config import Config
from dapo.core.constant_rows import constant_row
from dapo.core.errors import DataError
from dapo.core.files import damage_of
from dapo.data.problems import load_problems
from dapo.data.prompts import PromptEncoder
from dapo.data.sources.rows import other_fields
from dapo.policy.model import load_local_tokenizer
from dapo.runs.checkpoints import has_weights_only, numbered, step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import Outcome
from dapo.runs.rollout_table import episode_of, ranges_of, read_rollouts, rows_of, short_fields
from dapo.training.preflight import NO_COLUMNS, load_rows
from dapo.types import EpisodeText, Generation, Group, Problem, Verdict, num_sampled

_TOKEN_COLUMNS = {"response_ids": "i", "engine_logprobs": "f"}
"""The columns with a number per token, with the array type codes that engines use."""
_TokenRows: TypeAlias = Mapping[tuple[int, int], list[Sequence[Any]]]
"""The per-token columns of each response, by group and index of the response."""


@dataclass(frozen=True)
class StoredGroup:
    """A group as stored by a step."""

    group: Group  # the group, with the problem's columns that the table has, and without prompt ids
    outcome: Outcome
    prompt: str  # the prompt as rendered for the model, with special tokens
    prompt_tokens: int
    advantages: tuple[float | None, ...]  # the advantage of each response; None: it did not train
    fields: str | None  # the problem's short columns, as JSON


def saved_steps(directory: RunDirectory) -> list[int]:
    """The steps of the checkpoints with the optimizer's state, whole or not, ascending."""
    return [
        step_of(path)
        for path in numbered(directory.checkpoints.folder)
        if not has_weights_only(path)
    ]


def read_groups(
    directory: RunDirectory, step: int, *, tokens_of: Collection[int] | None = None
) -> tuple[StoredGroup, ...]:
    """Read the groups of a finished step, in the order of the stream.

    Raises DataError if its table is gone or damaged.

    Only the groups in `tokens_of` have their tokens (None: all); others have zeros, and no
    log-probabilities.
    """
    path = directory.rollouts(step)
    if not os.path.lexists(path):
        raise no_responses(directory, f"step {step}")
    rows = read_rollouts([path]).to_pylist()
    tokens = _token_rows(
        read_rollouts([path], ["group_id", "sample", *_TOKEN_COLUMNS], groups=tokens_of)
    )
    with damage_of(path):
        members = (list(of_group) for _, of_group in groupby(rows, key=lambda row: row["group_id"]))
        return tuple(_stored_group(each, tokens) for each in members)


def no_responses(directory: RunDirectory, wanted: str) -> DataError:
    """The error for steps whose judged responses a run does not have."""
    steps = list(directory.rollout_tables())
    stored = f"steps {steps[0]} to {steps[-1]}" if steps else "none"
    return DataError(
        f"{directory.path} has no judged responses of {wanted}; stored: {stored}. log.rollouts"
        " decides which a run keeps: all, no-logprobs, last:N or none"
    )


def _token_rows(table: pa.Table) -> _TokenRows:
    """The per-token columns of each response, by group and index; an empty row for a column of
    nulls.
    """
    columns = []
    for name, code in _TOKEN_COLUMNS.items():
        column = table.column(name).combine_chunks()
        is_stored = column.null_count == 0
        columns.append(
            [array(code, each.tobytes()) for each in rows_of(column)]
            if is_stored
            else [array(code)] * len(column)
        )
    keys = zip(
        table.column("group_id").to_pylist(), table.column("sample").to_pylist(), strict=True
    )
    return {key: list(of_response) for key, *of_response in zip(keys, *columns, strict=True)}


def _require_consistent(rows: Sequence[Mapping[str, Any]], tokens: _TokenRows) -> None:
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
        ids, logprobs = tokens.get((group, row["sample"]), (None, ()))
        ranges = ranges_of(row)
        length = row["response_tokens"] if ids is None or ranges is None else len(ids)
        if ids is not None and (len(ids) != length or len(logprobs) not in (0, len(ids))):
            raise ValueError(f"a response of group {group} has another number of tokens")
        if ranges is not None and num_sampled((), ranges) != row["response_tokens"]:
            raise ValueError(f"a response of group {group} has another number of tokens")


def _stored_group(rows: Sequence[Mapping[str, Any]], tokens: _TokenRows) -> StoredGroup:
    _require_consistent(rows, tokens)
    first = rows[0]
    fields = json.loads(first["fields"]) if first["fields"] else {}
    generations = []
    verdicts = []
    for row in rows:
        sampled = ranges_of(row)
        nothing = [constant_row(False, sampled[-1][1] if sampled else row["response_tokens"]), ()]
        ids, logprobs = tokens.get((row["group_id"], row["sample"]), nothing)
        request = f"{row['step']}/{row['group_id']}/{row['sample']}"
        generations.append(
            Generation(
                request, ids, logprobs, row["finish"], row["version"], sampled, episode_of(row)
            )
        )
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
                row["response"] if each.episode is None else EpisodeText(each.episode)
                for row, each in zip(rows, generations, strict=True)
            ),
            rewards=tuple(row["reward"] for row in rows),
        ),
        outcome=first["outcome"],
        prompt=first["prompt"],
        prompt_tokens=first["prompt_tokens"],
        advantages=tuple(row["advantage"] for row in rows),
        fields=first["fields"],
    )


class RunProblems:
    """The problems of a run's training data, by id."""

    def __init__(
        self, config: Config, needed_columns: Mapping[str, Collection[str]] = NO_COLUMNS
    ) -> None:
        """Read the data; if it is gone, `missing` holds the reason and no problem is found.

        Raises DataError if rows lack a column that the reward needs, and RewardError if it can
        judge none of them.
        """
        self._by_id: dict[str, list[Problem]] = {}
        self.missing: str | None = None
        """The reason why the data cannot be read; None if it can."""
        try:
            rows, _ = load_rows(config.data, config.reward, "train", needed_columns)
        except DataError as error:
            if _can_be_read(config):  # it lacks a column that the reward reads
                raise
            self.missing = str(error)
            return
        for problem in rows:
            known = self._by_id.setdefault(problem.id, [])
            if not any(problem is other for other in known):  # copies mostly share one object
                known.append(problem)

    def find(self, stored: StoredGroup) -> Problem | None:
        """The problem of a stored group with all its columns; None if the data no longer has it."""
        copies = self._by_id.get(stored.group.problem.id, [])
        # copies of a problem may differ in the columns that a group was stored with
        for copy in copies:
            if short_fields(copy.fields, known=[copy.answer]) == stored.fields:
                return copy
        for copy in copies:  # older versions did not store an answer that is no text
            if short_fields(other_fields(copy), known=[copy.answer]) == stored.fields:
                return copy
        return copies[0] if copies else None

    def complete(self, stored: StoredGroup) -> StoredGroup:
        """The group with the problem of the run's data, unless the data no longer has it."""
        problem = self.find(stored)
        return (
            stored
            if problem is None
            else replace(stored, group=replace(stored.group, problem=problem))
        )


def _can_be_read(config: Config) -> bool:
    try:
        return bool(load_problems(config.data.train_source, require_answer=False))
    except DataError:
        return False


def with_prompt_ids(stored: StoredGroup, encoder: PromptEncoder) -> StoredGroup:
    """The group with the token ids of its prompt, from its problem or else from the stored text.

    Raises DataError if neither gives the stored prompt.
    """
    for ids in _prompt_candidates(stored, encoder):
        if len(ids) == stored.prompt_tokens and encoder.decode_prompt(ids) == stored.prompt:
            return replace(stored, group=replace(stored.group, prompt_ids=ids))
    raise DataError(
        f"the tokens of the prompt of group {stored.group.id} are no longer known: its problem"
        f" {stored.group.problem.id} is gone from data.train, or the tokenizer or the options under"
        " data. have changed"
    )


def _prompt_candidates(stored: StoredGroup, encoder: PromptEncoder) -> Iterator[tuple[int, ...]]:
    with suppress(DataError):  # a problem that has only the stored text may not fit the template
        yield encoder.encode(stored.group.problem)
    yield encoder.encode_rendered(stored.prompt)


def local_encoder(config: Config) -> PromptEncoder | None:
    """The encoder of a run's model, loaded without weights; None if its tokenizer is not on this
    machine.
    """
    found = load_local_tokenizer(
        config.model.name, trust_remote_code=config.model.trust_remote_code
    )
    return None if found is None else PromptEncoder(found[0], config.data)
