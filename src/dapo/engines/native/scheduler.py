"""Decides which requests run: a first-come-first-served queue, bounded by slots and cache.

It uses no tensors.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from dapo.core.rng import keyed_uniforms
from dapo.engines.engine import float_array
from dapo.engines.request_checks import PositionBound, check_requests
from dapo.types import Finish, Generation, GenerationRequest

# requests with equal values have equal distributions
DISTRIBUTION = attrgetter("prompt_ids", "temperature", "top_p", "stop_ids", "min_new_tokens")
FIRST_UNIFORMS = 64
"""The uniform numbers generated at first, then doubled as needed: a high limit costs nothing."""
MIN_SHARED_PROMPT = 32
MIN_SHARING_GROUP = 4
"""The fewest prompt tokens and requests of a group whose prompt is stored once."""


@dataclass(eq=False)
class RunningSequence:
    """A request and the response tokens sampled for it so far."""

    request: GenerationRequest
    order: int = 0  # index in the order of starting
    finish: Finish | None = None  # the reason why the response ended, set by its last token
    # the number of prompt positions that are stored once for the group, outside of its rows
    shared: int = 0
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    uniforms: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def reserved(self) -> int:
        """Return the number of positions that its row may need."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens - self.shared

    @property
    def length(self) -> int:
        """Return the number of prompt and response tokens so far."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def row_length(self) -> int:
        """Return the number of its tokens that are stored in its row."""
        return self.length - self.shared

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """Return the tokens that cannot be sampled next: stop ids before the minimum length."""
        return self.request.stop_ids if len(self.token_ids) < self.request.min_new_tokens else ()

    def next_uniform(self) -> float:
        """Return the next token's number, a function of the seed and the token's index."""
        t = self.request.offset + len(self.token_ids)
        if t >= len(self.uniforms):
            self.uniforms = keyed_uniforms(self.request.seed, max(FIRST_UNIFORMS, 2 * t))
        return float(self.uniforms[t])

    def append(self, token: int, logprob: float) -> None:
        """Add a sampled token, which may end the response; at the limit a stop id wins."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_ids:
            self.finish = "stop"
        elif len(self.token_ids) >= self.request.max_new_tokens:
            self.finish = "length"

    @property
    def stored_ids(self) -> tuple[int, ...]:
        """Return the tokens with stored states: all but the last, which no forward has read."""
        return (*self.request.prompt_ids, *self.token_ids[:-1])

    def generation(self, finish: Finish, version: int) -> Generation:
        return Generation(
            self.request.id, self.token_ids, float_array(self.logprobs), finish, version
        )


class Scheduler:
    """The waiting requests, and the bound on rows: `slots`, with `cache_tokens` positions in total.

    All rows have the length that the longest running sequence may reach, so n rows hold n times the
    longest reservation (prompt + max_new_tokens). With `shares_prompts` long prompts of large
    groups are stored once, outside of their rows, but count as part of every row. This depends only
    on the group, because the two layouts round differently.

    Adjacent requests with equal distributions start together in one row, but each may later need
    its own. Groups start while there are fewer branches, running or paused, than rows; a starting
    group counts with all its requests.
    """

    def __init__(
        self,
        slots: int,
        max_positions: int | None,
        vocabulary: int,
        *,
        shares_prompts: bool = False,
    ) -> None:
        """Make an empty queue.

        Args:
            slots: the most rows in use.
            max_positions: the model's longest sequence; None: any length.
            vocabulary: the model's number of tokens.
            shares_prompts: whether a decode step can read a prompt once for several rows.
        """
        self.slots = slots
        self.vocabulary = vocabulary
        self.cache_tokens: int | None = None
        """The bound on the positions in the cache, which may change at any time; None: no bound."""
        self._shares_prompts = shares_prompts
        self._bounds = []
        if max_positions is not None:
            name = "the model's max_position_embeddings"
            fix = "use a model with a longer context"
            self._bounds.append(PositionBound(max_positions, name, fix))
        self._num_started = 0
        self.waiting: dict[str, GenerationRequest] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue all requests, or none: raises EngineError for the first that could never be served.

        Those that continue others are served first, so that few responses wait for their
        continuation.
        """
        check_requests(requests, vocabulary=self.vocabulary, bounds=self._bounds)
        queue = [*self.waiting.values(), *requests]
        if any(request.previous is not None for request in requests):
            # a stable sort: each of the two kinds keeps its order
            queue.sort(key=lambda request: request.previous is None)
        self.waiting = {request.id: request for request in queue}

    def max_rows(self, longest: int) -> int:
        """Return the most rows, at least 1, if the longest reservation has `longest` positions."""
        if self.cache_tokens is None:
            return self.slots
        return max(1, min(self.slots, self.cache_tokens // longest))

    def admit(
        self, running: Sequence[RunningSequence], rows: int, branches: int
    ) -> list[list[RunningSequence]]:
        """Take groups that may start, in one row each, from the head of the queue, in its order.

        `rows` and `branches` are the numbers of those of the running sequences.
        """
        started: list[list[RunningSequence]] = []
        if branches >= self.slots:
            return started
        sequences = list(running)
        for _, adjacent in groupby(self.waiting.values(), key=DISTRIBUTION):
            group = self._group(list(adjacent))
            sequences += group
            limit = self.max_rows(self.longest_reservation(sequences))
            if rows >= limit or branches >= limit:
                break
            # a group starts in one row, but each of its sequences may need its own
            rows += 1
            branches += len(group)
            self._num_started += len(group)
            started.append(group)
        for group in started:
            for seq in group:
                del self.waiting[seq.request.id]
        return started

    def _group(self, requests: Sequence[GenerationRequest]) -> list[RunningSequence]:
        prompt = len(requests[0].prompt_ids)
        shares = (
            self._shares_prompts
            and prompt >= MIN_SHARED_PROMPT
            and len(requests) >= MIN_SHARING_GROUP
        )
        shared = prompt if shares else 0
        return [
            RunningSequence(request, order, shared=shared)
            for order, request in enumerate(requests, start=self._num_started)
        ]

    @staticmethod
    def longest_reservation(running: Sequence[RunningSequence]) -> int:
        """Return the number of positions that a row and its shared prompt may need."""
        reservations = (seq.reserved for seq in running)
        prompt_lengths = (seq.shared for seq in running)
        return max(reservations, default=0) + max(prompt_lengths, default=0)
