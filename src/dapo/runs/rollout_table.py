"""Writes and reads the judged responses of a step: a Parquet table, to query with pandas or
pyarrow.

`rollout_database.py` and `rollout_index.py` query them for the page.
"""

import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from math import fsum, inf, isfinite
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.core.files import atomic_file, damage_of
from dapo.core.ranges import Ranges
from dapo.core.text import quoted
from dapo.core.typed_values import as_text, is_kept
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import OUTCOMES, verdict_name
from dapo.runs.stored_table import stored_table
from dapo.types import Episode, Finish, Generation

_FIELD_CHARS = 1000
"""The longest JSON of a problem's column that each of its responses repeats."""
ROWS_PER_CHUNK = 1024  # bounds memory: at the paper's lengths a whole step is gigabytes of ids


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


ROLLOUT_SCHEMA = pa.schema(
    [
        _required("step", pa.int64()),
        _required("group_id", pa.int64()),  # the problem's position in the stream
        _required("problem_id", pa.string()),
        _required("source", pa.string()),
        _required("sample", pa.int32()),  # index in the group
        # the problem's text, without instruction, system message and chat template
        pa.field("question", pa.string()),
        _required("prompt", pa.string()),  # the text that the model read
        _required("response", pa.string()),
        _required("answer", pa.string()),
        # the problem's other columns as JSON, without long values; null without any
        pa.field("fields", pa.string()),
        pa.field("correct", pa.bool_()),  # null: the verifier gives only a score, or no verdict
        pa.field("score", pa.float64()),  # null: no verdict
        # the score of each verifier as JSON; null with one verifier
        pa.field("components", pa.string()),
        pa.field("error", pa.string()),  # the reason for no verdict; null with a verdict
        pa.field("reward", pa.float64()),  # shaped; null: no verdict
        pa.field("advantage", pa.float64()),  # null: did not train
        _required("prompt_tokens", pa.int32()),
        _required("response_tokens", pa.int32()),
        _required("finish", pa.string()),
        _required("outcome", pa.string()),
        _required("response_ids", pa.list_(pa.int32())),
        pa.field("engine_logprobs", pa.list_(pa.float32())),  # null: `log.rollouts: no-logprobs`
        _required("version", pa.int64()),
        # by audit.verifier; null: not audited, or it gives only a score
        pa.field("audit_correct", pa.bool_()),
        pa.field("audit_score", pa.float64()),  # null: not audited, or no verdict
        # the reason for no verdict; null: not audited, or with a verdict
        pa.field("audit_error", pa.string()),
    ]
)
"""One row per response; `response_tokens` are the sampled ones.

Tables of older runs lack OPTIONAL_COLUMNS.
"""
OPTIONAL_COLUMNS = ("question", "audit_correct", "audit_score", "audit_error")
SAMPLED = pa.field("sampled", pa.list_(pa.int32()))
"""Starts and ends of the sampled ranges of `response_ids`; null: all.

Only tables with observed tokens have it.
"""
EPISODE = pa.field("episode", pa.string())
"""The conversation, rewards and counts of an Episode as JSON; null: no episode.

Only tables with episodes have it.
"""
VERSIONS = pa.field("versions", pa.list_(pa.int32()))
"""Starts and versions of the parts of a response that several policies sampled; null: `version`
sampled all.
"""
BRANCHES = pa.field("branches", pa.string())
"""The prompt and the branches of an agent's episode as JSON; null: the group's prompt, no branch.

Only tables with such episodes have it.
"""
_EPISODE_FIELDS = {field.name: field for field in (SAMPLED, EPISODE, VERSIONS, BRANCHES)}
_WITH_ALL = pa.schema([*ROLLOUT_SCHEMA, *_EPISODE_FIELDS.values()])

TOKEN_COLUMNS = ("response_ids", "engine_logprobs")
CURVES = ("reward", "accuracy", "entropy", "length")
"""The means of a step's responses that are compared: shaped reward, fraction correct, nats per
token, tokens.
"""
_CURVE_COLUMNS = ("problem_id", "outcome", "reward", "correct", "response_tokens")
PREVIEW_CHARS = 400
SHORT_COLUMNS = [
    "step",
    "group_id",
    "sample",
    "problem_id",
    "source",
    "outcome",
    "correct",
    "error",
    "score",
    "reward",
    "advantage",
    "response_tokens",
    "finish",
]
SHOWN_COLUMNS = [*SHORT_COLUMNS, "question", "response", "answer"]
_ALLOWED_VALUES: Mapping[str, Sequence[str]] = {"outcome": OUTCOMES, "finish": get_args(Finish)}
_COUNTS = ("step", "sample", "prompt_tokens", "response_tokens", "version")

