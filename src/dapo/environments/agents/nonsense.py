"""Plays an agent with answers of nonsense, before training and for `dapo test agent:...`."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dapo.config.environment import EnvironmentConfig
from dapo.environments.agents.engine import AgentEngine
from dapo.environments.agents.pool import AgentPool
from dapo.environments.agents.rendering import AgentRenderer
from dapo.environments.nonsense import ENDED, KINDS, Play, judged, nonsense_request, play_all
from dapo.types import Generation, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUDGET_S = 6.0
"""The seconds that a start of training spends here at most: an agent may import much."""


class NonsenseAgents:
    """Plays nonsense with the processes and the renderer of a run."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        pool: AgentPool,
        renderer: AgentRenderer,
        options: EnvironmentConfig,
        *,
        temperature: float,
        max_context: int,
    ) -> None:
        """Take what a run has; an agent may send its temperature, and no other."""
        self._tokenizer = tokenizer
        self._pool = pool
        self._renderer = renderer
        self._options = options
        self._temperature = temperature
        self._max_context = max_context

    def play_all(self, problems: Sequence[Problem]) -> list[Play]:
        """Play an episode of each of KINDS, then repeat them in reverse order."""
        return play_all(self._play, problems, budget_s=None)

    def first_failures(self, problem: Problem) -> list[Play]:
        """Play until an episode succeeds, or for BUDGET_S; return the episodes that failed.

        An empty list: one has succeeded, or the time was over.
        """
        deadline = time.monotonic() + BUDGET_S
        failures: list[Play] = []
        for seed in range(len(ENDED)):
            play = self._play(problem, seed, deadline)
            if play is None or play.error is None:
                return []
            failures.append(play)
        return failures

    def _play(self, problem: Problem, seed: int, deadline: float) -> Play | None:
        """Play one episode; None if it has not ended by the deadline."""
        nonsense, request = nonsense_request(self._tokenizer, self._renderer.plain, problem, seed)
        request = replace(request, temperature=self._temperature)
        engine = AgentEngine(
            nonsense,
            self._pool,
            self._renderer,
            self._options,
            seed_of=lambda request: request.seed,
            max_context=self._max_context,
            by_load=True,
        )
        engine.submit([request])
        ended: list[Generation] = []
        try:
            while not ended:
                is_reacting = not engine.is_sampling and deadline < math.inf
                left_s = deadline - time.monotonic()
                if is_reacting and not engine.wait_for_agents(left_s):
                    return None
                ended = engine.poll()
        finally:
            engine.close()
        return Play(seed, KINDS[seed], judged(problem, ended[0]))
