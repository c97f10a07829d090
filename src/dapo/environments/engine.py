"""An engine whose responses are episodes: turns of the policy, each answered by an environment."""

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

from dapo.config.environment import EnvironmentConfig
from dapo.core.errors import ConfigError, DataError, EngineError
from dapo.core.rng import keyed_seed
from dapo.engines.continuation import Versions, extended
from dapo.engines.engine import (
    Capabilities,
    EngineLayer,
    SuspendableEngine,
    Unfinished,
    float_array,
)
from dapo.environments.pool import Answer, EnvironmentPool, EpisodeHandle
from dapo.environments.rendering import TurnRenderer
from dapo.environments.starts import EpisodeStarts
from dapo.types import Episode, Finish, Generation, GenerationRequest, Message

COMPARED_EPISODES = 64
"""The number of first episodes of several turns that are compared with the chat template."""


@dataclass(eq=False)
class _Running:
    """An episode and its tokens so far, without those of the prompt."""

    request: GenerationRequest
    handle: EpisodeHandle
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    sampled: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_turns: int = 0
    version: int = 0
    versions: Versions | None = None
    tool_calls: int = 0
    tool_errors: int = 0
    # whether no tokens or turns were left before the environment ended the episode
    is_cut: bool = False
    finish: Finish = "stop"
    correct: bool | None = None
    ending: str = ""
    error: str | None = None
    repeated: list[tuple["Future[Answer]", float]] = field(default_factory=list)
    """Answers of calls that were repeated to rebuild the episode, each with its first reward."""

    @property
    def num_sampled(self) -> int:
        return sum(end - start for start, end in self.sampled)

    def add_tokens(self, generation: Generation) -> None:
        """Add the tokens of a turn, or of a part of it."""
        start = len(self.token_ids)
        versions = self.versions or ((0, self.version),)
        self.versions = extended(versions, generation, at=start)
        self.version = self.version if start else generation.version
        self.token_ids.extend(iter(generation.token_ids))
        self.logprobs.extend(iter(generation.logprobs))
        self.sampled.append((start, len(self.token_ids)))

    def add_turn(self, generation: Generation, text: str) -> None:
        self.add_tokens(generation)
        self.messages.append({"role": "assistant", "content": text})
        self.num_turns += 1

    def add_observation(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        self.token_ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.messages.extend(messages)

    def generation(self, finish: Finish) -> Generation:
        episode = Episode(
            messages=tuple(self.messages),
            rewards=tuple(self.rewards),
            correct=self.correct,
            error=self.error,
            is_cut=self.is_cut,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            ending=self.ending,
        )
        logprobs = float_array(self.logprobs)
        sampled = tuple(self.sampled)
        return Generation(
            self.request.id,
            self.token_ids,
            logprobs,
            finish,
            self.version,
            sampled=sampled,
            episode=episode,
            versions=self.versions,
        )


class EpisodeEngine(EngineLayer):
    """Plays an episode for each request; another engine samples its turns.

    The tokens that are trained are those that were sampled: the prompt of turn k + 1 is the prompt
    of turn k, the ids sampled in turn k, and the ids of the rendered observation. Turn k draws from
    the seed of the request and k. An environment's answer counts `environment.lag_polls` polls
    after its turn has ended, and is waited for if it is late, so that episodes do not depend on the
    environment's speed; with `rollout.clock: load` it counts when it has arrived.

    `max_new_tokens` of a request bounds the tokens sampled in all turns. A turn that is cut at a
    limit is not answered: the episode ends, with `finish` `length`.
    """

    _engine: SuspendableEngine

    def __init__(
        self,
        engine: SuspendableEngine,
        pool: EnvironmentPool,
        renderer: TurnRenderer,
        config: EnvironmentConfig,
        *,
        starts: EpisodeStarts,
        by_load: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Play episodes with an engine that samples their turns.

        Args:
            engine: samples the turns.
            pool: the processes of the environments.
            renderer: encodes observations.
            config: the section `environment`.
            starts: opens the episodes, and has given the problems of the requests their prompts.
            by_load: whether an answer counts as soon as it has arrived, instead of
                `environment.lag_polls` after its turn.
            warn: gets a line for the first of the first episodes that the chat template writes
                differently.

        Raises ConfigError if `environment.max_observation_tokens` has no room for a text in the
        chat template.
        """
        self._max_text_tokens = config.max_observation_tokens - renderer.overhead
        if self._max_text_tokens < 1:
            raise ConfigError(
                f"environment.max_observation_tokens={config.max_observation_tokens} has no room"
                f" for an observation: {renderer.name} puts {renderer.overhead} tokens around it"
            )
        super().__init__(engine)
        self._pool = pool
        self._renderer = renderer
        self._config = config
        self._starts = starts
        self._by_load = by_load
        self._warn = warn
        self._to_compare = COMPARED_EPISODES if renderer.is_exact and warn is not None else 0
        self._has_named_tokens = False
        self._polls = 0
        self._running: dict[str, _Running] = {}
        self._sampling: dict[str, _Running] = {}
        """The episodes whose turn is being sampled, by the id of its request."""
        self._answering: deque[tuple[int, _Running, Future[Answer]]] = deque()
        """The episodes whose environment is answering; the answer counts at the poll given."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(turns=self._engine)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin an episode for each request. Raises EngineError for a request without a problem."""
        turns = []
        for request in requests:
            if request.problem is None:
                raise EngineError(f"request {request.id!r} has no problem, which an episode needs")
            running = _Running(request, self._starts.open(request.problem))
            self._running[request.id] = running
            turns.append(self._next_turn(running))
        self._engine.submit(turns)

    def poll(self) -> list[Generation]:
        """Advance the turns by one poll of their engine, and return the finished episodes."""
        self._polls += 1
        if self._sampling:
            for generation in self._engine.poll():
                self._answer_turn(self._sampling.pop(generation.request_id), generation)
        elif self._answering and not self._by_load:
            self._polls = self._answering[0][0]
        ended: list[Generation] = []
        turns: list[GenerationRequest] = []
        for running, future in self._due_answers():
            self._use_answer(running, future.result(), turns, ended)
        self._engine.submit(turns)
        return ended

    def wait_for_answers(self, timeout_s: float) -> bool:
        """Wait for all answers of environments; return False if one is later than the time limit.

        An infinite limit waits without end.
        """
        futures = [future for _, _, future in self._answering]
        limit = None if timeout_s == math.inf else max(0.0, timeout_s)
        return not wait(futures, timeout=limit).not_done

    def _due_answers(self) -> "list[tuple[_Running, Future[Answer]]]":
        """Remove the answers that count at this poll from those that are waited for."""
        if self._by_load:
            return self._arrived_answers()
        due = []
        while self._answering and self._answering[0][0] <= self._polls:
            due.append(self._answering.popleft()[1:])
        return due

    def _arrived_answers(self) -> "list[tuple[_Running, Future[Answer]]]":
        """Remove the answers that have arrived; wait for one if no turn is being sampled."""
        if self._answering and not self._sampling:
            wait([future for _, _, future in self._answering], return_when=FIRST_COMPLETED)
        arrived: list[tuple[_Running, Future[Answer]]] = []
        late: deque[tuple[int, _Running, Future[Answer]]] = deque()
        for due, running, future in self._answering:
            if future.done():
                arrived.append((running, future))
            else:
                late.append((due, running, future))
        self._answering = late
        return arrived

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        chosen = {id(self._running[name]) for name in request_ids}
        turns = [turn for turn, running in self._sampling.items() if id(running) in chosen]
        for generation in self._engine.abort(turns):
            self._sampling.pop(generation.request_id).add_turn(generation, "")
        self._answering = deque(entry for entry in self._answering if id(entry[1]) not in chosen)
        return [self._end(self._running[name], "aborted") for name in request_ids]

    def suspend(self, request_ids: Sequence[str]) -> list[Generation | Unfinished]:
        """Stop these episodes; if the environment is answering, it is not asked again."""
        chosen = {id(self._running[name]) for name in request_ids}
        partial: dict[int, Generation] = {}
        turns = [turn for turn, running in self._sampling.items() if id(running) in chosen]
        for part in self._engine.suspend(turns):
            generation = part.generation if isinstance(part, Unfinished) else part
            running = self._sampling.pop(generation.request_id)
            if isinstance(part, Unfinished):
                partial[id(running)] = generation
            else:
                self._answer_turn(running, generation)
        lags = {
            id(running): due - self._polls
            for due, running, _ in self._answering
            if id(running) in chosen
        }
        self._answering = deque(entry for entry in self._answering if id(entry[1]) not in chosen)
        parts: list[Generation | Unfinished] = []
        for name in request_ids:
            running = self._running.pop(name)
            if id(running) in partial:
                running.add_tokens(partial[id(running)])
            state = running.generation(running.finish)
            handle = running.handle
            parts.append(Unfinished(state, lags.get(id(running)), handle, handle.num_calls))
        return parts

    def resume(self, requests: Sequence[GenerationRequest], parts: Sequence[Unfinished]) -> None:
        """Continue suspended episodes.

        Those that are not open in this process are rebuilt by their calls.
        """
        turns = []
        unfinished = []
        for request, part in zip(requests, parts, strict=True):
            assert request.problem is not None
            is_open = part.handle is not None and part.handle.num_calls == part.num_calls
            handle = part.handle if is_open else self._starts.open(request.problem)
            running, generation = _restored(request, part, handle)
            if not is_open:
                _repeat_calls(running)
            self._running[request.id] = running
            if part.lag is not None:
                self._answering.append((self._polls + part.lag, running, handle.latest))
            else:
                turns.append(self._next_turn(running))
                unfinished.append(Unfinished(replace(generation, request_id=turns[-1].id)))
        self._answering = deque(sorted(self._answering, key=lambda entry: entry[0]))
        self._engine.resume(turns, unfinished)

    def close(self) -> None:
        for running in self._running.values():
            running.handle.close()
        self._running.clear()
        self._sampling.clear()
        self._answering.clear()
        super().close()

    def _next_turn(self, running: _Running) -> GenerationRequest:
        """Return the request for the next turn of an episode."""
        request = running.request
        turn = running.num_turns
        num_left = request.max_new_tokens - running.num_sampled
        limit = self._config.max_turn_tokens
        next_request = replace(
            request,
            id=f"{request.id}/{turn}",
            prompt_ids=(*request.prompt_ids, *running.token_ids),
            max_new_tokens=num_left if limit is None else min(num_left, limit),
            min_new_tokens=0 if turn else request.min_new_tokens,
            seed=keyed_seed(request.seed, "turn", turn) if turn else request.seed,
            problem=None,
            previous=f"{request.id}/{turn - 1}" if turn else None,
            is_continued=turn + 1 < self._config.max_turns,
        )
        self._sampling[next_request.id] = running
        return next_request

    def _answer_turn(self, running: _Running, generation: Generation) -> None:
        """Pass a turn to its environment; a turn that was cut ends the episode instead."""
        text = self._renderer.text(generation.token_ids)
        running.add_turn(generation, text)
        if generation.finish == "length":
            running.finish = "length"
            self._cut(running)
        else:
            self._wait_for(running, running.handle.step(text))

    def _cut(self, running: _Running) -> None:
        running.is_cut = True
        self._wait_for(running, running.handle.end())

    def _wait_for(self, running: _Running, future: "Future[Answer]") -> None:
        self._answering.append((self._polls + self._config.lag_polls, running, future))

    def _use_answer(
        self,
        running: _Running,
        answer: Answer,
        turns: list[GenerationRequest],
        ended: list[Generation],
    ) -> None:
        """Continue with the next turn after an environment's answer, or end the episode."""
        running.error = (
            answer.get("error")
            or self._difference_of_prompt(running)
            or _difference_of_rewards(running)
        )
        if running.error is not None:
            ended.append(self._end(running, running.finish))
            return
        running.tool_calls += answer["tool_calls"]
        running.tool_errors += answer["tool_errors"]
        reward = answer["reward"] or 0.0
        if len(running.rewards) < running.num_turns:
            running.rewards.append(reward)
        else:  # `end` also gives a reward to an answered turn
            running.rewards[-1] += reward
        if running.is_cut or answer["done"]:
            running.correct = answer["correct"]
            running.ending = self._shortened(_text_of(answer["observation"]))
            ended.append(self._end(running, running.finish))
            return
        num_left = running.request.max_new_tokens - running.num_sampled
        if running.num_turns >= self._config.max_turns or not num_left:
            running.finish = "stop" if num_left else "length"
            self._cut(running)
            return
        # a class that counts its own calls has no tools in the chat template
        is_result = answer["tool_calls"] and "tool" in self._renderer.roles
        role = "tool" if is_result else "user"
        observation = answer["observation"]
        try:
            observed = self._renderer.observed(
                observation,
                ended=True,
                role=role,
                end_id=running.token_ids[-1],
                limit=self._max_text_tokens,
            )
        except DataError as error:
            running.error = str(error)
            ended.append(self._end(running, "stop"))
            return
        messages = observation
        if isinstance(observation, str):
            messages = [{"role": role, "content": observation}]
        read = []
        for message, excerpt in zip(messages, observed.messages, strict=True):
            kept = {"role": message["role"], "content": excerpt["content"]}
            if "name" in message:
                kept["name"] = self._shortened(message["name"])
            read.append(kept)
        running.add_observation(observed.ids, read)
        turns.append(self._next_turn(running))

    def _shortened(self, text: str) -> str:
        """Return the text in at most `environment.max_observation_tokens`."""
        return self._renderer.shortened(text, self._max_text_tokens)

    def _difference_of_prompt(self, running: _Running) -> str | None:
        """Describe how the environment's prompt differs from the encoded one, or return None."""
        problem = running.request.problem
        assert problem is not None
        return self._starts.difference(problem, running.handle.reset.result()["prompt"])

    def _compare(self, running: _Running) -> None:
        """Warn of an episode whose last turn follows other tokens than the chat template's own.

        Another text ends the comparisons. Equal text in other tokens is named once: a policy
        samples such tokens now and then.
        """
        request = running.request
        if (
            running.num_turns < 2
            or running.error is not None
            or request.problem is None
            or self._warn is None
        ):
            return
        self._to_compare -= 1
        turn_start = running.sampled[-1][0]
        ids = (*request.prompt_ids, *running.token_ids[:turn_start])
        shift = len(request.prompt_ids)
        turns = tuple((start + shift, end + shift) for start, end in running.sampled[:-1])
        last = max(
            i for i, message in enumerate(running.messages) if message["role"] == "assistant"
        )
        difference = self._renderer.difference(
            request.problem, running.messages[:last], ids, turns=turns
        )
        if difference is None:
            return
        episode = f"an episode of problem {request.problem.id}"
        name = self._renderer.name
        behind = (
            "the policy trains behind the tokens that it has seen, and a chat client would send"
            " others"
        )
        if difference.kind == "text":
            self._to_compare = 0
            self._warn(
                f"{episode} is not what {name} writes for its messages: {difference.description};"
                f" {behind}"
            )
        elif not self._has_named_tokens:
            self._has_named_tokens = True
            other = "in other tokens"
            if difference.kind == "white space":
                other = "with other white space"
            self._warn(
                f"{episode} has the text that {name} writes for its messages, {other},"
                f" {difference.description}; {behind}"
            )

    def _end(self, running: _Running, finish: Finish) -> Generation:
        if self._to_compare and finish != "aborted":
            self._compare(running)
        running.handle.close()
        del self._running[running.request.id]
        return running.generation(finish)


def _text_of(observation: str | Sequence[Message]) -> str:
    """Return the texts of an observation as one."""
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message["content"]) for message in observation)


