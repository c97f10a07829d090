"""The sampling in a checkpoint, as JSON and Parquet: the next step's batch, and the groups that go
on.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_json
from dapo.data.stream import ProblemStream
from dapo.engines.continuation import Unfinished
from dapo.runs.outcomes import Outcome
from dapo.runs.rollout_table import (
    EPISODE,
    SAMPLED,
    VERSIONS,
    column_of,
    episode_json,
    episode_of,
    flat_ranges,
    flat_versions,
    ranges_of,
    rows_of,
    versions_of,
)
from dapo.sampling.batch import SamplingStart
from dapo.sampling.continuous import Kept, KeptGroup, PrefetchedBatch, generation_of
from dapo.sampling.queue import Batch
from dapo.sampling.selection import Decision, Prediction
from dapo.types import EpisodeText, Generation, Group, Problem, Verdict

PREFETCHED_BATCH_FILE = "prefetched_batch.json"
# one row per judged response, groups in the order of the stream
RESPONSES_FILE = "prefetched_batch.parquet"
KEPT_FILE = "kept_groups.json"
KEPT_RESPONSES_FILE = "kept_groups.parquet"  # one row per response, finished or not
SAMPLING_FILES = {PREFETCHED_BATCH_FILE, RESPONSES_FILE, KEPT_FILE, KEPT_RESPONSES_FILE}
_GROUPS_PER_CHUNK = 16  # bounds memory: at the paper's lengths a batch is gigabytes of ids
_TYPES = {"prompt_ids": "", "token_ids": "i", "logprobs": "f"}
"""The columns of numbers, each with the type of the arrays that dapo's engines return."""
_GENERATION = ("request_id", "token_ids", "logprobs", "finish", "version")
_SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),  # in a group's first row only
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),  # shaped; null where the verdict is an error
        # text and verdict; JSON holds any text, lone surrogates too
        pa.field("judged", pa.string(), nullable=False),
    ]
)
_PLAIN_SCHEMA = _SCHEMA.set(
    _SCHEMA.get_field_index("logprobs"), pa.field("logprobs", pa.list_(pa.float64()), False)
)
"""Schema of a batch whose rows are Python numbers; it keeps each of their bits."""


def write_prefetched_batch(directory: Path, prefetched_batch: PrefetchedBatch) -> None:
    """Write a batch into a checkpoint; with one pyarrow version, equal batches give equal bytes."""
    batch = prefetched_batch.batch
    start = prefetched_batch.start
    generations = [generation for group, _ in batch.judged for generation in group.generations]
    _write_table(
        directory / RESPONSES_FILE,
        [_rows(group, outcome) for group, outcome in batch.judged],
        generations,
    )
    state = {
        "step": start.step,
        "position": start.position,
        "sampler": start.sampler,
        "group_counts": dict(batch.group_counts),
        "token_counts": dict(batch.token_counts),
        "shortfall": batch.shortfall,
        "epoch": batch.epoch,
        "prediction": batch.prediction and batch.prediction.state(),
        **({"recomputed_tokens": batch.recomputed_tokens} if batch.recomputed_tokens else {}),
    }
    atomic_write_json(directory / PREFETCHED_BATCH_FILE, state)


def read_prefetched_batch(directory: Path, stream: ProblemStream) -> PrefetchedBatch | None:
    """Read the batch that was written into a checkpoint; None if it has none.

    Problems come from the stream by their position. Raises CheckpointError where they are not the
    ones sampled.
    """
    if not (directory / PREFETCHED_BATCH_FILE).exists():
        return None
    state = _read_state(directory)
    judged = tuple(_groups(_read_table(directory / RESPONSES_FILE), stream))
    batch = Batch(
        groups=tuple(group for group, outcome in judged if outcome == "trained"),
        judged=judged,
        group_counts=state["group_counts"],
        token_counts=state["token_counts"],
        shortfall=state["shortfall"],
        epoch=state["epoch"],
        prediction=state.get("prediction") and Prediction.of_state(state["prediction"]),
        recomputed_tokens=state.get("recomputed_tokens", 0),
    )
    return PrefetchedBatch(batch, _start_in(state))


