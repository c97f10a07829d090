"""The samples of a step on a rank: sent once as columns of bytes, then named by number."""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.core.constant_rows import constant_row
from dapo.distributed.channel import Buffers
from dapo.policy.packing import DUMMY_MICROBATCH, RankMicrobatch
from dapo.types import Sample

TYPES = {"response_ids": "q", "engine_logprobs": "d", "old_logprobs": "d", "mask": "b"}
"""The columns with a value per response token, each with the type code of `array` that a row of
any other kind gets.
"""
SCALARS = ("group_id", "index", "reward", "advantage")
IDS = ("response_ids",)
REMAINING_COLUMNS = ("engine_logprobs", "mask")
ALL = tuple(TYPES)


def encode(samples: Mapping[int, Sample], columns: Sequence[str]) -> Buffers:
    """Encode columns of samples by number as buffers.

    The rows are not copied: they must not change.

    Prompts, rewards and advantages go with the response ids. A constant mask is sent as its length.

    Args:
        samples: the samples by number.
        columns: names in `TYPES`; with `response_ids` a rank can decode whole samples.
    """
    header: dict[str, Any] = {"numbers": list(samples)}
    buffers: list[Any] = []
    sequence = list(samples.values())
    if "response_ids" in columns:
        for name in SCALARS:
            header[name] = [getattr(sample, name) for sample in sequence]
        buffers += _encode_prompts(sequence, header)
        header["sampled"] = [sample.sampled for sample in sequence]
    for name in columns:
        buffers += _encode_column(name, sequence, header)
    text = json.dumps(header)
    # spaces fill the header up to a multiple of 8 bytes, so that the rows behind it are aligned
    num_words = ceil(len(text) / 8)
    aligned_text = text.ljust(8 * num_words)
    return Buffers.of([aligned_text.encode(), *buffers])


def _encode_prompts(samples: Sequence[Sample], header: dict[str, Any]) -> "list[array[int]]":
    """Return the distinct prompts, and write into the header which one each sample has."""
    prompts: list[array[int]] = []
    # an object that several samples share is sent once; in a group an agent's branches have
    # prompts of their own
    place_of: dict[int, int] = {}
    places: list[int] = []
    for sample in samples:
        identity = id(sample.prompt_ids)
        if identity not in place_of:
            place_of[identity] = len(prompts)
            prompts.append(array("q", sample.prompt_ids))
        places.append(place_of[identity])
    header["num_prompts"] = len(prompts)
    header["prompt"] = places
    return prompts


def _encode_column(
    name: str, samples: Sequence[Sample], header: dict[str, Any]
) -> "list[array[Any] | memoryview]":
    """Return a row per sample, and write their types and constant rows into the header."""
    rows: list[array[Any] | memoryview] = []
    constants: list[tuple[bool, int] | None] = []
    types = ""
    for sample in samples:
        constant = _constant(sample) if name == "mask" else None
        values = () if constant is not None else getattr(sample, name)
        row = _typed(name, values)
        types += row.typecode if isinstance(row, array) else row.format
        rows.append(row)
        constants.append(constant)
    header[name] = {"types": types, "constants": constants}
    return rows


def decode(buffers: Buffers) -> dict[int, Sample]:
    """Decode samples with response ids; other missing columns are empty, `old_logprobs` is None."""
    header = json.loads(buffers.parts[0].tobytes())
    parts = iter(buffers.parts[1:])
    prompts = [tuple(_view("q", next(parts))) for _ in range(header["num_prompts"])]
    columns = _columns(header, parts)
    samples = {}
    for i, number in enumerate(header["numbers"]):
        values: dict[str, Any] = {"engine_logprobs": (), "old_logprobs": None, "mask": ()}
        for name in SCALARS:
            values[name] = header[name][i]
        for name, rows in columns.items():
            values[name] = rows[i]
        sampled = header["sampled"][i]
        if sampled is not None:
            sampled = tuple(tuple(span) for span in sampled)
        prompt_ids = prompts[header["prompt"][i]]
        samples[number] = Sample(prompt_ids=prompt_ids, sampled=sampled, **values)
    return samples


def join(buffers: Buffers) -> bytes:
    """Concatenate the buffers of `encode`, behind their number and their sizes in 8 bytes each."""
    count = array("q", [len(buffers.parts)])
    sizes = array("q", map(len, buffers.parts))
    return b"".join([count, sizes, *(part.data for part in buffers.parts)])


