"""Segments: the parts of a packed stream that attend as one sequence."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """Consecutive tokens of the stream, with their context, which may lie anywhere in it."""

    # stream indices of the context, then of the segment's own tokens, in the order of their
    # positions
    keys: np.ndarray
    length: int  # of its own tokens, the last of `keys`

    @property
    def context_length(self) -> int:
        """Return the number of context tokens."""
        return len(self.keys) - self.length

    @property
    def start(self) -> int:
        """Return the stream index of its first own token."""
        return int(self.keys[-self.length])


def bucket_by_length(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return lists of segments of similar length, so that less than half of a batch is padding.

    Segments without context need no mask, so they get buckets of their own.
    """
    buckets: dict[tuple[int, int, bool], list[Segment]] = defaultdict(list)
    for segment in segments:
        kind = (
            segment.length.bit_length(),
            len(segment.keys).bit_length(),
            segment.context_length > 0,
        )
        buckets[kind].append(segment)
    return [buckets[kind] for kind in sorted(buckets)]
