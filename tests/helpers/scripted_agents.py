"""Episodes of agents in threads of this process, whose policy says what a test has written."""

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from benchmarks.scripted_engine import ScriptedEngine
from dapo.config import DataConfig
from dapo.config.environment import EnvironmentConfig
from dapo.engines.checked import CheckedEngine
from dapo.engines.continuation import ContinuingEngine
from dapo.environments.agents.engine import AgentEngine
from dapo.environments.agents.rendering import AgentRenderer
from dapo.environments.agents.server import AgentServer
from dapo.environments.agents.session import Outcome, Session
from dapo.types import Finish, Generation, GenerationRequest, Problem
from helpers.chat_templates import tokenizer

Play = Callable[..., Any]
"""An agent: a function of a problem, the address and the key of the endpoint."""

TOKENIZER = tokenizer("qwen 2.5")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PROBLEM = Problem("1", "2 + 3 = ?", "5", fields={"answer": "5"})


class _ThreadAgent:
    """An agent in a thread, in the place of `dapo.environments.agents.pool.Agent`."""

    def __init__(self, server: AgentServer, session: Session, play: Play, problem: Problem) -> None:
        self.session = session
        self._server = server
        self._thread = threading.Thread(target=self._run, args=(play, problem), daemon=True)
        self._thread.start()

    def _run(self, play: Play, problem: Problem) -> None:
        try:
            result = play(
                problem, base_url=self._server.url(self.session), api_key=self.session.key
            )
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            outcome = Outcome(result)
        except BaseException:  # what the test's agent asserts, too
            outcome = Outcome(error=traceback.format_exc())
        self.session.end(outcome)

    def close(self) -> None:
        self._server.close_session(self.session)
        self._thread.join(10)


class ThreadPool:
    """Starts agents in threads, in the place of `AgentPool`."""

    def __init__(self, play: Play) -> None:
        self.server = AgentServer()
        self.play = play

    def open(self, problem: Problem, seed: int, request: GenerationRequest) -> _ThreadAgent:
        session = Session("policy", request.temperature, request.top_p, overrides=False)
        self.server.open(session)
        return _ThreadAgent(self.server, session, self.play, problem)

    def settle(self, waits: Mapping[_ThreadAgent, bool], timeout_s: float) -> list[_ThreadAgent]:
        """Return the agents that have asked or ended, or may wait for another answer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.server.drain()
            if all(agent.session.is_waiting or may_wait for agent, may_wait in waits.items()):
                break
            time.sleep(0.002)
        return [agent for agent, may_wait in waits.items() if agent.session.is_waiting or may_wait]

    def wait(self) -> None:
        time.sleep(0.002)

    def close(self) -> None:
        self.server.close()


async def _awaited(result: Any) -> Any:
    return await result


@cache
def _renderer() -> AgentRenderer:
    return AgentRenderer(TOKENIZER, DataConfig(train="builtin:sums"), "exact")


def play_episode(play: Play, texts: Sequence[str]) -> Generation:
    """Return the episode of an agent whose answers are these texts, in their order.

    What the agent raises is an AssertionError here.
    """

    def script(request: GenerationRequest) -> tuple[Sequence[int], Finish]:
        text = texts[int(request.id.rpartition("/")[2])]
        return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END], "stop"

    config = EnvironmentConfig(name="agent:x:y", max_turns=20, timeout_s=60.0)
    pool = ThreadPool(play)
    inner = CheckedEngine(
        ScriptedEngine(script, delay=lambda request: 1), vocabulary=len(TOKENIZER)
    )
    engine = AgentEngine(
        ContinuingEngine(inner),
        pool,  # type: ignore[arg-type]
        _renderer(),
        config,
        seed_of=lambda request: 0,
        max_context=100_000,
    )
    engine.load_weights(None, 0)  # type: ignore[arg-type]
    prompt_ids = _renderer().plain.prompts.encode(PROBLEM)
    request = GenerationRequest("1", prompt_ids, 50_000, 1.0, 1.0, 1, (END,), problem=PROBLEM)
    try:
        engine.submit([request])
        generations: list[Generation] = []
        while not generations:
            generations = engine.poll()
    finally:
        engine.close()
        pool.close()
    episode = generations[0].episode
    assert episode is not None
    assert episode.error is None, episode.error
    return generations[0]
