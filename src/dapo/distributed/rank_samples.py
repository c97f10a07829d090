"""The samples of a step on one trainer rank: they are sent once, and later calls name them by number."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dapo.distributed.channel import Buffers
from dapo.distributed.sample_columns import ALL, decode, decode_columns, encode, join, split
from dapo.policy.packing import DUMMY_MICROBATCH, RankMicrobatch
from dapo.types import Sample


@dataclass(frozen=True)
class NumberedPass:
    """The samples of one forward and backward of a rank."""

    numbers: tuple[int, ...]
    """Empty for a dummy microbatch."""
    weights: tuple[float, ...]


class RankSamples:
    """The samples that this rank has, by number. A sample is on one rank at a time."""

    def __init__(self, exchange: Callable[[Sequence[bytes]], list[bytes]]) -> None:
        """`exchange` sends one message to each rank and returns the received ones; all ranks call it together."""
        self._exchange = exchange
        self._samples: dict[int, Sample] = {}

    def store(self, buffers: Buffers, *, first: int) -> None:
        """Replace the samples from number `first` on by encoded ones."""
        self._samples = {number: sample for number, sample in self._samples.items() if number < first}
        self.add(buffers)

    def add(self, buffers: Buffers) -> None:
        self._samples |= decode(buffers)

    def add_columns(self, buffers: Buffers) -> None:
        """Add the columns that scoring does not need."""
        for number, columns in decode_columns(buffers).items():
            self._samples[number] = replace(self._samples[number], **columns)

    def set_old_logprobs(self, rows: Mapping[int, Sequence[float]]) -> None:
        for number, row in rows.items():
            self._samples[number] = replace(self._samples[number], old_logprobs=row)

    def move(self, numbers_by_rank: Sequence[Sequence[int]]) -> None:
        """Exchange scored samples, so that each rank has those that it updates with; all ranks call it together."""
        messages = []
        for numbers in numbers_by_rank:
            own = {number: self._samples.pop(number) for number in numbers}
            messages.append(join(encode(own, ALL)) if own else b"")
        for message in self._exchange(messages):
            if message:
                self._samples |= decode(split(message))

    def microbatches(self, passes: Sequence[NumberedPass]) -> list[RankMicrobatch]:
        return microbatches_of(self._samples, passes)


def microbatches_of(samples: Mapping[int, Sample], passes: Sequence[NumberedPass]) -> list[RankMicrobatch]:
    """The passes with their samples, found by number."""
    return [
        RankMicrobatch(each.numbers, tuple(samples[number] for number in each.numbers), each.weights)
        if each.numbers
        else DUMMY_MICROBATCH
        for each in passes
    ]
