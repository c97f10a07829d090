"""An engine whose responses are episodes of agents: it answers their requests by the policy."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dapo.config.environment import EnvironmentConfig
from dapo.core.errors import EngineError
from dapo.core.verifier_limits import MAX_SCORE
from dapo.engines.engine import Capabilities, EngineLayer, SuspendableEngine, Unfinished
from dapo.environments.agents.branches import REWRITTEN
from dapo.environments.agents.calls import Call, CallTree, calls_of
from dapo.environments.agents.messages import AgentRequest
from dapo.environments.agents.pool import Agent, AgentPool
from dapo.environments.agents.rendering import AgentRenderer
from dapo.environments.agents.session import (
    AgentAnswer,
    AgentError,
    Pending,
    Session,
    answer,
    fail,
)
from dapo.types import Episode, Finish, Generation, GenerationRequest

_SHOWN_CHARS = 80
_CHARS_PER_TOKEN = 32
"""A request with more characters per token of its limit is not encoded, which takes seconds."""
_NO_ANSWERS = 100
"""The most requests that get no new answer, because nothing is left of an episode, because they
repeat the last one or because they cannot be answered; then it is an error.
"""


DID_NOTHING = "the agent did nothing for"
"""How the error of an agent begins that neither asks nor ends within its time limit."""
IS_BUSY = "the agent has asked, and a process of it has gone on for"
"""How the error of one begins that does something else while it waits, such as a game's server."""


def late(session: Session, timeout_s: float) -> str:
    """Return the error of an agent that has not settled within its time limit."""
    if not session.is_waiting:
        return f"{DID_NOTHING} {timeout_s:g} s"
    return (
        f"{IS_BUSY} {timeout_s:g} s: what it asks next cannot be told from what it does meanwhile;"
        " rollout.clock=load answers each request when it comes"
    )


@dataclass(eq=False)
class _Exchange:
    """A request and its calls, with the clients that wait for the answers."""

    key: str
    calls: list[Call]
    waiting: list[Pending] = field(default_factory=list)
    idempotency_key: str | None = None
    is_asked: bool = True
    """False in an episode that is repeated, until its agent has sent the request again."""
    num_deliveries: int = 0

    @property
    def is_answered(self) -> bool:
        return all(call.finish is not None for call in self.calls)

    @property
    def is_read(self) -> bool:
        return self.num_deliveries > 0

    @property
    def is_left(self) -> bool:
        """Whether every client has gone before its answer came."""
        return all(pending.answers.cancelled() for pending in self.waiting)


@dataclass(eq=False)
class _Running:
    """An agent's episode."""

    request: GenerationRequest
    agent: Agent
    tree: CallTree = field(default_factory=CallTree)
    exchanges: list[_Exchange] = field(default_factory=list)
    sampling: dict[str, Call] = field(default_factory=dict)
    """The calls that are sampled, by the id of their request to the engine."""
    due: int | None = None
    """The poll at which the agent's reaction counts; None: it waits for answers alone."""
    num_deliveries: int = 0
    """The number of answers that the agent has received."""
    thinking_since: float = 0.0
    """When the agent got its last answer, by the monotonic clock."""
    is_cut: bool = False
    finish: Finish = "stop"
    error: str | None = None
    result: Any = None
    tokens_behind_stop: int = 0
    num_unanswered: int = 0
    """The calls that got an empty answer: no tokens or turns were left."""
    num_errors: int = 0
    num_calls: int = 0
    """How often it was continued: a suspended state of an earlier time does not close it."""

    @property
    def has_open_requests(self) -> bool:
        """Whether the agent may wait for an answer."""
        return any(exchange.waiting and not exchange.is_left for exchange in self.exchanges)

    @property
    def num_left(self) -> int:
        """The tokens that may still be sampled, without those reserved for running calls."""
        used = sum(
            call.limit if call.finish is None else len(call.token_ids) for call in self.tree.calls
        )
        return self.request.max_new_tokens - used

    def refuse(self, pending: Pending, error: AgentError) -> None:
        """Answer a request with an error."""
        fail(pending, error)
        self.num_errors += 1
        if self.num_errors > _NO_ANSWERS:
            self.error = f"{_NO_ANSWERS} requests were answered by errors: {error}"

    def close(self) -> None:
        """End the agent; a client elsewhere that still waits gets an error."""
        self.agent.close()
        for exchange in self.exchanges:
            for pending in exchange.waiting:
                fail(pending, AgentError(410, "the episode has ended", "session_ended"))
            exchange.waiting = []