def read_sampling_start(directory: Path) -> SamplingStart | None:
    """Read the state before a checkpoint's prefetched groups were sampled; None without any.

    Without a batch the state of the sampler is the checkpoint's own, and empty here.
    """
    if (directory / PREFETCHED_BATCH_FILE).exists():
        return _start_in(_read_state(directory))
    if (directory / KEPT_FILE).exists():
        first = json.loads((directory / KEPT_FILE).read_text(encoding="utf-8"))["groups"][0]
        return SamplingStart(first["step"], first["position"], {})
    return None


def _read_state(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(
        (directory / PREFETCHED_BATCH_FILE).read_text(encoding="utf-8")
    )
    return state


def _start_in(state: Mapping[str, Any]) -> SamplingStart:
    return SamplingStart(state["step"], state["position"], state["sampler"])


def write_kept(directory: Path, suspended: Kept) -> None:
    """Write the groups that go on into a checkpoint, if there are any; waits for their verdicts."""
    if not suspended.groups:
        return
    generations = [
        generation_of(response) for group in suspended.groups for response in group.responses
    ]
    _write_table(
        directory / KEPT_RESPONSES_FILE,
        [_kept_rows(group) for group in suspended.groups],
        generations,
    )
    groups = [
        {
            "step": group.step,
            "position": group.position,
            "problem_id": group.problem.id,
            "prompt_ids": group.prompt_ids,
            "version": group.version,
            "lag": group.lag,
            "lags": [
                entry.lag if isinstance(entry, Unfinished) else None for entry in group.responses
            ],
            "is_finished": [isinstance(entry, Generation) for entry in group.responses],
        }
        for group in suspended.groups
    ]
    decisions = [asdict(entry) for entry in suspended.decisions]
    atomic_write_json(directory / KEPT_FILE, {"groups": groups, "decisions": decisions})


def read_kept(directory: Path, stream: ProblemStream) -> Kept:
    """Read the groups that go on from a checkpoint.

    Raises CheckpointError where their problems are different ones.
    """
    if not (directory / KEPT_FILE).exists():
        return Kept()
    state = json.loads((directory / KEPT_FILE).read_text(encoding="utf-8"))
    rows = _read_table(directory / KEPT_RESPONSES_FILE)
    groups = []
    for record in state["groups"]:
        members = [next(rows) for _ in record["is_finished"]]
        generations = [_generation(row) for row in members]
        judged = [json.loads(row["judged"]) for row in members]
        verdicts: Future[tuple[Verdict, ...]] | None = None
        if judged and judged[0] is not None:
            verdicts = Future()
            verdicts.set_result(tuple(map(_verdict, judged)))
        groups.append(
            KeptGroup(
                record["step"],
                record["position"],
                _problem_at(stream, record["position"], record["problem_id"]),
                tuple(record["prompt_ids"]),
                tuple(
                    generation if is_finished else Unfinished(generation, lag)
                    for generation, is_finished, lag in zip(
                        generations, record["is_finished"], record["lags"], strict=True
                    )
                ),
                texts=() if verdicts is None else tuple(map(_text, judged, generations)),
                verdicts=verdicts,
                lag=record["lag"],
            )
        )
    return Kept(tuple(groups), tuple(Decision(**record) for record in state["decisions"]))


def _kept_rows(group: KeptGroup) -> Iterator[dict[str, Any]]:
    verdicts = (
        group.verdicts.result() if group.verdicts is not None else (None,) * len(group.responses)
    )
    texts = group.texts or ("",) * len(group.responses)
    for response, verdict, text in zip(group.responses, verdicts, texts, strict=True):
        yield {
            "group_id": group.position,
            "problem_id": group.problem.id,
            "outcome": "kept",
            "prompt_ids": (),
            "reward": None,
            "judged": "null" if verdict is None else _judged(text, verdict),
            **_columns_of(generation_of(response)),
        }


def _write_table(
    path: Path, groups: Sequence[Iterable[Mapping[str, Any]]], generations: Sequence[Generation]
) -> None:
    schema = _SCHEMA if _is_compact(generations) else _PLAIN_SCHEMA
    for field, name in ((SAMPLED, "sampled"), (EPISODE, "episode"), (VERSIONS, "versions")):
        if any(getattr(generation, name) for generation in generations):
            schema = schema.append(field)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, len(groups), _GROUPS_PER_CHUNK):
            rows = [row for group in groups[start : start + _GROUPS_PER_CHUNK] for row in group]
            columns = [
                column_of([row[field.name] for row in rows], field.type) for field in schema if rows
            ]
            if rows:
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _read_table(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):  # a row group holds whole groups
            yield from _read_rows(file.read_row_group(number))


