"""The groups in a checkpoint, as JSON and Parquet: the next step's batch, and the groups that go on.

Both are tables with a row per response and one JSON file each; the names and columns are those of
every earlier version.
"""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.core.errors import CheckpointError
from dapo.core.files import atomic_write_json
from dapo.data.stream import ProblemStream
from dapo.engines.engine import Unfinished, float_array
from dapo.runs.outcomes import Outcome
from dapo.runs.rollout_table import (
    BRANCHES,
    EPISODE,
    SAMPLED,
    VERSIONS,
    branches_json,
    column_of,
    episode_json,
    episode_of,
    flat_ranges,
    flat_versions,
    ranges_of,
    rows_of,
    storable,
    versions_of,
    with_branches,
)
from dapo.sampling.batch import SamplingStart
from dapo.sampling.continuous import Kept, KeptGroup, PrefetchedBatch, generation_of
from dapo.sampling.queue import Batch
from dapo.sampling.selection import Decision, Prediction
from dapo.types import EpisodeText, Generation, Group, Problem, Verdict

BATCH_FILE = "prefetched_batch.json"
BATCH_RESPONSES_FILE = "prefetched_batch.parquet"  # the judged responses, in the stream's order
KEPT_FILE = "kept_groups.json"
KEPT_RESPONSES_FILE = "kept_groups.parquet"  # the responses, finished or not
SAVED_FILES = {BATCH_FILE, BATCH_RESPONSES_FILE, KEPT_FILE, KEPT_RESPONSES_FILE}
_GROUPS_PER_CHUNK = 16  # bounds memory: at the paper's lengths a batch is gigabytes of ids
_LOGPROBS = pa.field("logprobs", pa.list_(pa.float32()), nullable=False)
_EXACT_LOGPROBS = pa.field("logprobs", pa.list_(pa.float64()), nullable=False)
"""Used if a response has log-probabilities that float32 would change."""
_FIELDS = (
    pa.field("group_id", pa.int64(), nullable=False),
    pa.field("problem_id", pa.string(), nullable=False),
    pa.field("outcome", pa.string(), nullable=False),
    # in a group's first row only; empty in kept groups, whose JSON has them
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("request_id", pa.string(), nullable=False),
    pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
    _LOGPROBS,
    pa.field("finish", pa.string(), nullable=False),
    pa.field("version", pa.int64(), nullable=False),
    pa.field("reward", pa.float64()),  # shaped; null where the verdict is an error
    # text and verdict; JSON holds any text, lone surrogates too
    pa.field("judged", pa.string(), nullable=False),
)


@dataclass(frozen=True)
class SavedGroups:
    """What a checkpoint holds of sampling, besides the stream and the keep rate."""

    prefetched: PrefetchedBatch | None = None
    kept: Kept = field(default_factory=Kept)


def write_groups(directory: Path, saved: SavedGroups) -> None:
    """Write groups into a checkpoint; waits for the verdicts of kept ones.

    With one pyarrow version, equal groups give equal bytes.
    """
    if saved.prefetched is not None:
        _write_batch(directory, saved.prefetched)
    if saved.kept.groups:
        _write_kept(directory, saved.kept)


def read_groups(directory: Path, stream: ProblemStream) -> SavedGroups:
    """Read what `write_groups` has written into a checkpoint.

    Problems come from the stream by their position. Raises CheckpointError where they are not the
    ones sampled.
    """
    prefetched = None
    kept = Kept()
    if (directory / BATCH_FILE).exists():
        prefetched = _read_batch(directory, stream)
    if (directory / KEPT_FILE).exists():
        kept = _read_kept(directory, stream)
    return SavedGroups(prefetched, kept)


def read_sampling_start(directory: Path) -> SamplingStart | None:
    """Read the state before a checkpoint's groups were sampled; None without any.

    Without a batch the state of the sampler is the checkpoint's own, and empty here.
    """
    if (directory / BATCH_FILE).exists():
        return _start_in(_read_json(directory / BATCH_FILE))
    if (directory / KEPT_FILE).exists():
        first = _read_json(directory / KEPT_FILE)["groups"][0]
        return SamplingStart(first["step"], first["position"], {})
    return None


# --- the prefetched batch


