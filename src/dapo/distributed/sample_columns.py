"""Samples on their way to a trainer rank, or from one rank to another: a short header, and their rows as plain bytes.

Rows keep their type, so a sample is on the other side what it was here, to the bit. Nothing that arrives is unpickled.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from dapo.distributed.channel import Buffers
from dapo.types import Sample

TYPES = {"response_ids": "q", "engine_logprobs": "d", "old_logprobs": "d", "mask": "b"}
"""The columns with a value for each response token, and the `array` type of rows that are no arrays."""
SCALARS = ("group_id", "index", "reward", "advantage", "weight")
IDS = ("response_ids",)
REST = ("engine_logprobs", "mask")
ALL = tuple(TYPES)


def encode(samples: Mapping[int, Sample], columns: Sequence[str]) -> Buffers:
    """Samples by number, with some of their columns, as buffers. The rows are not copied: they must not change."""
    prompts: dict[int, tuple[int, ...]] = {}
    for sample in samples.values():
        prompts.setdefault(sample.group_id, sample.prompt_ids)
    header: dict[str, Any] = {
        "numbers": list(samples),
        "prompt_lengths": {group: len(prompt) for group, prompt in prompts.items()},
        **{name: [getattr(sample, name) for sample in samples.values()] for name in SCALARS},
    }
    buffers: list[Any] = [array("q", prompt) for prompt in prompts.values()]
    for name in columns:
        rows = [_as_array(name, sample) for sample in samples.values()]
        header[name] = {"types": "".join(row.typecode for row in rows), "lengths": [len(row) for row in rows]}
        buffers += rows
    return Buffers.of([json.dumps(header).encode(), *buffers])


def decode(buffers: Buffers) -> dict[int, Sample]:
    """The samples of `encode`; the columns that were left out are empty, and `old_logprobs` None."""
    header, rows = json.loads(buffers.parts[0].tobytes()), iter(buffers.parts[1:])
    prompts = {int(group): tuple(_from_bytes("q", next(rows))) for group in header["prompt_lengths"]}
    columns = {
        name: [_from_bytes(code, next(rows)) for code in header[name]["types"]] for name in TYPES if name in header
    }
    samples = {}
    for i, number in enumerate(header["numbers"]):
        values: dict[str, Any] = {"response_ids": (), "engine_logprobs": (), "old_logprobs": None, "mask": ()}
        values |= {name: header[name][i] for name in SCALARS} | {name: found[i] for name, found in columns.items()}
        samples[number] = Sample(prompt_ids=prompts[values["group_id"]], **values)
    return samples


def join(buffers: Buffers) -> bytes:
    """The buffers of `encode` as one."""
    return b"".join([len(buffers.parts[0]).to_bytes(8, "little"), *(part.data for part in buffers.parts)])


def split(joined: bytes) -> Buffers:
    """The buffers of `join`."""
    view, start = memoryview(joined), 8
    end = start + int.from_bytes(view[:start], "little")
    header = json.loads(bytes(view[start:end]))
    sizes = [8 * length for length in header["prompt_lengths"].values()]
    for name in TYPES:
        if name in header:
            types, lengths = header[name]["types"], header[name]["lengths"]
            sizes += [array(code).itemsize * length for code, length in zip(types, lengths, strict=True)]
    ends = list(accumulate([end, *sizes]))
    return Buffers.of([view[start:end], *(view[a:b] for a, b in pairwise(ends))])


def _as_array(name: str, sample: Sample) -> "array[Any]":
    row = getattr(sample, name)
    return row if isinstance(row, array) else array(TYPES[name], row)


def _from_bytes(code: str, buffer: Any) -> "array[Any]":
    row = array(code)
    row.frombytes(buffer.data)
    return row