class AgentEngine(EngineLayer):
    """Plays an agent's episode for each request; another engine samples its answers.

    An answer is sampled behind the tokens that its history was sampled with. An agent's reaction to
    an answer counts `environment.lag_polls` polls after it, and is waited for if it is late;
    requests that come together are served in the order of their text, and an agent gets one answer
    at a time. So an episode does not depend on the agent's speed, nor on which of its threads is
    faster. With `rollout.clock: load` a reaction counts when it has arrived.

    `max_new_tokens` of a request bounds the tokens sampled in all calls, `environment.max_turns`
    their number. A call beyond them gets an empty answer with the finish reason `length`.
    """

    _engine: SuspendableEngine

    def __init__(
        self,
        engine: SuspendableEngine,
        pool: AgentPool,
        renderer: AgentRenderer,
        config: EnvironmentConfig,
        *,
        seed_of: Callable[[GenerationRequest], int],
        max_context: int,
        by_load: bool = False,
    ) -> None:
        """Play episodes with an engine that samples their answers.

        Args:
            engine: Samples the answers.
            pool: The processes of the agents, and their endpoint.
            renderer: Renders the agents' chats.
            config: The section `environment`.
            seed_of: Returns the seed of an episode's agent.
            max_context: The most tokens of a request with its answer.
            by_load: Whether a reaction counts as soon as it has arrived.
        """
        super().__init__(engine)
        self._pool = pool
        self._renderer = renderer
        self._config = config
        self._seed_of = seed_of
        self._max_context = max_context
        self._by_load = by_load
        self._polls = 0
        self._running: dict[str, _Running] = {}
        self._sampling: dict[str, _Running] = {}
        """The episode of each call that is sampled, by the id of its request."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(turns=self._engine)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start an agent for each request. Raises EngineError for a request without a problem."""
        started = []
        for request in requests:
            if request.problem is None:
                raise EngineError(f"request {request.id!r} has no problem, which an episode needs")
            agent = self._pool.open(request.problem, self._seed_of(request), request)
            running = _Running(request, agent, due=self._polls, thinking_since=time.monotonic())
            self._running[request.id] = running
            started.append(running)
        if self._by_load:
            return
        turns: list[GenerationRequest] = []
        for running in self._take_reactions(started, turns):
            running.due = self._polls  # it has ended already, which the next poll returns
        self._engine.submit(turns)

    def poll(self) -> list[Generation]:
        """Advance the answers by one poll of their engine, and return the finished episodes."""
        self._polls += 1
        if self._sampling:
            answered = [self._finish_call(generation) for generation in self._engine.poll()]
            for running in dict.fromkeys(answered):
                self._go_on(running)
        elif not self._by_load:
            dues = [running.due for running in self._running.values() if running.due is not None]
            self._polls = max(self._polls, min(dues, default=self._polls))
        turns: list[GenerationRequest] = []
        ended = self._take_reactions(self._due(), turns)
        self._engine.submit(turns)
        return [self._end(running) for running in ended]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        chosen = [self._running[name] for name in request_ids]
        for running in chosen:
            self._stop_sampling(running)
            running.finish = "aborted"
        return [self._end(running) for running in chosen]

    def suspend(self, request_ids: Sequence[str]) -> list[Generation | Unfinished]:
        """Stop these episodes; an agent that has not reacted yet is not asked again."""
        chosen = [self._running[name] for name in request_ids]
        names = [name for running in chosen for name in running.sampling]
        for part in self._engine.suspend(names):
            if isinstance(part, Unfinished):
                running = self._sampling.pop(part.generation.request_id)
                running.sampling[part.generation.request_id].add(part.generation)
            else:
                self._go_on(self._finish_call(part))
        parts: list[Generation | Unfinished] = []
        for running in chosen:
            del self._running[running.request.id]
            lag = None if running.due is None else max(0, running.due - self._polls)
            state = self._generation(running, trained=None)
            parts.append(Unfinished(state, lag, running, running.num_calls))
        return parts

    def resume(self, requests: Sequence[GenerationRequest], parts: Sequence[Unfinished]) -> None:
        """Continue suspended episodes.

        The agents of those that are not open in this process start again, and get the answers that
        they had.
        """
        turns: list[GenerationRequest] = []
        unfinished: list[Unfinished] = []
        restarted: list[_Running] = []
        for request, part in zip(requests, parts, strict=True):
            if isinstance(part.handle, _Running) and part.handle.num_calls == part.num_calls:
                running = part.handle
            else:
                running = self._restarted(request, part)
                restarted.append(running)
            running.num_calls += 1
            running.due = None if part.lag is None else self._polls + part.lag
            running.sampling = {}
            self._running[request.id] = running
            for call in running.tree.calls:
                if call.finish is None:
                    turn = self._turn(running, call)
                    turns.append(turn)
                    unfinished.append(Unfinished(replace(call.generation(), request_id=turn.id)))
                    # the engine gives all tokens of the turn, with these
                    call.forget_tokens()
        self._repeat(restarted)
        self._engine.resume(turns, unfinished)

    def close(self) -> None:
        for running in self._running.values():
            running.close()
        self._running.clear()
        self._sampling.clear()
        super().close()

    # --- when an agent's reaction counts

    def _due(self) -> list[_Running]:
        """Return the episodes whose agent's reaction counts at this poll."""
        if self._by_load:
            return self._arrived()
        return [
            running
            for running in self._running.values()
            if running.due is not None and running.due <= self._polls
        ]

    def _arrived(self) -> list[_Running]:
        """Return those whose agent has reacted; wait for one if nothing is sampled."""
        while True:
            arrived = [
                running
                for running in self._running.values()
                if running.agent.session.is_waiting or self._is_late(running)
            ]
            if arrived or self._sampling or not self._running:
                return arrived
            self._pool.wait()

    def _is_late(self, running: _Running) -> bool:
        """Return True if an agent that nobody answers has not reacted within its time limit."""
        if running.sampling:
            return False
        return time.monotonic() - running.thinking_since > self._config.timeout_s

    def _take_reactions(
        self, runnings: Sequence[_Running], turns: list[GenerationRequest]
    ) -> list[_Running]:
        """Wait for what agents do, and serve it; return those whose episodes have ended."""
        settled = [running.agent for running in runnings]
        if not self._by_load:
            # an agent may also wait for another answer of its own
            waits = {
                running.agent: running.has_open_requests
                for running in runnings
                if running.error is None
            }
            settled = self._pool.settle(waits, self._config.timeout_s)
        is_settled = set(settled)
        ended = []
        for running in runnings:
            running.due = None
            session = running.agent.session
            outcome = session.outcome
            is_late = running.agent not in is_settled or (self._by_load and not session.is_waiting)
            if is_late and running.error is None:
                running.error = late(session, self._config.timeout_s)
            elif outcome is not None and running.error is None:
                running.error = outcome.error
                running.result = outcome.result
            elif running.error is None:
                self._serve(running, session.take(), turns)
                self._go_on(running)
            if running.error is not None or outcome is not None:
                ended.append(running)
        return ended

    def _go_on(self, running: _Running) -> None:
        """Give an agent that does not react to another answer the next one that is sampled.

        With `rollout.clock: load` it gets all of them.
        """
        if running.due is not None and not self._by_load:
            return
        for exchange in running.exchanges:
            if exchange.is_answered and exchange.waiting and not exchange.is_left:
                self._deliver(running, exchange)
                if not self._by_load:
                    return
        if not running.sampling and running.due is None:
            self._react_later(running)  # its clients have gone, or got errors alone

    # --- requests

    def _serve(
        self, running: _Running, arrived: Sequence[Pending], turns: list[GenerationRequest]
    ) -> None:
        """Answer, or begin to sample, the requests of an agent in the order of their text."""
        if self._by_load and running.sampling and running.num_left <= 0:
            # a running call without a limit of its own has reserved all; it may end early
            running.agent.session.put_back(arrived)
            return
        new: list[tuple[Pending, list[tuple[int, ...]], Call | None]] = []
        for pending in sorted(arrived, key=lambda pending: pending.request.text):
            if pending.answers.cancelled():
                continue
            repeated = self._repeated(running, pending.request)
            if repeated is not None:
                repeated.waiting.append(pending)
                for call in repeated.calls:
                    call.num_retries += 1
                if repeated.calls[0].num_retries > _NO_ANSWERS:
                    running.error = f"the agent sent the same request {_NO_ANSWERS} times again"
                continue
            try:
                prepared = self._prepared(running, pending.request)
            except AgentError as error:
                running.refuse(pending, error)
                self._react_later(running)
                continue
            new.append((pending, *prepared))
        num_new = sum(len(prompts) for _, prompts, _ in new)
        for pending, prompts, parent in new:
            request = pending.request
            exchange = _Exchange(request.key, [], [pending], request.idempotency_key)
            running.exchanges.append(exchange)
            for new_ids in prompts:
                room = running.num_left // num_new
                num_new -= 1
                call = running.tree.add(
                    pending.request, parent, new_ids, len(running.exchanges) - 1
                )
                exchange.calls.append(call)
                self._begin(running, call, room, turns)

    def _repeated(self, running: _Running, request: AgentRequest) -> _Exchange | None:
        """Return the exchange whose request a client repeats, or None.

        It repeats one if it says so, if the first one's client has gone without the answer, or if
        the agent did nothing else since. Where clients name their requests, the names decide.
        """
        asked = [exchange for exchange in running.exchanges if exchange.is_asked]
        equal = [exchange for exchange in asked if exchange.key == request.key]
        if not equal:
            return None
        name = request.idempotency_key
        named = [exchange for exchange in equal if exchange.idempotency_key == name]
        if name is not None and named:
            return named[-1]
        exchange = equal[-1]
        was_left = not exchange.is_read and exchange.is_left
        has_other_name = name is not None and exchange.idempotency_key is not None
        is_last = exchange.is_read and exchange is asked[-1] and not has_other_name
        return exchange if request.is_retry or was_left or is_last else None

    def _prepared(
        self, running: _Running, request: AgentRequest
    ) -> tuple[list[tuple[int, ...]], Call | None]:
        """Return the new tokens of each answer of a request, and the call that it continues.

        Raises AgentError.
        """
        self._check_size(request)
        parent = running.tree.parent_of(request)
        new_ids = self._renderer.new_ids(request, parent)
        if new_ids is None:
            parent = None
            new_ids = self._renderer.new_ids(request, None)
        assert new_ids is not None
        before = 0 if parent is None else parent.num_tokens
        length = before + len(new_ids)
        if length + 1 > self._max_context:
            raise AgentError(
                400,
                f"the messages have {length} tokens, and a request with its answer may have"
                f" {self._max_context}",
                "context_length_exceeded",
            )
        return [new_ids] * request.samples, parent

    def _check_size(self, request: AgentRequest) -> None:
        """Raise AgentError for a request that is too long to be rendered and encoded in time."""
        num_chars = len(request.text)
        is_long = num_chars > self._max_context * _CHARS_PER_TOKEN
        if is_long or len(request.messages) > self._max_context:
            raise AgentError(
                400,
                f"the request has {num_chars:,} characters in {len(request.messages):,} messages,"
                f" and with its answer it may have {self._max_context} tokens",
                "context_length_exceeded",
            )

    def _begin(
        self, running: _Running, call: Call, room: int, turns: list[GenerationRequest]
    ) -> None:
        """Sample a call if the episode has tokens and turns left for it."""
        limits = [room, self._max_context - len(call.context_ids)]
        if self._config.max_turn_tokens is not None:
            limits.append(self._config.max_turn_tokens)
        if call.options.max_tokens is not None:
            limits.append(call.options.max_tokens)
        if call.number >= self._config.max_turns or min(limits) < 1:
            call.finish = "length"
            call.is_ended = False
            call.message = {"role": "assistant", "content": ""}
            running.is_cut = True
            running.finish = "length" if room < 1 else "stop"
            running.num_unanswered += 1
            if running.num_unanswered > _NO_ANSWERS:
                running.error = (
                    f"the agent asked {_NO_ANSWERS} times for answers, and nothing is left of"
                    " rollout.max_response_tokens or environment.max_turns"
                )
            return
        call.limit = min(limits)
        turns.append(self._turn(running, call))

    def _turn(self, running: _Running, call: Call) -> GenerationRequest:
        """Return the request for the tokens of a call."""
        request = running.request
        name = self._name(running, call)
        is_extension = call.parent is not None and call.turn > 0
        running.sampling[name] = call
        self._sampling[name] = running
        return replace(
            request,
            id=name,
            prompt_ids=call.context_ids,
            max_new_tokens=call.limit,
            min_new_tokens=0 if call.number else min(request.min_new_tokens, call.limit),
            seed=call.random_seed(request.seed),
            problem=None,
            previous=self._name(running, call.parent) if call.parent and is_extension else None,
            is_continued=call.number + 1 < self._config.max_turns,
        )

    def _name(self, running: _Running, call: Call) -> str:
        return f"{running.request.id}/{call.number}"

    # --- answers

    def _finish_call(self, generation: Generation) -> _Running:
        """Take a sampled answer, and return its episode."""
        running = self._sampling.pop(generation.request_id)
        call = running.sampling.pop(generation.request_id)
        request = call.options
        token_ids, text_before = self._renderer.cut(request, generation.token_ids)
        running.tokens_behind_stop += len(generation.token_ids) - len(token_ids)
        call.add(_beginning(generation, len(token_ids)))
        call.finish = generation.finish if text_before is None else "stop"
        call.is_ended = call.finish == "stop" and text_before is None
        name = f"{call.number}"
        call.text, message = self._renderer.answer(request, token_ids, name)
        if text_before is not None:
            message = self._renderer.message(request, text_before, name)
            call.cut = call.text[len(text_before) :]
            call.text = text_before
        call.message = message
        if call.finish == "length" and call.limit != request.max_tokens:
            running.is_cut = True
            running.finish = "length"
        return running

    def _deliver(self, running: _Running, exchange: _Exchange) -> None:
        """Send the answers of a request to the clients that wait for them."""
        self._send(running, exchange)
        for call in exchange.calls:
            running.tree.deliver(call, running.num_deliveries)
        running.num_deliveries += 1
        self._react_later(running)

    def _send(self, running: _Running, exchange: _Exchange) -> None:
        answers = [self._answer(running, call) for call in exchange.calls]
        for pending in exchange.waiting:
            answer(pending, answers)
        exchange.waiting = []
        exchange.num_deliveries += 1

    def _react_later(self, running: _Running) -> None:
        """Let the agent's reaction to an answer count some polls from now."""
        running.due = self._polls + self._config.lag_polls
        running.thinking_since = time.monotonic()

    def _answer(self, running: _Running, call: Call) -> AgentAnswer:
        reason = "stop" if call.finish == "aborted" else str(call.finish)
        if call.message.get("tool_calls") and call.finish == "stop":
            reason = "tool_calls"
        return AgentAnswer(
            id=f"{running.agent.session.id}-{call.number}",
            text=call.text,
            message=call.message,
            finish_reason=reason,
            prompt_ids=call.context_ids,
            token_ids=list(call.token_ids),
            logprobs=list(call.logprobs),
            tokens=self._renderer.tokens(call.token_ids),
            stop=call.stop,
        )

    # --- the end

    def _end(self, running: _Running) -> Generation:
        """Return an episode as a response, and end its agent."""
        self._stop_sampling(running)
        reward = 0.0
        correct: bool | None = None
        components: dict[str, float] = {}
        referred: list[int] | None = None
        if running.error is None and running.finish != "aborted":
            try:
                reward, correct, components, referred = _judged(running)
            except ValueError as error:
                running.error = str(error)
        running.close()
        self._running.pop(running.request.id, None)
        trained = _trained(running.tree, referred)
        return self._generation(
            running, trained=trained, reward=reward, correct=correct, components=components
        )

    def _stop_sampling(self, running: _Running) -> None:
        """Stop the answers that nobody waits for any more; their tokens stay, and do not train."""
        names = list(running.sampling)
        if not names:
            return
        for generation in self._engine.abort(names):
            self._sampling.pop(generation.request_id)
            call = running.sampling.pop(generation.request_id)
            call.add(generation)
            call.finish = generation.finish
            call.text, call.message = self._renderer.answer(
                call.options, call.token_ids, f"{call.number}"
            )

    def _generation(
        self,
        running: _Running,
        *,
        trained: set[int] | None,
        reward: float = 0.0,
        correct: bool | None = None,
        components: Mapping[str, float] | None = None,
    ) -> Generation:
        """Return an episode as a response; `trained` None: it is suspended, and all of it counts."""
        tree = running.tree
        numbers = {call.number for call in tree.calls} if trained is None else trained
        request = running.request
        parts = tree.generations(request.id, request.prompt_ids, numbers)
        first = parts[0] if parts else Generation(request.id, (), (), running.finish, 0)
        main = tree.conversation(0)
        rewards = [0.0] * max(0, len(main) - 1) + [reward] if main else []
        messages = [
            message
            for call in main
            for message in (
                *(() if call.turn == 0 else map(_shown, call.new_messages)),
                {"role": "assistant", "content": call.text},
            )
        ]
        records = [{**call.record(), "trains": call.number in numbers} for call in tree.calls]
        episode = Episode(
            messages=tuple(messages),
            rewards=tuple(rewards),
            correct=correct,
            error=running.error,
            is_cut=running.is_cut,
            tool_calls=sum(len(call.message.get("tool_calls", ())) for call in tree.calls),
            components=components or {},
            calls=tuple(records),
            counts=_counts(running, trained),
        )
        return replace(first, finish=running.finish, episode=episode, branches=tuple(parts[1:]))

    # --- suspended episodes in a new process

    def _restarted(self, request: GenerationRequest, part: Unfinished) -> _Running:
        """Start the agent of a suspended episode again, with the calls that it had."""
        assert request.problem is not None
        state = part.generation
        assert state.episode is not None
        agent = self._pool.open(request.problem, self._seed_of(request), request)
        counts = state.episode.counts
        tree = calls_of(state.episode.calls, state.conversations, request.prompt_ids)
        running = _Running(
            request,
            agent,
            tree,
            is_cut=state.episode.is_cut,
            finish=state.finish,
            tokens_behind_stop=counts.get("tokens_behind_stop", 0),
            num_unanswered=counts.get("unanswered", 0),
            thinking_since=time.monotonic(),
        )
        for call in tree.calls:
            if call.exchange == len(running.exchanges):
                running.exchanges.append(_Exchange(call.key, [], is_asked=False))
            running.exchanges[call.exchange].calls.append(call)
        return running

    def _repeat(self, restarted: Sequence[_Running]) -> None:
        """Answer agents that started again as before, until each stands where it stood."""
        repetitions = [_Repetition(running) for running in restarted]
        while True:
            repetitions = [repetition for repetition in repetitions if not repetition.is_over]
            if not repetitions:
                break
            waits = {
                repetition.running.agent: repetition.running.has_open_requests
                for repetition in repetitions
            }
            settled = set(self._pool.settle(waits, self._config.timeout_s))
            for repetition in repetitions:
                running = repetition.running
                if running.agent not in settled:
                    running.error = late(running.agent.session, self._config.timeout_s)
                else:
                    self._repeat_answer(repetition)
        for running in restarted:
            running.thinking_since = time.monotonic()

    def _repeat_answer(self, repetition: "_Repetition") -> None:
        """Take an agent's requests, and give it the next answer that it had."""
        running = repetition.running
        session = running.agent.session
        is_refused = False
        for pending in sorted(session.take(), key=lambda pending: pending.request.text):
            if not repetition.take(pending, self._repeated(running, pending.request)):
                try:
                    self._prepared(running, pending.request)
                except AgentError as error:  # as it did before
                    running.refuse(pending, error)
                    is_refused = True
                else:
                    repetition.held.append(pending)
        if not is_refused:  # it reacts to an error before it gets the next answer
            self._repeat_delivery(repetition)
        if repetition.is_over:
            session.put_back(repetition.held)

    def _repeat_delivery(self, repetition: "_Repetition") -> None:
        """Give an agent the next answer that it had, or note that it stands where it stood."""
        running = repetition.running
        outcome = running.agent.session.outcome
        exchange = repetition.deliveries.popleft() if repetition.deliveries else None
        if exchange is not None and exchange.waiting and not exchange.is_left:
            self._send(running, exchange)
        elif outcome is not None and outcome.error is not None:
            running.error = outcome.error
        elif exchange is not None or repetition.has_missing_requests:
            running.error = _NOT_DETERMINISTIC
        else:
            repetition.is_settled = True