def _restored(
    request: GenerationRequest, part: Unfinished, handle: EpisodeHandle
) -> tuple[_Running, Generation]:
    """Return an episode as it was suspended, and its unfinished turn as a generation."""
    state = part.generation
    episode = state.episode
    count = len(state.token_ids)
    assert episode is not None
    sampled = [(0, count)] if count else []
    if state.sampled is not None:
        sampled = list(state.sampled)
    begin = count
    # else a turn has begun without a token yet
    if part.lag is None and sampled and sampled[-1][1] == count:
        begin, _ = sampled.pop()
    versions = state.versions or ((0, state.version),)
    earlier = tuple((start, version) for start, version in versions if start < begin)
    turn_version = [version for start, version in versions if start <= begin][-1]
    later = [(start - begin, version) for start, version in versions if start > begin]
    turn_versions = ((0, turn_version), *later)
    running = _Running(
        request,
        handle,
        array("i", state.token_ids[:begin]),
        array("d", state.logprobs[:begin]),
        sampled,
        list(episode.messages),
        list(episode.rewards),
        num_turns=episode.num_turns,
        version=state.version,
        versions=earlier if len(earlier) > 1 else None,
        tool_calls=episode.tool_calls,
        tool_errors=episode.tool_errors,
        is_cut=episode.is_cut,
        finish=state.finish,
    )
    turn = Generation(
        "",
        array("i", state.token_ids[begin:]),
        float_array(state.logprobs[begin:]),
        "aborted",
        turn_version,
        versions=turn_versions if later else None,
    )
    return running, turn


def _repeat_calls(running: _Running) -> None:
    """Bring a new episode to where a suspended one stood."""
    turns = [message["content"] for message in running.messages if message["role"] == "assistant"]
    num_answered = len(running.rewards)
    # the environment never gets a turn that was cut: only `end` answers it
    if running.is_cut and num_answered < len(turns):
        turns.pop()
    for i, text in enumerate(turns):
        answer = running.handle.step(text)
        if i < num_answered:  # the last one may not have been answered yet
            running.repeated.append((answer, running.rewards[i]))
    if running.is_cut:
        running.handle.end()


def _difference_of_rewards(running: _Running) -> str | None:
    """Return an error if calls that were repeated gave different rewards, otherwise None."""
    repeated = running.repeated
    running.repeated = []
    if all((answer.result().get("reward") or 0.0) == reward for answer, reward in repeated):
        return None
    return (
        "the environment is not deterministic: replaying the same actions with the same seed gave"
        " a different reward"
    )
