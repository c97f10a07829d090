"""Decides which requests run: a first-come-first-served queue, bounded by slots and cache. Knows nothing of tensors."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dapo.core.rng import keyed_uniforms
from dapo.engines.engine import float_array
from dapo.engines.request_checks import PositionBound, check_requests
from dapo.types import Finish, Generation, GenerationRequest

FIRST_UNIFORMS = 64
"""Uniform numbers made at first; then twice as many each time, so that no limit of 20,480 tokens is paid up front."""


@dataclass(eq=False)
class RunningSequence:
    """A request and the response tokens sampled for it so far."""

    request: GenerationRequest
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    uniforms: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def reserved(self) -> int:
        """The number of positions that it may come to hold."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def length(self) -> int:
        """The number of prompt and response tokens so far."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """Tokens that cannot be sampled next: the stop ids, before the minimum length is reached."""
        return self.request.stop_ids if len(self.token_ids) < self.request.min_new_tokens else ()

    def next_uniform(self) -> float:
        """The uniform number that the next token is sampled with, a function of the seed and the token's index."""
        t = len(self.token_ids)
        if t >= len(self.uniforms):
            self.uniforms = keyed_uniforms(self.request.seed, max(FIRST_UNIFORMS, 2 * len(self.uniforms)))
        return float(self.uniforms[t])

    def append(self, token: int, logprob: float) -> Finish | None:
        """Add a sampled token; returns how it ends the response, if it does: a stop id at the limit is `stop`."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    def generation(self, finish: Finish, version: int) -> Generation:
        return Generation(self.request.id, self.token_ids, float_array(self.logprobs), finish, version)


class Scheduler:
    """The waiting requests, and the bound on the running ones: `slots` of them, holding `cache_tokens` positions.

    All slots are as long as the longest running sequence may become, so n running requests hold n times the longest
    reservation (prompt + max_new_tokens).
    """

    def __init__(self, slots: int, cache_tokens: int | None, max_positions: int | None, vocabulary: int) -> None:
        """`max_positions` is the longest sequence that the model takes, `vocabulary` the number of tokens it knows.

        `cache_tokens` may be set anew at any time; requests are refused only for the bound given here.
        """
        self.slots, self.cache_tokens, self.vocabulary = slots, cache_tokens, vocabulary
        bounds = (
            (cache_tokens, "rollout.native.cache_tokens", "raise it"),
            (max_positions, "the model's max_position_embeddings", "use a model with a longer context"),
        )
        self._bounds = [PositionBound(bound, name, fix) for bound, name, fix in bounds if bound is not None]
        self.waiting: dict[str, GenerationRequest] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue all of them, or none: raises EngineError for the first that could never be served."""
        check_requests(requests, vocabulary=self.vocabulary, bounds=self._bounds)
        self.waiting.update((request.id, request) for request in requests)

    def admit(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Take from the head of the queue what fits together with `running`; nothing overtakes the head."""
        started: list[RunningSequence] = []
        if not self.waiting or len(running) >= self.slots:
            return started
        longest = self.longest_reservation(running)
        for request in islice(self.waiting.values(), self.slots - len(running)):
            candidate = RunningSequence(request)
            longest = max(longest, candidate.reserved)
            count = len(running) + len(started) + 1
            # one sequence alone always runs: where it cannot fit, `submit` has refused it or nothing smaller would help
            if self.cache_tokens is not None and count > 1 and count * longest > self.cache_tokens:
                break
            started.append(candidate)
        for seq in started:
            del self.waiting[seq.request.id]
        return started

    def head_prompt(self) -> tuple[int, ...] | None:
        """The prompt of the next request to start."""
        return next(iter(self.waiting.values())).prompt_ids if self.waiting else None

    @staticmethod
    def longest_reservation(running: Sequence[RunningSequence]) -> int:
        """The number of positions that the longest of them may come to hold."""
        return max((seq.reserved for seq in running), default=0)
