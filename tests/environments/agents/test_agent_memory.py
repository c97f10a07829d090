"""Thousands of calls of agents leave nothing behind in the process that answers them."""

import gc
import tracemalloc

import pytest

from dapo.environments.agents.pool import AgentPool
from dapo.processes.output import WorkerOutput
from helpers.agents import agent_options, agents_of, to_play

OPTIONS = agent_options(timeout_s=60.0, workers=1, max_turns=200)
CALLS = 50
"""Of one episode."""
SLACK_BYTES = 30_000
"""Of caches and of what the last episode has left."""
BYTES_PER_CALL = 20
"""The growth that the names of the last 2,048 episodes make; a request and its answer have
thousands of bytes.
"""


@pytest.mark.parametrize("episodes", [10, pytest.param(200, marks=pytest.mark.nightly)])
def test_calls_leave_no_memory_and_no_connections(episodes: int):
    requests = [[0, {"Idempotency-Key": f"{i}"}, {"max_tokens": 3}] for i in range(CALLS)]
    with AgentPool(OPTIONS, memory_gib=1.0, output=WorkerOutput()) as pool:

        def play(count: int) -> None:
            for number in range(count):
                played = agents_of(pool, OPTIONS, by_load=True)
                asked = to_play("asks_in_order", f"{number}", requests=requests)
                (generation,) = played.play([asked]).values()
                assert generation.episode is not None
                assert generation.episode.counts["calls"] == CALLS
            pool.server.drain()

        def traced_bytes() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        play(2)
        tracemalloc.start()
        try:
            play(1)
            before = traced_bytes()
            play(episodes)
            growth = traced_bytes() - before
        finally:
            tracemalloc.stop()
        assert growth < SLACK_BYTES + BYTES_PER_CALL * CALLS * episodes
        assert pool.server.num_connections <= 2
