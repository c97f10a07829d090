"""Agents for tests that run in this process, so that hundreds of episodes take a second."""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from benchmarks.scripted_engine import Script, ScriptedEngine
from dapo.config import DataConfig
from dapo.config.environment import EnvironmentConfig
from dapo.core.rng import keyed_uniforms
from dapo.engines.checked import CheckedEngine
from dapo.engines.continuation import ContinuingEngine
from dapo.environments.agents.engine import AgentEngine
from dapo.environments.agents.messages import AgentRequest
from dapo.environments.agents.rendering import AgentRenderer
from dapo.environments.agents.session import AgentError, Outcome, Pending, Session
from dapo.types import Finish, Generation, GenerationRequest, Problem
from helpers.chat_templates import tokenizer

TOKENIZER = tokenizer("chatml")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
LETTERS = TOKENIZER("abcdefgh", add_special_tokens=False)["input_ids"]
RENDERER = AgentRenderer(TOKENIZER, DataConfig(train="builtin:sums"), "exact")
PROBLEM = Problem("1", "Say something.", "x")
PROMPT = RENDERER.plain.prompts.encode(PROBLEM)

Program: TypeAlias = Generator[Any, Any, Any]
"""An agent: it yields an `AgentRequest`, which gives a `Pending` or an `AgentError`, or a list of
`Pending`, until one of them has an answer; it returns its result.
"""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*messages: Mapping[str, Any], **options: Any) -> AgentRequest:
    return AgentRequest(messages=tuple(messages), **options)


def ask(request: AgentRequest) -> Generator[Any, Any, Any]:
    """Ask, and wait for the answers."""
    pending = yield request
    if isinstance(pending, AgentError):
        raise pending
    yield [pending]
    return pending.answers.result()


class LocalAgent:
    """The handle of an agent that runs in this process."""

    def __init__(self, program: Program, session: Session) -> None:
        self.session = session
        self.program = program
        self.awaited: Sequence[Pending] = ()
        self.is_closed = False

    def react(self) -> None:
        """Run until the agent waits for an answer that is not there, or has ended."""
        while not self.session.is_ended:
            if self.awaited and not any(pending.answers.done() for pending in self.awaited):
                return
            self.awaited = ()
            self._advance()

    def _advance(self) -> None:
        value: Any = None
        try:
            step = self.program.send(value)
            while isinstance(step, AgentRequest):
                try:
                    value = self.session.submit(step)
                except AgentError as error:
                    value = error
                step = self.program.send(value)
            self.awaited = step
        except StopIteration as end:
            self.session.end(Outcome(end.value, is_given=end.value is not None))
        except Exception as error:
            self.session.end(Outcome(error=f"raised {type(error).__name__}: {error}"))

    def close(self) -> None:
        self.is_closed = True
        self.session.close()


class LocalAgentPool:
    """An AgentPool without processes and without an endpoint."""

    def __init__(self, make: Callable[[Problem, int], Program]) -> None:
        self.make = make
        self.opened: list[LocalAgent] = []

    def open(self, problem: Problem, seed: int, request: GenerationRequest) -> LocalAgent:
        session = Session("policy", request.temperature, request.top_p, overrides=False)
        self.opened.append(LocalAgent(self.make(problem, seed), session))
        return self.opened[-1]

    def settle(self, waits: Mapping[LocalAgent, bool], timeout_s: float) -> list[LocalAgent]:
        for agent in waits:
            agent.react()
        return [agent for agent, may_wait in waits.items() if may_wait or agent.session.is_waiting]

    def wait(self) -> None:
        self.settle(dict.fromkeys(self.opened, True), 0)

    def close(self) -> None:
        pass


@dataclass
class Sampled:
    """What the engine sampled for a request: the tokens that it was given, and its own."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int]


class RecordingEngine(ScriptedEngine):
    """Keeps what it sampled; a request that goes on after a suspension is one with its beginning."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sampled: dict[str, Sampled] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit(requests)
        for request in requests:
            beginning = self.sampled.get(request.id)
            if beginning is None:
                self.sampled[request.id] = Sampled(request.prompt_ids, [])
            else:
                assert request.prompt_ids == (*beginning.prompt_ids, *beginning.token_ids)

    def _generation(self, *args: Any) -> Generation:
        generation = super()._generation(*args)
        self.sampled[generation.request_id].token_ids += generation.token_ids
        return generation


def keyed_turn(request: GenerationRequest) -> tuple[Sequence[int], Finish]:
    """Up to seven letters and the end of the turn, by the seed."""
    uniforms = keyed_uniforms(request.seed, 8)
    length = int(uniforms[7] * 8)
    return [*(LETTERS[int(u * len(LETTERS))] for u in uniforms[:length]), END], "stop"


