"""Rows made by hand in the form of released files (AIME, DAPO-Math, GSM8K), and those files where
they are.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from helpers.paths import SHARED_DATA, TESTS

ROWS = TESTS / "data" / "released"
GSM8K_TRAIN = ROWS / "gsm8k_train.jsonl"
GSM8K_TEST = ROWS / "gsm8k_test.jsonl"
AIME_COPIES = 4  # the released file has 32 of each of its 30 problems

_PROMPT = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
_REWARD_MODEL = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
_AIME = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _PROMPT),
        ("ability", pa.string()),
        ("reward_model", _REWARD_MODEL),
        (
            "extra_info",
            pa.struct([("index", pa.int64()), ("raw_problem", pa.string()), ("split", pa.null())]),
        ),
        ("__index_level_0__", pa.int64()),
    ]
)
_DAPO_MATH = pa.schema(
    [
        ("prompt", _PROMPT),
        ("data_source", pa.string()),
        ("ability", pa.string()),
        ("reward_model", _REWARD_MODEL),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of `tests/data/released/NAME.jsonl`."""
    return [
        json.loads(line)
        for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def aime_parquet(folder: Path) -> Path:
    """Three problems in four copies each, mixed, with the columns and types of the released AIME
    file.
    """
    rows = rows_of("aime") * AIME_COPIES
    mixed = [row for start in range(5) for row in rows[start::5]]
    return _written(folder / "aime-2024.parquet", mixed, _AIME)


def dapo_math_parquet(folder: Path) -> Path:
    """Ten rows, one a copy and one with another answer to the same question, in the form of
    DAPO-Math-17k.
    """
    return _written(folder / "dapo-math-17k.parquet", rows_of("dapo_math"), _DAPO_MATH)


def released(name: str) -> list[Path]:
    """The released file below the shared data folder, if this machine has it."""
    path = SHARED_DATA / name
    return [path] if path.is_file() else []


def _written(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path
