"""A batch that was sampled before the step that trains on it, and how a checkpoint holds it: JSON and Parquet."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_json
from dapo.data.stream import ProblemStream
from dapo.training.dynamic_sampling import OUTCOMES, Outcome
from dapo.training.rollout import Batch, SamplingStart
from dapo.types import Generation, Group, Verdict

PREFETCHED_BATCH_FILE = "prefetched_batch.json"
RESPONSES_FILE = "prefetched_batch.parquet"  # one row per judged response, groups in the order of the stream

_GROUPS_PER_CHUNK = 64  # bounds memory: at the paper's lengths a batch is gigabytes of ids

_SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),  # in a group's first row only
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float64()), nullable=False),  # the engine's floats, every bit of them
        pa.field("finish", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),  # shaped; null where the verdict is an error
        pa.field("judged", pa.string(), nullable=False),  # text and verdict; JSON holds any text, lone surrogates too
    ]
)


@dataclass(frozen=True)
class PrefetchedBatch:
    """What the next step will train on, and where the sampling of it began."""

    batch: Batch
    start: SamplingStart


def write_prefetched_batch(directory: Path, prefetched_batch: PrefetchedBatch) -> None:
    """Put a batch into a checkpoint; equal batches give equal bytes (of one pyarrow version)."""
    batch = prefetched_batch.batch
    with pq.ParquetWriter(directory / RESPONSES_FILE, _SCHEMA, compression="zstd") as writer:
        for start in range(0, len(batch.judged), _GROUPS_PER_CHUNK):
            chunk = batch.judged[start : start + _GROUPS_PER_CHUNK]
            rows = [row for group, outcome in chunk for row in _rows(group, outcome)]
            writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))
    state = {
        **prefetched_batch.start._asdict(),
        "group_counts": dict(batch.group_counts),
        "token_counts": dict(batch.token_counts),
        "shortfall": batch.shortfall,
        "reason": batch.reason,
        "epoch": batch.epoch,
    }
    atomic_write_json(directory / PREFETCHED_BATCH_FILE, state)


def read_prefetched_batch(directory: Path, stream: ProblemStream) -> PrefetchedBatch | None:
    """The batch that a checkpoint holds, equal to the one that was written; None if it holds none.

    Problems come from the stream by their position. Raises CheckpointError where it has others there.
    """
    if not (directory / PREFETCHED_BATCH_FILE).exists():
        return None
    state = json.loads((directory / PREFETCHED_BATCH_FILE).read_text(encoding="utf-8"))
    with pq.ParquetFile(directory / RESPONSES_FILE) as file:
        rows = [row for chunk in file.iter_batches() for row in chunk.to_pylist()]
    judged = tuple(_groups(rows, stream))
    batch = Batch(
        groups=tuple(group for group, outcome in judged if outcome == "trained"),
        judged=judged,
        group_counts={outcome: state["group_counts"][outcome] for outcome in OUTCOMES},
        token_counts={outcome: state["token_counts"][outcome] for outcome in OUTCOMES},
        shortfall=state["shortfall"],
        reason=state["reason"],
        epoch=state["epoch"],
    )
    return PrefetchedBatch(batch, SamplingStart(state["step"], state["position"], state["sampler"]))


def _rows(group: Group, outcome: Outcome) -> Iterator[dict[str, Any]]:
    responses = zip(group.generations, group.verdicts, group.texts, group.rewards, strict=True)
    for i, (generation, v, text, reward) in enumerate(responses):
        yield {
            "group_id": group.id,
            "problem_id": group.problem.id,
            "outcome": outcome,
            "prompt_ids": np.array(group.prompt_ids if i == 0 else (), dtype=np.int32),
            "request_id": generation.request_id,
            "token_ids": np.array(generation.token_ids, dtype=np.int32),
            "logprobs": np.array(generation.logprobs, dtype=np.float64),
            "finish": generation.finish,
            "version": generation.version,
            "reward": reward,
            "judged": json.dumps([text, v.correct, v.score, v.error, v.answer, dict(v.components)]),
        }


def _groups(rows: Sequence[Mapping[str, Any]], stream: ProblemStream) -> Iterator[tuple[Group, Outcome]]:
    for position, of_group in groupby(rows, key=lambda row: row["group_id"]):
        members = list(of_group)
        problem = stream.problem_at(position)
        if problem.id != members[0]["problem_id"]:
            raise CheckpointError(
                f"the checkpoint holds responses to problem {members[0]['problem_id']}, where the data source now has "
                f"{problem.id}; resume with the data the run began with"
            )
        judged = [json.loads(row["judged"]) for row in members]
        group = Group(
            problem=problem,
            prompt_ids=tuple(members[0]["prompt_ids"]),
            generations=tuple(
                Generation(
                    row["request_id"], tuple(row["token_ids"]), tuple(row["logprobs"]), row["finish"], row["version"]
                )
                for row in members
            ),
            verdicts=tuple(
                Verdict(correct, score, error, answer=answer, components=components)
                for _, correct, score, error, answer, components in judged
            ),
            id=position,
            texts=tuple(text for text, *_ in judged),
            rewards=tuple(row["reward"] for row in members),
        )
        yield group, members[0]["outcome"]