@dataclass
class Played:
    """An engine of agents over a scripted one."""

    engine: AgentEngine
    inner: RecordingEngine
    pool: Any

    def play(self, requests: Sequence[GenerationRequest]) -> dict[str, Generation]:
        self.engine.submit(requests)
        return self.finish(len(requests), {})

    def finish(self, count: int, ended: dict[str, Generation]) -> dict[str, Generation]:
        for _ in range(20_000):
            if len(ended) == count:
                return ended
            ended |= {generation.request_id: generation for generation in self.engine.poll()}
        raise AssertionError(f"{len(ended)} of {count} episodes ended")


def agents(
    make: Callable[[Problem, int], Program],
    *,
    by_load: bool = False,
    slots: int | None = None,
    max_context: int = 4096,
    **options: Any,
) -> Played:
    config = agent_options(**options)
    pool = LocalAgentPool(make)
    return agents_of(pool, config, by_load=by_load, slots=slots, max_context=max_context)


def agent_options(**options: Any) -> EnvironmentConfig:
    defaults = {"name": "agent:helpers.faulty_agents:play", "max_turns": 64}
    return EnvironmentConfig(**{**defaults, **options})


def agents_of(
    pool: Any,
    config: EnvironmentConfig,
    *,
    by_load: bool = False,
    slots: int | None = None,
    max_context: int = 4096,
    script: Script = keyed_turn,
) -> Played:
    """Return an engine for the agents of a pool."""
    inner = RecordingEngine(
        script, slots=slots, logprob=lambda count: [-1.0 - i / 8 for i in range(count)]
    )
    engine = AgentEngine(
        ContinuingEngine(CheckedEngine(inner, vocabulary=len(TOKENIZER))),
        pool,
        RENDERER,
        config,
        seed_of=lambda request: request.seed,
        max_context=max_context,
        by_load=by_load,
    )
    return Played(engine, inner, pool)


def request(
    label: str = "a", *, seed: int = 1, budget: int = 400, problem: Problem = PROBLEM
) -> GenerationRequest:
    return GenerationRequest(label, PROMPT, budget, 1.0, 1.0, seed, (END,), problem=problem)


def to_play(agent: str, label: str | None = None, **fields: Any) -> GenerationRequest:
    """A request for the episode of an agent of `faulty_agents`."""
    problem = replace(PROBLEM, fields={"agent": agent, **fields})
    return request(label or agent, problem=problem)


WORDS = ("one", "two", "three", "four")


def random_agent(problem: Problem, seed: int) -> Program:
    """Make 1 to 20 calls that extend, rewrite, fork, repeat, cancel, or run side by side."""
    rng = random.Random(seed)
    chats: list[tuple[Mapping[str, Any], ...]] = [(user(problem.prompt),)]  # type: ignore[arg-type]
    texts = ["Once"]
    last: AgentRequest | None = None
    cancelled: list[AgentRequest] = []
    for _ in range(rng.randint(1, 12)):
        requests = [_random_request(rng, chats, texts) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        kind = rng.choice(("ask", "ask", "ask", "repeat", "cancel", "return", "again"))
        if kind == "repeat" and last is not None:
            requests = [last]
        elif kind == "again" and cancelled:
            requests = [replace(cancelled.pop(), is_retry=rng.random() < 0.5)]
        open_requests = {}
        for asked in requests:
            pending = yield asked
            if isinstance(pending, Pending):
                open_requests[pending] = asked
            if kind == "cancel" and isinstance(pending, Pending) and rng.random() < 0.3:
                pending.answers.cancel()
                del open_requests[pending]
                cancelled.append(asked)
        while open_requests:
            yield list(open_requests)
            for pending in [pending for pending in open_requests if pending.answers.done()]:
                asked = open_requests.pop(pending)
                last = asked
                for answer in pending.answers.result():
                    if asked.prompt is None:
                        chats.append((*asked.messages, answer.message))
                    else:
                        texts.append(asked.prompt + answer.text)
            if kind == "cancel" and open_requests:
                left, asked = open_requests.popitem()
                left.answers.cancel()
                cancelled.append(asked)
        if kind == "return":
            return rng.random()
    return {"score": rng.random(), "correct": rng.random() < 0.5, "length": 3}


def _random_request(
    rng: random.Random, chats: Sequence[tuple[Mapping[str, Any], ...]], texts: Sequence[str]
) -> AgentRequest:
    options: dict[str, Any] = {
        "max_tokens": rng.choice((None, 3, 8)),
        "samples": rng.choice((1, 1, 1, 2)),
        "seed": rng.choice((None, None, 1, 2)),
        "stop": rng.choice(((), (), ("b",), ("cd", "a"))),
    }
    word = rng.choice(WORDS)
    kind = rng.choice(("extend", "extend", "rewrite", "text"))
    if kind == "text":
        return AgentRequest(prompt=f"{rng.choice(texts)} {word}", **options)
    if kind == "rewrite":
        return chat(user(word), **options)
    history = rng.choice(chats)
    if history[-1]["role"] == "user":
        return chat(*history, **options)
    return chat(*history, user(word), **options)