def split(joined: bytes) -> Buffers:
    """Restore the buffers that `join` has concatenated."""
    view = memoryview(joined)
    count = view[:8].cast("q")[0]
    first = 8 + 8 * count
    sizes = view[8:first].cast("q")
    bounds = accumulate(sizes, initial=first)
    return Buffers.of([view[start:end] for start, end in pairwise(bounds)])


def _columns(
    header: Mapping[str, Any], parts: Iterator[NDArray[np.uint8]]
) -> dict[str, list[Sequence[Any]]]:
    """Return the rows of each encoded column, as views of the buffers."""
    columns: dict[str, list[Sequence[Any]]] = {}
    for name in TYPES:
        if name not in header:
            continue
        rows: list[Sequence[Any]] = []
        types = header[name]["types"]
        constants = header[name]["constants"]
        for code, constant in zip(types, constants, strict=True):
            part = next(parts)  # empty in the place of a constant row
            if constant is None:
                rows.append(_view(code, part))
            else:
                rows.append(constant_row(*constant))
        columns[name] = rows
    return columns


def _typed(name: str, row: Sequence[Any]) -> "array[Any] | memoryview":
    """Return a row as it is sent: itself if it is an array, else an array of the column's type."""
    if isinstance(row, array | memoryview):
        return row
    return array(TYPES[name], row)


def _constant(sample: Sample) -> tuple[bool, int] | None:
    """Return the value and the length of a constant mask; None for any other."""
    length = len(sample.mask)
    if sample.num_trained_tokens not in (0, length):
        return None
    return sample.num_trained_tokens > 0, length


def _view(code: Any, part: NDArray[np.uint8]) -> "array[Any] | memoryview":
    """Return the bytes of a row as values of a type."""
    if part.size == 0:
        return array(code)  # an empty view cannot be cast
    return part.data.cast(code)


@dataclass(frozen=True)
class NumberedPass:
    """The samples of one forward and backward of a rank."""

    numbers: tuple[int, ...]  # of samples; empty for a dummy microbatch
    weights: tuple[float, ...]  # the loss weight of each sample's tokens


class RankSamples:
    """The samples that this rank has, by number. A sample is on one rank at a time."""

    def __init__(self, exchange: Callable[[Sequence[bytes]], list[bytes]]) -> None:
        """Take `exchange`, which all ranks call to send each rank a message and get theirs."""
        self._exchange = exchange
        self._samples: dict[int, Sample] = {}
        """The samples that are on this rank, by their number in the step."""

    def store(self, buffers: Buffers, *, first: int | None) -> None:
        """Replace the samples from number `first` on by encoded ones; None: add these."""
        if first is not None:
            self._samples = {
                number: sample for number, sample in self._samples.items() if number < first
            }
        self._samples |= decode(buffers)

    def add_columns(self, buffers: Buffers) -> None:
        """Add the columns that scoring does not need."""
        header = json.loads(buffers.parts[0].tobytes())
        columns = _columns(header, iter(buffers.parts[1:]))
        for i, number in enumerate(header["numbers"]):
            row_of_column: dict[str, Any] = {name: rows[i] for name, rows in columns.items()}
            self._samples[number] = replace(self._samples[number], **row_of_column)

    def set_old_logprobs(self, rows: Mapping[int, Sequence[float]]) -> None:
        """Set the old log-probabilities of samples, by number."""
        for number, row in rows.items():
            self._samples[number] = replace(self._samples[number], old_logprobs=row)

    def move(self, numbers_by_rank: Sequence[Sequence[int]]) -> None:
        """Exchange scored samples between all ranks, so that each has those of its update.

        Args:
            numbers_by_rank: the numbers of this rank's samples that each rank gets.
        """
        messages = []
        for numbers in numbers_by_rank:
            samples = {number: self._samples.pop(number) for number in numbers}
            messages.append(join(encode(samples, ALL)) if samples else b"")
        for message in self._exchange(messages):
            if message:
                self._samples |= decode(split(message))

    def microbatches(self, passes: Sequence[NumberedPass]) -> list[RankMicrobatch]:
        """Return the passes with their samples."""
        return microbatches_of(self._samples, passes)


def microbatches_of(
    samples: Mapping[int, Sample], passes: Sequence[NumberedPass]
) -> list[RankMicrobatch]:
    """Return the passes with their samples, looked up by number."""
    microbatches = []
    for numbered in passes:
        microbatch = DUMMY_MICROBATCH
        if numbered.numbers:
            pass_samples = tuple(samples[number] for number in numbered.numbers)
            microbatch = RankMicrobatch(numbered.numbers, pass_samples, numbered.weights)
        microbatches.append(microbatch)
    return microbatches
