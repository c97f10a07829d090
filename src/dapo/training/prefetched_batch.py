"""A batch that is sampled before the step that trains on it, and its JSON and Parquet files in a checkpoint."""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_json
from dapo.data.stream import ProblemStream
from dapo.runs.outcomes import OUTCOMES, Outcome
from dapo.runs.rollout_table import (
    EPISODE,
    SAMPLED,
    column_of,
    episode_json,
    episode_of,
    flat_ranges,
    ranges_of,
    rows_of,
)
from dapo.training.rollout import Batch, SamplingStart
from dapo.training.selection import Prediction
from dapo.types import EpisodeText, Generation, Group, Verdict

PREFETCHED_BATCH_FILE = "prefetched_batch.json"
RESPONSES_FILE = "prefetched_batch.parquet"  # one row per judged response, groups in the order of the stream
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
        pa.field("judged", pa.string(), nullable=False),  # text and verdict; JSON holds any text, lone surrogates too
    ]
)
_PLAIN_SCHEMA = _SCHEMA.set(_SCHEMA.get_field_index("logprobs"), pa.field("logprobs", pa.list_(pa.float64()), False))
"""Schema of a batch whose rows are Python numbers; it keeps each of their bits."""


@dataclass(frozen=True)
class PrefetchedBatch:
    """The next step's batch, and the state of stream and sampler before it was sampled."""

    batch: Batch
    start: SamplingStart


def write_prefetched_batch(directory: Path, prefetched_batch: PrefetchedBatch) -> None:
    """Write a batch into a checkpoint; with one pyarrow version, equal batches give equal bytes."""
    batch = prefetched_batch.batch
    schema = _SCHEMA if _is_compact(batch) else _PLAIN_SCHEMA
    generations = [generation for group, _ in batch.judged for generation in group.generations]
    if any(generation.sampled for generation in generations):
        schema = schema.append(SAMPLED)
    if any(generation.episode for generation in generations):
        schema = schema.append(EPISODE)
    with pq.ParquetWriter(directory / RESPONSES_FILE, schema, compression="zstd") as writer:
        for start in range(0, len(batch.judged), _GROUPS_PER_CHUNK):
            chunk = batch.judged[start : start + _GROUPS_PER_CHUNK]
            rows = [row for group, outcome in chunk for row in _rows(group, outcome)]
            columns = [column_of([row[field.name] for row in rows], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    state = {
        **prefetched_batch.start._asdict(),
        "group_counts": dict(batch.group_counts),
        "token_counts": dict(batch.token_counts),
        "shortfall": batch.shortfall,
        "epoch": batch.epoch,
        "prediction": batch.prediction and batch.prediction.state(),
    }
    atomic_write_json(directory / PREFETCHED_BATCH_FILE, state)


def read_prefetched_batch(directory: Path, stream: ProblemStream) -> PrefetchedBatch | None:
    """Read the batch of a checkpoint, equal to the one that was written; None if the checkpoint has none.

    Problems come from the stream by their position. Raises CheckpointError where they are not the ones sampled.
    """
    if not (directory / PREFETCHED_BATCH_FILE).exists():
        return None
    state = _read_state(directory)
    with pq.ParquetFile(directory / RESPONSES_FILE) as file:
        # a row group holds whole groups
        chunks = map(file.read_row_group, range(file.num_row_groups))
        judged = tuple(group for chunk in chunks for group in _groups(_read_rows(chunk), stream))
    batch = Batch(
        groups=tuple(group for group, outcome in judged if outcome == "trained"),
        judged=judged,
        group_counts={outcome: state["group_counts"][outcome] for outcome in OUTCOMES},
        token_counts={outcome: state["token_counts"][outcome] for outcome in OUTCOMES},
        shortfall=state["shortfall"],
        epoch=state["epoch"],
        prediction=state.get("prediction") and Prediction.of_state(state["prediction"]),
    )
    return PrefetchedBatch(batch, _start_in(state))


def read_prefetched_start(directory: Path) -> SamplingStart | None:
    """Read the state before a checkpoint's batch was sampled, without its responses; None if it has no batch."""
    return _start_in(_read_state(directory)) if (directory / PREFETCHED_BATCH_FILE).exists() else None


def _read_state(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / PREFETCHED_BATCH_FILE).read_text(encoding="utf-8"))
    return state


def _start_in(state: Mapping[str, Any]) -> SamplingStart:
    return SamplingStart(state["step"], state["position"], state["sampler"])


def _rows(group: Group, outcome: Outcome) -> Iterator[dict[str, Any]]:
    responses = zip(group.generations, group.verdicts, group.texts, group.rewards, strict=True)
    for i, (generation, v, text, reward) in enumerate(responses):
        yield {
            "group_id": group.id,
            "problem_id": group.problem.id,
            "outcome": outcome,
            "prompt_ids": group.prompt_ids if i == 0 else (),
            "request_id": generation.request_id,
            "token_ids": generation.token_ids,
            "logprobs": generation.logprobs,
            "finish": generation.finish,
            "version": generation.version,
            "reward": reward,
            "sampled": flat_ranges(generation),
            "episode": episode_json(generation),
            "judged": json.dumps([text, v.correct, v.score, v.error, v.answer, dict(v.components)]),
        }


def _is_compact(batch: Batch) -> bool:
    """Whether all rows are arrays of dapo's engines; only then they are read back as arrays."""
    generations = (generation for group, _ in batch.judged for generation in group.generations)
    return all(
        isinstance(row, array) and row.typecode == code
        for generation in generations
        for row, code in ((generation.token_ids, _TYPES["token_ids"]), (generation.logprobs, _TYPES["logprobs"]))
    )


def _read_rows(chunk: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table; numbers are in arrays, or in tuples for a batch that is not compact."""
    is_compact = chunk.schema.field("logprobs").type == _SCHEMA.field("logprobs").type
    columns: dict[str, Sequence[Any]] = {}
    for name, column in zip(chunk.column_names, chunk.combine_chunks().itercolumns(), strict=True):
        columns[name] = column.to_pylist() if name not in _TYPES else rows_of(column.chunk(0))
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        for name, code in _TYPES.items():
            row[name] = array(code, row[name].tobytes()) if is_compact and code else tuple(row[name].tolist())
        yield row


def _groups(rows: Iterable[Mapping[str, Any]], stream: ProblemStream) -> Iterator[tuple[Group, Outcome]]:
    for position, of_group in groupby(rows, key=lambda row: row["group_id"]):
        members = list(of_group)
        problem = stream.problem_at(position)
        if problem.id != members[0]["problem_id"]:
            raise CheckpointError(
                f"the checkpoint holds responses to problem {members[0]['problem_id']}, where the data source now has "
                f"{problem.id}; resume with the data the run began with"
            )
        judged = [json.loads(row["judged"]) for row in members]
        episodes = [episode_of(row) for row in members]
        group = Group(
            problem=problem,
            prompt_ids=members[0]["prompt_ids"],
            generations=tuple(
                Generation(**{name: row[name] for name in _GENERATION}, sampled=ranges_of(row), episode=episode)
                for row, episode in zip(members, episodes, strict=True)
            ),
            verdicts=tuple(
                Verdict(correct, score, error, answer=answer, components=components)
                for _, correct, score, error, answer, components in judged
            ),
            id=position,
            texts=tuple(
                text if episode is None else EpisodeText(episode)
                for (text, *_), episode in zip(judged, episodes, strict=True)
            ),
            rewards=tuple(row["reward"] for row in members),
        )
        yield group, members[0]["outcome"]
