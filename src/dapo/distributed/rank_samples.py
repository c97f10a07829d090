"""The samples of a step on a rank: sent once as columns of bytes, then named by number."""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.core.constant_rows import constant_row
from dapo.distributed.channel import Buffers
from dapo.policy.packing import DUMMY_MICROBATCH, RankMicrobatch
from dapo.types import Sample

TYPES = {"response_ids": "q", "engine_logprobs": "d", "old_logprobs": "d", "mask": "b"}
"""The columns with a value per response token, and the `array` type of other sequences."""
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
    if "response_ids" in columns:
        # an object that several samples share is sent once; in a group an agent's branches have
        # prompts of their own
        prompts = {id(sample.prompt_ids): sample.prompt_ids for sample in samples.values()}
        place_of = {key: place for place, key in enumerate(prompts)}
        for name in SCALARS:
            header[name] = [getattr(sample, name) for sample in samples.values()]
        header["num_prompts"] = len(prompts)
        header["prompt"] = [place_of[id(sample.prompt_ids)] for sample in samples.values()]
        header["sampled"] = [sample.sampled for sample in samples.values()]
        buffers += [array("q", prompt) for prompt in prompts.values()]
    for name in columns:
        constants: list[tuple[bool, int] | None] = []
        types = ""
        for sample in samples.values():
            constant = _constant(sample) if name == "mask" else None
            constants.append(constant)
            row = _typed(name, () if constant is not None else getattr(sample, name))
            types += row.typecode if isinstance(row, array) else row.format
            buffers.append(row)
        header[name] = {"types": types, "constants": constants}
    text = json.dumps(header)
    # spaces fill the header up to a multiple of 8 bytes, so that the rows behind it are aligned
    aligned_length = -(-len(text) // 8) * 8
    return Buffers.of([text.ljust(aligned_length).encode(), *buffers])


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
    """Concatenate the buffers of `encode`."""
    sizes = array("q", map(len, buffers.parts))
    return b"".join([array("q", [len(sizes)]), sizes, *(part.data for part in buffers.parts)])


def split(joined: bytes) -> Buffers:
    """Restore the buffers that `join` has concatenated."""
    view = memoryview(joined)
    start = 8 + 8 * view[:8].cast("q")[0]
    ends = accumulate(view[8:start].cast("q"), initial=start)
    return Buffers.of([view[a:b] for a, b in pairwise(ends)])


def _columns(
    header: Mapping[str, Any], parts: Iterator[NDArray[np.uint8]]
) -> dict[str, list[Sequence[Any]]]:
    """Return the rows of each encoded column, as views of the buffers."""
    columns: dict[str, list[Sequence[Any]]] = {}
    for name in TYPES:
        if name not in header:
            continue
        rows: list[Sequence[Any]] = []
        for code, constant in zip(header[name]["types"], header[name]["constants"], strict=True):
            part = next(parts)  # empty in the place of a constant row
            rows.append(_view(code, part) if constant is None else constant_row(*constant))
        columns[name] = rows
    return columns


def _typed(name: str, row: Sequence[Any]) -> "array[Any] | memoryview":
    """Return a row as it is sent: itself if it is an array, else an array of the column's type."""
    return row if isinstance(row, array | memoryview) else array(TYPES[name], row)


def _constant(sample: Sample) -> tuple[bool, int] | None:
    """Return the value and the length of a constant mask; None for any other."""
    length = len(sample.mask)
    if sample.num_trained_tokens not in (0, length):
        return None
    return sample.num_trained_tokens > 0, length


def _view(code: Any, part: NDArray[np.uint8]) -> "array[Any] | memoryview":
    return part.data.cast(code) if part.size else array(code)  # an empty view cannot be cast


@dataclass(frozen=True)
class NumberedPass:
    """The samples of one forward and backward of a rank."""

    numbers: tuple[int, ...]  # empty for a dummy microbatch
    weights: tuple[float, ...]


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
            values: dict[str, Any] = {name: rows[i] for name, rows in columns.items()}
            self._samples[number] = replace(self._samples[number], **values)

    def set_old_logprobs(self, rows: Mapping[int, Sequence[float]]) -> None:
        for number, row in rows.items():
            self._samples[number] = replace(self._samples[number], old_logprobs=row)

    def move(self, numbers_by_rank: Sequence[Sequence[int]]) -> None:
        """Exchange scored samples between all ranks, so that each has those of its update."""
        messages = []
        for numbers in numbers_by_rank:
            samples = {number: self._samples.pop(number) for number in numbers}
            messages.append(join(encode(samples, ALL)) if samples else b"")
        for message in self._exchange(messages):
            if message:
                self._samples |= decode(split(message))

    def microbatches(self, passes: Sequence[NumberedPass]) -> list[RankMicrobatch]:
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