class _Repetition:
    """An episode whose agent was started again, and what it has still to do as before."""

    def __init__(self, running: _Running) -> None:
        self.running = running
        numbered = [
            (number, exchange)
            for exchange in running.exchanges
            for number in exchange.calls[0].deliveries
        ]
        numbered.sort(key=lambda entry: entry[0])
        self.deliveries = deque(exchange for _, exchange in numbered)
        """The exchanges whose answers it had, in their order."""
        self.is_settled = running.due is not None
        """Whether it need not have reacted to its last answer."""
        self.held: list[Pending] = []
        """Requests that it had not sent yet, as far as was taken."""
        running.num_deliveries = len(numbered)

    @property
    def has_missing_requests(self) -> bool:
        return not all(exchange.is_asked for exchange in self.running.exchanges)

    @property
    def is_over(self) -> bool:
        if self.running.error is not None:
            return True
        return self.is_settled and not self.deliveries and not self.has_missing_requests

    def take(self, pending: Pending, repeated: _Exchange | None) -> bool:
        """Attach a request to its exchange; return False if there was none.

        Args:
            pending: The request.
            repeated: The exchange that it repeats, if it does.
        """
        exchanges = self.running.exchanges
        equal = [exchange for exchange in exchanges if exchange.key == pending.request.key]
        missing = [exchange for exchange in equal if not exchange.is_asked]
        if repeated is not None:
            exchange = repeated
        elif missing:
            exchange = missing[0]
        elif equal:
            exchange = equal[-1]
        else:
            return False
        exchange.is_asked = True
        exchange.idempotency_key = exchange.idempotency_key or pending.request.idempotency_key
        exchange.waiting.append(pending)
        return True