def _write_batch(directory: Path, prefetched: PrefetchedBatch) -> None:
    batch = prefetched.batch
    start = prefetched.start
    groups = [
        _StoredGroup(
            position=group.id,
            problem_id=group.problem.id,
            outcome=outcome,
            prompt_ids=group.prompt_ids,
            generations=group.generations,
            texts=group.texts,
            verdicts=group.verdicts,
            rewards=group.rewards,
        )
        for group, outcome in batch.judged
    ]
    _write_table(directory / BATCH_RESPONSES_FILE, groups)
    state = {
        "step": start.step,
        "position": start.position,
        "sampler": start.sampler,
        "group_counts": dict(batch.group_counts),
        "token_counts": dict(batch.token_counts),
        "shortfall": batch.shortfall,
        "epoch": batch.epoch,
        "prediction": batch.prediction and batch.prediction.state(),
    }
    if batch.recomputed_tokens:
        state["recomputed_tokens"] = batch.recomputed_tokens
    atomic_write_json(directory / BATCH_FILE, state)


def _read_batch(directory: Path, stream: ProblemStream) -> PrefetchedBatch:
    state = _read_json(directory / BATCH_FILE)
    rows = _read_table(directory / BATCH_RESPONSES_FILE)
    judged: list[tuple[Group, Outcome]] = []
    for _, group_rows in groupby(rows, key=lambda row: row["group_id"]):
        stored = _StoredGroup.of(list(group_rows))
        group = Group(
            problem=_problem_at(stream, stored.position, stored.problem_id),
            prompt_ids=stored.prompt_ids,
            generations=stored.generations,
            verdicts=stored.verdicts,
            id=stored.position,
            texts=stored.texts,
            rewards=stored.rewards,
        )
        judged.append((group, stored.outcome))
    batch = Batch(
        groups=tuple(group for group, outcome in judged if outcome == "trained"),
        judged=tuple(judged),
        group_counts=state["group_counts"],
        token_counts=state["token_counts"],
        shortfall=state["shortfall"],
        epoch=state["epoch"],
        prediction=state.get("prediction") and Prediction.of_state(state["prediction"]),
        recomputed_tokens=state.get("recomputed_tokens", 0),
    )
    return PrefetchedBatch(batch, _start_in(state))


def _start_in(state: Mapping[str, Any]) -> SamplingStart:
    return SamplingStart(state["step"], state["position"], state["sampler"])


# --- the kept groups


def _write_kept(directory: Path, kept: Kept) -> None:
    groups = [
        _StoredGroup(
            position=group.position,
            problem_id=group.problem.id,
            outcome="kept",
            generations=tuple(map(generation_of, group.responses)),
            texts=group.texts,
            verdicts=() if group.verdicts is None else group.verdicts.result(),
        )
        for group in kept.groups
    ]
    _write_table(directory / KEPT_RESPONSES_FILE, groups)
    records = [
        {
            "step": group.step,
            "position": group.position,
            "problem_id": group.problem.id,
            "prompt_ids": group.prompt_ids,
            "version": group.version,
            "lag": group.lag,
            "lags": [
                part.lag if isinstance(part, Unfinished) else None for part in group.responses
            ],
            "is_finished": [isinstance(part, Generation) for part in group.responses],
        }
        for group in kept.groups
    ]
    decisions = [asdict(decision) for decision in kept.decisions]
    atomic_write_json(directory / KEPT_FILE, {"groups": records, "decisions": decisions})


def _read_kept(directory: Path, stream: ProblemStream) -> Kept:
    state = _read_json(directory / KEPT_FILE)
    rows = _read_table(directory / KEPT_RESPONSES_FILE)
    groups = []
    for record in state["groups"]:
        # a group that begins again has no responses
        stored = _StoredGroup.of([next(rows) for _ in record["is_finished"]])
        verdicts: Future[tuple[Verdict, ...]] | None = None
        if stored.verdicts:
            verdicts = Future()
            verdicts.set_result(stored.verdicts)
        responses = tuple(
            generation if is_finished else Unfinished(generation, lag)
            for generation, is_finished, lag in zip(
                stored.generations, record["is_finished"], record["lags"], strict=True
            )
        )
        groups.append(
            KeptGroup(
                record["step"],
                record["position"],
                _problem_at(stream, record["position"], record["problem_id"]),
                tuple(record["prompt_ids"]),
                responses,
                texts=stored.texts,
                verdicts=verdicts,
                lag=record["lag"],
            )
        )
    return Kept(tuple(groups), tuple(Decision(**record) for record in state["decisions"]))


# --- tables of responses