def _columns_of(generation: Generation) -> dict[str, Any]:
    return {
        "request_id": generation.request_id,
        "token_ids": generation.token_ids,
        "logprobs": generation.logprobs,
        "finish": generation.finish,
        "version": generation.version,
        "sampled": flat_ranges(generation),
        "episode": episode_json(generation),
        "versions": flat_versions(generation),
    }


def _judged(text: str, v: Verdict) -> str:
    return json.dumps([text, v.correct, v.score, v.error, v.answer, dict(v.components)])


def _rows(group: Group, outcome: Outcome) -> Iterator[dict[str, Any]]:
    responses = zip(group.generations, group.verdicts, group.texts, group.rewards, strict=True)
    for i, (generation, verdict, text, reward) in enumerate(responses):
        yield {
            "group_id": group.id,
            "problem_id": group.problem.id,
            "outcome": outcome,
            "prompt_ids": group.prompt_ids if i == 0 else (),
            "reward": reward,
            "judged": _judged(text, verdict),
            **_columns_of(generation),
        }


def _is_compact(generations: Sequence[Generation]) -> bool:
    """Return True if all rows are arrays of dapo's engines, and are to be read as arrays."""
    return all(
        isinstance(row, array) and row.typecode == code
        for generation in generations
        for row, code in (
            (generation.token_ids, _TYPES["token_ids"]),
            (generation.logprobs, _TYPES["logprobs"]),
        )
    )


def _read_rows(chunk: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table; numbers are arrays, or tuples for a batch that is not compact."""
    is_compact = chunk.schema.field("logprobs").type == _SCHEMA.field("logprobs").type
    columns: dict[str, Sequence[Any]] = {}
    for name, column in zip(chunk.column_names, chunk.combine_chunks().itercolumns(), strict=True):
        columns[name] = column.to_pylist() if name not in _TYPES else rows_of(column.chunk(0))
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        for name, code in _TYPES.items():
            if is_compact and code:
                row[name] = array(code, row[name].tobytes())
            else:
                row[name] = tuple(row[name].tolist())
        yield row


def _groups(
    rows: Iterable[Mapping[str, Any]], stream: ProblemStream
) -> Iterator[tuple[Group, Outcome]]:
    for position, group_rows in groupby(rows, key=lambda row: row["group_id"]):
        members = list(group_rows)
        judged = [json.loads(row["judged"]) for row in members]
        generations = tuple(map(_generation, members))
        group = Group(
            problem=_problem_at(stream, position, members[0]["problem_id"]),
            prompt_ids=members[0]["prompt_ids"],
            generations=generations,
            verdicts=tuple(map(_verdict, judged)),
            id=position,
            texts=tuple(map(_text, judged, generations)),
            rewards=tuple(row["reward"] for row in members),
        )
        yield group, members[0]["outcome"]


def _problem_at(stream: ProblemStream, position: int, problem_id: str) -> Problem:
    problem = stream.problem_at(position)
    if problem.id != problem_id:
        raise CheckpointError(
            f"the checkpoint holds responses to problem {problem_id}, where the data source now has"
            f" {problem.id}; resume with the data the run began with"
        )
    return problem


def _generation(row: Mapping[str, Any]) -> Generation:
    values = {name: row[name] for name in _GENERATION}
    return Generation(
        **values, sampled=ranges_of(row), episode=episode_of(row), versions=versions_of(row)
    )


def _verdict(judged: Sequence[Any]) -> Verdict:
    _, correct, score, error, answer, components = judged
    return Verdict(correct, score, error, answer=answer, components=components)


def _text(judged: Sequence[Any], generation: Generation) -> str:
    return judged[0] if generation.episode is None else EpisodeText(generation.episode)