_NOT_DETERMINISTIC = (
    "the agent is not deterministic: started again with the same problem, seed and answers, it sent"
    " other requests"
)


def _beginning(generation: Generation, length: int) -> Generation:
    """Return the first tokens of a response."""
    if length == len(generation.token_ids):
        return generation
    versions = generation.versions
    if versions is not None:
        versions = tuple(entry for entry in versions if entry[0] < length)
    return replace(
        generation,
        token_ids=generation.token_ids[:length],
        logprobs=generation.logprobs[:length],
        versions=versions,
    )


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: message[key] for key in ("role", "content", "name") if key in message}


def _trained(tree: CallTree, referred: Sequence[int] | None) -> set[int]:
    """Return the numbers of the calls that train: the agent read the answer, and was rewarded.

    Args:
        tree: The calls.
        referred: The calls that the agent's rewards refer to, which reward those before them too;
            None: all.
    """
    if referred is None:
        return {call.number for call in tree.calls if call.is_read}
    numbers = set()
    for number in referred:
        call: Call | None = tree.calls[number]
        while call is not None:
            if call.is_read:
                numbers.add(call.number)
            call = call.parent
    return numbers


def _counts(running: _Running, trained: set[int] | None) -> dict[str, int]:
    """Return what is counted of an agent's episode."""
    calls = running.tree.calls
    counts = {
        "calls": len(calls),
        "branches": max(0, running.tree.num_conversations - 1),
        "rewritten": sum(call.branch_reason.startswith(REWRITTEN) for call in calls),
        "retries": sum(call.num_retries for call in calls),
        "unanswered": running.num_unanswered,
        "refused": running.agent.session.num_refused,
        "overridden": running.agent.session.num_overridden,
        "tokens_behind_stop": running.tokens_behind_stop,
    }
    if trained is not None:
        counts["masked_tokens"] = sum(
            len(call.token_ids) for call in calls if call.number not in trained
        )
    return counts