@dataclass(frozen=True)
class _StoredGroup:
    """A group as rows of a table, one per response."""

    position: int = 0
    problem_id: str = ""
    outcome: Any = ""
    prompt_ids: tuple[int, ...] = ()
    generations: tuple[Generation, ...] = ()
    texts: tuple[str, ...] = ()  # with verdicts
    verdicts: tuple[Verdict, ...] = ()  # none: the group is not complete
    rewards: tuple[float | None, ...] = ()

    def rows(self) -> Iterator[dict[str, Any]]:
        for i, generation in enumerate(self.generations):
            yield {
                "group_id": self.position,
                "problem_id": self.problem_id,
                "outcome": self.outcome,
                "prompt_ids": self.prompt_ids if i == 0 else (),
                "request_id": generation.request_id,
                "token_ids": generation.token_ids,
                "logprobs": generation.logprobs,
                "finish": generation.finish,
                "version": generation.version,
                "reward": self.rewards[i] if self.rewards else None,
                "judged": _judged(self.texts[i], self.verdicts[i]) if self.verdicts else "null",
                "sampled": flat_ranges(generation),
                "episode": episode_json(generation),
                "versions": flat_versions(generation),
                "branches": branches_json(generation),
            }

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "_StoredGroup":
        if not rows:
            return cls()
        generations = tuple(map(_generation, rows))
        judged = [json.loads(row["judged"]) for row in rows]
        is_judged = judged[0] is not None
        return cls(
            position=rows[0]["group_id"],
            problem_id=rows[0]["problem_id"],
            outcome=rows[0]["outcome"],
            prompt_ids=tuple(rows[0]["prompt_ids"].tolist()),
            generations=generations,
            texts=tuple(map(_text, judged, generations)) if is_judged else (),
            verdicts=tuple(map(_verdict, judged)) if is_judged else (),
            rewards=tuple(row["reward"] for row in rows),
        )


def _write_table(path: Path, groups: Sequence[_StoredGroup]) -> None:
    generations = [generation for group in groups for generation in group.generations]
    fields = list(_FIELDS)
    if not all(_is_float32(generation.logprobs) for generation in generations):
        fields[fields.index(_LOGPROBS)] = _EXACT_LOGPROBS
    if any(generation.sampled for generation in generations):
        fields.append(SAMPLED)
    if any(generation.episode for generation in generations):
        fields.append(EPISODE)
    if any(generation.versions for generation in generations):
        fields.append(VERSIONS)
    if any(branches_json(generation) for generation in generations):
        fields.append(BRANCHES)
    schema = pa.schema(fields)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, len(groups), _GROUPS_PER_CHUNK):
            chunk = groups[start : start + _GROUPS_PER_CHUNK]
            rows = [row for group in chunk for row in group.rows()]
            if rows:
                columns = [
                    column_of([row[column.name] for row in rows], column.type) for column in schema
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _is_float32(logprobs: Sequence[float]) -> bool:
    return isinstance(logprobs, array) and logprobs.typecode == "f"


def _read_table(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table; numbers are views of a chunk's memory."""
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):  # a row group holds whole groups
            chunk = file.read_row_group(number).combine_chunks()
            columns: dict[str, Sequence[Any]] = {}
            for name, column in zip(chunk.column_names, chunk.itercolumns(), strict=True):
                if name in ("prompt_ids", "token_ids", "logprobs"):
                    columns[name] = rows_of(column.chunk(0))
                else:
                    columns[name] = column.to_pylist()
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


def _generation(row: Mapping[str, Any]) -> Generation:
    generation = Generation(
        row["request_id"],
        array("i", row["token_ids"].tobytes()),
        _logprobs(row["logprobs"]),
        row["finish"],
        row["version"],
        sampled=ranges_of(row),
        episode=episode_of(row),
        versions=versions_of(row),
    )
    return with_branches(generation, row)


def _logprobs(row: NDArray[Any]) -> "array[float]":
    if row.dtype == np.float32:
        return array("f", row.tobytes())
    return float_array(array("d", row.tobytes()))


def _judged(text: str, v: Verdict) -> str:
    values = [text, v.correct, v.score, v.error, v.answer, dict(v.components)]
    return json.dumps([*values, v.deciders] if v.deciders else values)


def _verdict(judged: Sequence[Any]) -> Verdict:
    _, correct, score, error, answer, components, *more = judged
    deciders = tuple(more[0]) if more else ()
    return Verdict(correct, score, error, answer=answer, components=components, deciders=deciders)


def _text(judged: Sequence[Any], generation: Generation) -> str:
    return judged[0] if generation.episode is None else EpisodeText(generation.episode)


def _problem_at(stream: ProblemStream, position: int, problem_id: str) -> Problem:
    problem = stream.problem_at(position)
    # a table holds no lone surrogates, and the JSON of kept groups does
    if storable(problem.id) != storable(problem_id):
        raise CheckpointError(
            f"the checkpoint holds responses to problem {problem_id}, where the data source now has"
            f" {problem.id}; resume with the data the run began with"
        )
    return problem


def _read_json(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state
