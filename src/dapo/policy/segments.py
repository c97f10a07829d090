"""The pieces of a packed stream that attend as one sequence."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Consecutive tokens of the stream with the context before them: a response and its prompt, or a prompt alone."""

    context_start: int
    context_length: int
    start: int
    length: int


def bucket_by_length(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Lists of segments whose lengths differ by less than a factor of two: less than half of a batch is padding.

    Segments without context are not mixed with others: they need no mask.
    """
    buckets: dict[tuple[int, int, bool], list[Segment]] = defaultdict(list)
    for segment in segments:
        total = segment.context_length + segment.length
        buckets[segment.length.bit_length(), total.bit_length(), segment.context_length > 0].append(segment)
    return [buckets[kind] for kind in sorted(buckets)]
