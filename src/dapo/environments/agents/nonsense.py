"""Plays an agent with answers of nonsense, before training and for `dapo test agent:...`."""

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from dapo.config.environment import EnvironmentConfig
from dapo.engines.continuation import ContinuingEngine
from dapo.environments.agents.engine import DID_NOTHING, IS_BUSY, AgentEngine
from dapo.environments.agents.pool import AgentPool
from dapo.environments.agents.rendering import AgentRenderer
from dapo.environments.nonsense import (
    CUT,
    ENDED,
    KINDS,
    Play,
    TextEngine,
    compared,
    judged,
    nonsense_of,
    play_all,
    text_request,
)
from dapo.types import Generation, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUDGET_S = 6.0
"""The seconds that a start of training spends here at most: an agent may import much."""
NOT_DETERMINISTIC = (
    "the agent is not deterministic: two plays with the same seed and the same answers differ, so"
    " it cannot be resumed in the middle of an episode; draw from the global `random` or"
    " `numpy.random`, which have the episode's seed, and keep times out of messages"
)
TOO_SLOW = (
    f"its first episode of nonsense has not ended within {BUDGET_S:g} s, so nothing is known of it"
    " yet; `dapo test` waits for the end"
)


@dataclass
class NonsenseAgents:
    """Plays nonsense with the processes and the renderer of a run."""

    tokenizer: "PreTrainedTokenizerBase"
    pool: AgentPool
    renderer: AgentRenderer
    options: EnvironmentConfig
    _: KW_ONLY
    temperature: float  # that an agent may send, and no other
    max_context: int
    by_load: bool
    _hangs: bool = field(default=False, init=False)

    def play_all(self, problems: Sequence[Problem]) -> list[Play]:
        """Play an episode of each of KINDS, then repeat them in reverse order.

        An agent that did nothing for its time limit is not played again.
        """
        return play_all(self._play_unless_hung, problems, budget_s=None)

    def first_plays(self, problem: Problem) -> list[Play]:
        """Play until an episode succeeds, which is repeated, for at most BUDGET_S.

        Returns the episodes that ended in this time.
        """
        deadline = time.monotonic() + BUDGET_S
        plays: list[Play] = []
        for seed in range(len(ENDED)):
            play = self._play_unless_hung(problem, seed, deadline)
            if play is None:
                return plays
            if play.error is None:
                repetition = self._play(problem, seed, deadline)
                # one that failed is judged by `dapo test`: at a start the agent works
                if repetition is None or repetition.error is not None or self.by_load:
                    return [*plays, play]
                return [*plays, compared(play, repetition)]
            plays.append(play)
        return plays

    def _play_unless_hung(self, problem: Problem, seed: int, deadline: float) -> Play | None:
        return None if self._hangs else self._play(problem, seed, deadline)

    def _play(self, problem: Problem, seed: int, deadline: float) -> Play | None:
        """Play one episode; None if it has not ended by the deadline."""
        left_s = max(0.0, deadline - time.monotonic())
        timeout_s = min(self.options.timeout_s, left_s)
        if not timeout_s:
            return None
        request = text_request(self.tokenizer, self.renderer.plain, problem, seed)
        request = replace(request, temperature=self.temperature)
        (stop_id,) = request.stop_ids
        texts = TextEngine(
            self.tokenizer,
            stop_id,
            nonsense_of(seed),
            is_cut=KINDS[seed] == CUT,
            keeps_limits=True,
        )
        engine = AgentEngine(
            ContinuingEngine(texts),
            self.pool,
            self.renderer,
            self.options.model_copy(update={"timeout_s": timeout_s}),
            seed_of=lambda request: request.seed,
            max_context=self.max_context,
            by_load=self.by_load,
        )
        ended: list[Generation] = []
        try:
            engine.submit([request])
            while not ended and time.monotonic() < deadline:
                ended = engine.poll()
        finally:
            engine.close()
        if not ended:
            return None
        episode = judged(problem, ended[0])
        is_late = str(episode.error).startswith((DID_NOTHING, IS_BUSY))
        if is_late and timeout_s < self.options.timeout_s:
            return None
        self._hangs = is_late
        return Play(seed, KINDS[seed], episode, is_agent=True)