# the other columns have distinct values, for which a dictionary wastes time
_DISTINCT_COLUMNS = ("response", "response_ids", "engine_logprobs")
_DICTIONARIES = [name for name in ROLLOUT_SCHEMA.names if name not in _DISTINCT_COLUMNS]


def write_rollouts(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with the columns of ROLLOUT_SCHEMA, optional ones aside, and those of episodes.

    The table has the columns `sampled` and `episode` if the first row has them. With one pyarrow
    version, equal rows give equal bytes. Lone surrogates, which a tokenizer may decode to and UTF-8
    cannot hold, become U+FFFD. The file is written atomically.

    Raises:
        ValueError: a row has other columns.
    """
    remaining_rows = iter(rows)
    first_rows = list(islice(remaining_rows, 1))
    fields = list(ROLLOUT_SCHEMA)
    for row in first_rows:
        fields += [field for name, field in _EPISODE_FIELDS.items() if name in row]
    schema = pa.schema(fields)
    all_rows = chain(first_rows, remaining_rows)
    with (
        atomic_file(Path(path)) as temporary,
        pq.ParquetWriter(
            temporary, schema, compression="zstd", use_dictionary=_DICTIONARIES
        ) as writer,
    ):
        while chunk := list(islice(all_rows, ROWS_PER_CHUNK)):
            writer.write_table(_table(chunk, schema))


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Make a table of rows. Raises ValueError for a row with other columns."""
    for row in rows:
        # pyarrow silently drops unknown columns and fills missing ones with nulls
        differing = (row.keys() | set(OPTIONAL_COLUMNS)) ^ set(schema.names)
        if differing:
            raise ValueError(
                "a rollout row must have exactly the columns of ROLLOUT_SCHEMA; these differ:"
                f" {sorted(differing)}"
            )
    columns = [column_of([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


_OPTIONAL_FIELDS = ("components", "calls", "counts", "ending")
"""Fields of an Episode that most environments leave empty, and that older tables do not have."""


def episode_json(generation: Generation) -> str | None:
    """Return the value of the column `episode` for a response."""
    if generation.episode is None:
        return None
    values = {
        name: value
        for name, value in vars(generation.episode).items()
        if value or name not in _OPTIONAL_FIELDS
    }
    return storable(json.dumps(values, ensure_ascii=False))


def episode_of(row: Mapping[str, Any]) -> Episode | None:
    """Return the episode of the response in a row. Raises ValueError if no run writes it."""
    text = row.get("episode")
    if text is None:
        return None
    try:
        episode = Episode(**json.loads(text))
        is_valid = _has_valid_values(episode)
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        raise ValueError(f"a row has no valid episode: {error}") from None
    if not is_valid:
        raise ValueError(f"a row has no valid episode: {quoted(text)}")
    return episode


def _has_valid_values(episode: Episode) -> bool:
    """Return True if the values of an episode are of its types, with at most one reward per turn.

    May raise TypeError.
    """
    if not (isinstance(episode.messages, list) and isinstance(episode.rewards, list)):
        return False
    for message in episode.messages:
        if not (isinstance(message["role"], str) and isinstance(message["content"], str)):
            return False
    # `type`, not `isinstance`: True is an int, but neither a reward nor a count
    for reward in episode.rewards:
        if type(reward) not in (int, float) or not abs(reward) < inf:
            return False
    for count in (episode.tool_calls, episode.tool_errors):
        if type(count) is not int or count < 0:
            return False
    return (
        len(episode.rewards) <= episode.num_turns
        and isinstance(episode.correct, bool | NoneType)
        and isinstance(episode.error, str | NoneType)
        and isinstance(episode.is_cut, bool)
        and isinstance(episode.ending, str)
    )


def flat_ranges(generation: Generation) -> list[int] | None:
    """Return the value of the column `sampled` for a response."""
    if generation.sampled is None:
        return None
    return list(chain.from_iterable(generation.sampled))


def ranges_of(row: Mapping[str, Any]) -> Ranges | None:
    """Return the sampled ranges of the response in a row. Raises ValueError if one has no end."""
    return _pairs(row.get("sampled"))


def flat_versions(generation: Generation) -> list[int] | None:
    """Return the value of the column `versions` for a response."""
    if generation.versions is None:
        return None
    return list(chain.from_iterable(generation.versions))


def versions_of(row: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Return the versions of the response in a row. Raises ValueError if a part has none."""
    return _pairs(row.get("versions"))


def branches_json(generation: Generation) -> str | None:
    """Return the value of the column `branches` for a response."""
    if generation.prompt_ids is None and not generation.branches and not generation.is_masked:
        return None
    branches = [
        {
            "prompt_ids": None if branch.prompt_ids is None else list(branch.prompt_ids),
            "token_ids": list(branch.token_ids),
            "logprobs": list(branch.logprobs),
            "logprob_type": branch.logprobs.typecode if isinstance(branch.logprobs, array) else "d",
            "finish": branch.finish,
            "version": branch.version,
            "sampled": flat_ranges(branch),
            "versions": flat_versions(branch),
            "is_masked": branch.is_masked,
        }
        for branch in generation.branches
    ]
    prompt_ids = None if generation.prompt_ids is None else list(generation.prompt_ids)
    return json.dumps(
        {"prompt_ids": prompt_ids, "is_masked": generation.is_masked, "branches": branches}
    )


def with_branches(generation: Generation, row: Mapping[str, Any]) -> Generation:
    """Return a response with the prompt and the branches in its row, if there are any.

    Raises ValueError if no run writes them.
    """
    text = row.get("branches")
    if text is None:
        return generation
    try:
        stored = json.loads(text)
        branches = tuple(
            Generation(
                generation.request_id,
                array("i", branch["token_ids"]),
                array(branch["logprob_type"], branch["logprobs"]),
                branch["finish"],
                branch["version"],
                sampled=_pairs(branch["sampled"]),
                versions=_pairs(branch["versions"]),
                prompt_ids=_optional_ids(branch["prompt_ids"]),
                is_masked=branch["is_masked"],
            )
            for branch in stored["branches"]
        )
        return replace(
            generation,
            prompt_ids=_optional_ids(stored["prompt_ids"]),
            branches=branches,
            is_masked=stored["is_masked"],
        )
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        raise ValueError(f"a row has no valid branches: {error}") from None


def _optional_ids(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _pairs(numbers: Sequence[int] | None) -> tuple[tuple[int, int], ...] | None:
    if numbers is None:
        return None
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Make a column of a table.

    Rows of numbers are copied from memory, without a Python object per number.
    """
    if kind == pa.string():
        values = [None if value is None else storable(value) for value in values]
    if not pa.types.is_list(kind) or any(value is None for value in values):
        return pa.array(values, kind)
    dtype = kind.value_type.to_pandas_dtype()
    numbers = np.concatenate([np.asarray(row, dtype) for row in values])
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(numbers), type=kind)


def rows_of(column: pa.ListArray) -> list[NDArray[Any]]:
    """Return the rows of a column of lists without nulls, as views."""
    numbers = column.values.to_numpy()
    ends = column.offsets.to_numpy()
    return [numbers[start:end] for start, end in pairwise(ends)]


def short_fields(fields: Mapping[str, Any], *, known: Sequence[str]) -> str | None:
    """Format the columns of a problem as JSON, without long values; None without any.

    Args:
        fields: the columns of the problem.
        known: texts that are left out, because the table has a column for them, such as the answer.
    """
    columns = {}
    for name, value in fields.items():
        # JSON has no dates
        plain = as_text(value) if is_kept(value) else value
        if plain is None or (isinstance(plain, str) and plain in known):
            continue
        try:
            is_short = len(json.dumps(plain, ensure_ascii=False)) <= _FIELD_CHARS
        except (TypeError, ValueError):  # of a type that JSON has not
            continue
        if is_short:
            columns[name] = plain
    return json.dumps(columns) if columns else None


def storable(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD, so that UTF-8 can encode it."""
    if text.isascii():  # a flag of the string, which costs nothing
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def read_rollouts(
    paths: Sequence[Path],
    columns: Sequence[str] | None = None,
    *,
    groups: Collection[int] | None = None,
) -> pa.Table:
    """Read tables of judged responses as one.

    Args:
        paths: the tables.
        columns: the columns to read; None: all that the first table has except TOKEN_COLUMNS.
        groups: the ids of the groups whose rows are read; None: all rows.

    Raises:
        DataError: a table is damaged or not a run's.
    """
    names = columns or [name for name in all_columns(*paths) if name not in TOKEN_COLUMNS]
    parts: list[pa.Table] = []
    for path in paths:
        parts += _parts(path, names, groups)
    if not parts:
        # `concat_tables` refuses an empty list
        parts.append(_WITH_ALL.empty_table().select(names))
    return pa.concat_tables(parts)


def _parts(path: Path, columns: Sequence[str], groups: Collection[int] | None) -> list[pa.Table]:
    """Read columns of a table: its chunks that hold rows of the groups, or all at once."""
    with stored_table(path, _WITH_ALL) as table:
        # a step without observations or episodes has no columns for them
        absent = [name for name in _EPISODE_FIELDS if name in columns and name not in table.names]
        present = [name for name in columns if name not in absent]
        parts = []
        if groups is None:
            parts.append(_checked(table.read(present)))
        else:
            group_ids = pa.array(groups, pa.int64())
            # all chunks' ids before any other column: most chunks hold no row of the groups
            selections = []
            for i in table.chunks:
                chunk = table.read(["group_id"], [i])
                selections.append(pc.is_in(chunk["group_id"], group_ids))
            for i, selected in enumerate(selections):
                if pc.any(selected).as_py():
                    parts.append(_checked(table.read(present, [i]).filter(selected)))
    return [_with_nulls(part, absent).select(columns) for part in parts]


def _with_nulls(part: pa.Table, names: Sequence[str]) -> pa.Table:
    """Add columns of episodes without values."""
    for name in names:
        field = _EPISODE_FIELDS[name]
        part = part.append_column(field, pa.nulls(len(part), field.type))
    return part


def _checked(rows: pa.Table) -> pa.Table:
    """Return rows of a table. Raises ValueError for values that no run writes."""
    for name in rows.column_names:
        column = rows[name]
        if name in _ALLOWED_VALUES:
            is_allowed = pc.is_in(column, pa.array(_ALLOWED_VALUES[name]))
            if not pc.all(is_allowed).as_py():
                raise ValueError(f"a row has an unknown {name}")
        if name in _COUNTS and rows.num_rows and pc.min(column).as_py() < 0:
            raise ValueError(f"a row has a negative {name}")
        if name == SAMPLED.name and _has_odd_length(column):
            raise ValueError("a sampled range of a row has no end")
        if name == VERSIONS.name and _has_odd_length(column):
            raise ValueError("a part of a row has no version")
        if name == EPISODE.name:
            for text in column.to_pylist():
                episode_of({name: text})
    return rows


def _has_odd_length(lists: pa.ChunkedArray) -> bool:
    """Return True if a list of a column holds half a pair."""
    last_bits = pc.bit_wise_and(pc.list_value_length(lists), 1)
    return bool(pc.any(last_bits.cast(pa.bool_())).as_py())


def all_columns(path: Path, *more: Path) -> list[str]:
    """Read the names of a table's columns, with those of episodes that one of the other tables has.

    Raises DataError for a table that no run has written.
    """
    with stored_table(path, _WITH_ALL) as table:
        names = list(table.names)
    if more:
        absent = [name for name in _EPISODE_FIELDS if name not in names]
        if absent:
            other_names: set[str] = set()
            for other in more:
                other_names.update(all_columns(other))
            names += [name for name in absent if name in other_names]
    return names


def iterate_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table one chunk at a time, so that a reader may stop early.

    Without `columns`, all except the log-probabilities are read.
    """
    with stored_table(path, _WITH_ALL) as table:
        names = list(columns) or [name for name in table.names if name != "engine_logprobs"]
        for i in table.chunks:
            for batch in _checked(table.read(names, [i])).to_batches(ROWS_PER_CHUNK):
                yield from batch.to_pylist()


def read_rows(path: Path, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Read some rows of a table of responses as the page shows them; only their chunks are read."""
    records = []
    with stored_table(path, _WITH_ALL) as table:
        start = 0
        for i, length in enumerate(table.chunk_rows):
            chunk_rows = [row for row in rows if start <= row < start + length]
            if chunk_rows:
                columns = _shown_columns(table.names)
                chunk = table.read(columns, [i]).take([row - start for row in chunk_rows])
                contents = _checked(chunk).to_pylist()
                for row, record in zip(chunk_rows, contents, strict=True):
                    records.append(_preview(record, row))
            start += length
    return records


def _shown_columns(names: Sequence[str]) -> list[str]:
    """Return the columns that the page shows of a table with these columns."""
    # older runs have no question
    columns = [name if name in names else "prompt" for name in SHOWN_COLUMNS]
    if EPISODE.name in names:
        columns.append(EPISODE.name)
    return columns


def short_rows(path: Path, text: str = "") -> pa.Table:
    """Read the short columns, with `row`, of the responses that contain a text in lower case."""
    with stored_table(path, _WITH_ALL) as table:
        rows = _checked(table.read(SHORT_COLUMNS))
        rows = rows.append_column("row", pa.array(range(rows.num_rows), pa.int32()))
        if not text:
            return rows
        matches: list[pa.Array] = []
        # a chunk at a time: the responses of a step may take gigabytes
        for i in table.chunks:
            responses = table.read(["response"], [i])["response"]
            matches += pc.match_substring(pc.utf8_lower(responses), text).chunks
        return rows.filter(pa.chunked_array(matches, pa.bool_()))


def newest_response(run: RunDirectory) -> dict[str, Any] | None:
    """Return the first response of the newest stored step, without its tokens; None: there is none."""
    tables = run.rollout_tables()
    if not tables:
        return None
    with stored_table(tables[max(tables)], _WITH_ALL) as table:
        first = table.read(_shown_columns(table.names), table.chunks[:1]).slice(0, 1)
    rows: list[dict[str, Any]] = first.to_pylist()
    if not rows:
        return None
    row = rows[0]
    row["question"] = row.get("question") or row.pop("prompt", "")
    return row


def _preview(record: dict[str, Any], row: int) -> dict[str, Any]:
    """Add the verdict's name and the number of turns to a row, and cut its texts for the page."""
    question = record.get("question") or record.pop("prompt", "")
    episode = episode_of(record)
    record.pop(EPISODE.name, None)
    record["question"] = question[:PREVIEW_CHARS]
    record["response"] = record["response"][:PREVIEW_CHARS]
    record["row"] = row
    record["verdict"] = verdict_name(record.pop("correct"), record["error"])
    record["tokens"] = record.pop("response_tokens")
    record["turns"] = None if episode is None else episode.num_turns
    record["branches"] = None if episode is None else episode.counts.get("branches")
    return record


def problem_means(table: Path) -> dict[str, dict[str, float]]:
    """Compute each curve's mean over a problem's decided responses in a step, by problem id.

    The entropy is estimated as the mean of -log p over the sampled tokens; it is missing if the
    table has no log-probabilities. A problem without any verdict is missing in the rewards.

    Raises DataError for a damaged table.
    """
    rows = read_rollouts([table], [*_CURVE_COLUMNS, "engine_logprobs", BRANCHES.name])
    rows = rows.filter(pc.not_equal(rows["outcome"], "excess"))
    logprobs = rows["engine_logprobs"]
    surprisal = np.full(rows.num_rows, np.nan)
    if not logprobs.null_count:
        # the row of each token, to add up the tokens of a row
        lengths = pc.list_value_length(logprobs).to_numpy()
        token_rows = np.repeat(np.arange(rows.num_rows), lengths)
        token_logprobs = pc.list_flatten(logprobs).to_numpy(zero_copy_only=False)
        surprisal = -np.bincount(token_rows, token_logprobs.astype(np.float64), rows.num_rows)
        # `response_tokens` counts those of branches, too
        with damage_of(table):
            for row, text in enumerate(rows[BRANCHES.name].to_pylist()):
                surprisal[row] += _surprisal_of_branches(text)
    rows = rows.append_column("surprisal", pa.array(surprisal))
    sums = [("response_tokens", "sum"), ("surprisal", "sum")]
    means = [("reward", "mean"), ("correct", "mean"), ("response_tokens", "mean")]
    # threads may change the order of the rows, and with it the rounding of sums
    aggregates = rows.group_by("problem_id", use_threads=False).aggregate([*means, *sums])
    entropy = pc.divide(
        aggregates["surprisal_sum"], aggregates["response_tokens_sum"].cast(pa.float64())
    )
    columns = (
        aggregates["reward_mean"],
        aggregates["correct_mean"],
        entropy,
        aggregates["response_tokens_mean"],
    )
    curves: dict[str, dict[str, float]] = {}
    for name, column in zip(CURVES, columns, strict=True):
        curves[name] = {}
        entries = zip(aggregates["problem_id"].to_pylist(), column.to_pylist(), strict=True)
        for problem, mean in entries:
            if mean is not None and isfinite(mean):
                curves[name][problem] = mean
    return curves


def _surprisal_of_branches(text: str | None) -> float:
    """Return the sum of -log p over an episode's branches; `text` is the value of their column.

    Raises ValueError if no run writes it.
    """
    response = Generation("", (), (), "stop", 0)
    branches = with_branches(response, {BRANCHES.name: text}).branches
    return -fsum(chain.from_iterable(branch.logprobs for branch in branches))