def _judged(
    running: _Running,
) -> tuple[float, bool | None, dict[str, float], list[int] | None]:
    """Return the score, whether it is right, further numbers, and the calls that rewards refer to.

    Raises ValueError for a result that is no reward.
    """
    result = running.result
    if isinstance(result, bool):
        return float(result), result, {}, None
    if not isinstance(result, Mapping):
        return _number(result, "the reward"), None, {}, None
    numbers = {f"{running.agent.session.id}-{call.number}": call for call in running.tree.calls}
    if result and all(name in numbers for name in result):
        rewards = [_number(value, "a reward") for value in result.values()]
        return math.fsum(rewards), None, {}, [numbers[name].number for name in result]
    if "score" not in result and "reward" not in result:
        raise ValueError(
            'the agent returned a mapping without a score; return a number, {"score": number,'
            ' "correct": bool, name: number}, or rewards by the ids of its answers'
        )
    values = dict(result)
    score = _number(values.pop("score", values.pop("reward", None)), "score")
    correct = values.pop("correct", None)
    if correct not in (True, False, None):
        raise ValueError(f"correct is {correct!r}, expected True, False or None")
    # further values, such as texts, are no components
    components = {
        str(name): _number(value, str(name))
        for name, value in values.items()
        if isinstance(value, int | float)
    }
    return score, None if correct is None else bool(correct), components, None


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float):
        shown = repr(value[:_SHOWN_CHARS]) if isinstance(value, str) else type(value).__name__
        raise ValueError(f"{name} is {shown}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > MAX_SCORE:
        raise ValueError(f"{name} is {number:g}, expected a finite number up to {MAX_SCORE:g}")
    return number
