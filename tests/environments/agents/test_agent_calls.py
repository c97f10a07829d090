"""Agents that call, rewrite, fork, repeat and leave at random: what trains is what was sampled."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.engines.engine import Unfinished
from dapo.environments.agents.calls import CallTree, calls_of
from dapo.environments.agents.messages import AgentRequest
from dapo.environments.agents.session import AgentError
from dapo.sampling.samples import with_advantages
from dapo.types import Finish, Generation, GenerationRequest, Group, Problem, Verdict
from helpers.agents import (
    END,
    PROBLEM,
    PROMPT,
    TOKENIZER,
    LocalAgentPool,
    Played,
    Program,
    agent_options,
    agents,
    agents_of,
    ask,
    chat,
    random_agent,
    request,
    user,
)
from helpers.tables import for_each_row
from helpers.tiny_runs import tiny

SEEDS = st.integers(0, 10**6)


def turns_of(episode: Generation) -> list[tuple[tuple[int, ...], list[int], bool]]:
    """Return the turns by the number of their call: the ids before each, its own, does it train."""
    assert episode.episode is not None
    calls = episode.episode.calls
    parts = list(episode.conversations) if calls else []
    result: dict[int, tuple[tuple[int, ...], list[int], bool]] = {}
    for conversation in range(1 + max((call["conversation"] for call in calls), default=-1)):
        members = [call for call in calls if call["conversation"] == conversation]
        for trains in (True, False):
            chosen = [call for call in members if call["trains"] is trains]
            if not chosen:
                continue
            part = parts.pop(0)
            assert part.is_masked is not trains
            prompt = PROMPT if part.prompt_ids is None else part.prompt_ids
            end = -chosen[0]["new_tokens"]  # those of the first turn are the prompt's
            logprobs: list[float] = []
            for call in chosen:
                start = end + call["new_tokens"]
                end = start + call["tokens"]
                logprobs += [0.0] * (start - len(logprobs))
                logprobs += [-1.0 - i / 8 for i in range(end - start)]
                before = (*prompt, *part.token_ids[:start])
                result[call["number"]] = before, list(part.token_ids[start:end]), trains
            assert list(part.logprobs) == logprobs
            assert sum(part.mask) == trains * sum(call["tokens"] for call in chosen)
    assert parts == []
    return [result[number] for number in range(len(calls))]


def check_tokens(episode: Generation, label: str, played: Played) -> None:
    """Each token that was sampled stands in one branch, behind what the engine was given for it."""
    assert episode.episode is not None
    assert episode.episode.error is None
    counts = episode.episode.counts
    turns = turns_of(episode)
    lost = 0
    for number, (before, ids, _) in enumerate(turns):
        sampled = played.inner.sampled.get(f"{label}/{number}")
        if sampled is None:  # nothing was left of the episode
            assert ids == []
            continue
        assert before == sampled.prompt_ids
        assert ids == sampled.token_ids[: len(ids)]
        lost += len(sampled.token_ids) - len(ids)
    total = sum(
        len(sampled.token_ids)
        for name, sampled in played.inner.sampled.items()
        if name.split("/")[0] == label
    )
    masked = sum(len(ids) for _, ids, trains in turns if not trains)
    trained = sum(sum(branch.mask) for branch in episode.conversations)
    assert counts["masked_tokens"] == masked
    assert counts["tokens_behind_stop"] == lost
    assert trained + masked + lost == total
    assert episode.num_sampled == trained + masked


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, budget=st.integers(1, 200), turns=st.integers(1, 24), lag=st.integers(1, 4))
def test_every_sampled_token_trains_once_behind_the_tokens_it_was_sampled_behind(
    seed: int, budget: int, turns: int, lag: int
):
    played = agents(random_agent, max_turns=turns, lag_polls=lag)
    episodes = played.play([request(str(i), seed=seed + i, budget=budget) for i in range(4)])
    for label, episode in episodes.items():
        check_tokens(episode, label, played)
        assert episode.num_sampled <= budget
    assert all(agent.is_closed for agent in played.pool.opened)
    assert not played.inner.in_flight


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, slots=st.integers(1, 6))
def test_when_answers_count_on_arrival_the_same_holds(seed: int, slots: int):
    played = agents(random_agent, by_load=True, slots=slots)
    episodes = played.play([request(str(i), seed=seed + i) for i in range(4)])
    for label, episode in episodes.items():
        check_tokens(episode, label, played)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_the_weights_of_the_branches_that_train_add_up_to_one(seed: int):
    config = tiny("environment.name=agent:tests:agent", "reward.verifier=environment")
    played = agents(random_agent)
    episodes = played.play([request(str(i), seed=seed + i, budget=120) for i in range(3)])
    generations = tuple(episodes[str(i)] for i in range(3))
    verdicts = tuple(Verdict(None, float(i)) for i in range(3))
    group = Group(PROBLEM, PROMPT, generations, verdicts, rewards=(0.0, 1.0, 2.0))
    samples = with_advantages([group], config)
    for i, generation in enumerate(generations):
        branches = [sample for sample in samples if sample.index == i]
        assert len(branches) == len(generation.conversations)
        training = [sample.weight for sample in branches if sample.num_trained_tokens]
        assert sum(training) == pytest.approx(float(bool(training)), abs=1e-12)
        assert len({sample.advantage for sample in branches}) == 1


def states(parts: Sequence[Any], *, is_closed: bool) -> list[Any]:
    return [replace(part, handle=None) for part in parts] if is_closed else list(parts)


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS,
    stops=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    lag=st.integers(1, 4),
    is_closed=st.booleans(),
)
def test_an_episode_that_is_suspended_anywhere_goes_on_to_the_same_end(
    seed: int, stops: list[int], lag: int, is_closed: bool
):
    """In its process no agent starts again; elsewhere it starts again, and gets its answers."""
    requests = [request(str(i), seed=seed + i, budget=150) for i in range(4)]
    whole = agents(random_agent, lag_polls=lag).play(requests)
    played = agents(random_agent, lag_polls=lag)
    ended: dict[str, Generation] = {}
    played.engine.submit(requests)
    for version, polls in enumerate(stops, start=1):
        for _ in range(polls):
            ended |= {generation.request_id: generation for generation in played.engine.poll()}
        running = [asked for asked in requests if asked.id not in ended]
        parts = played.engine.suspend([asked.id for asked in running])
        assert all(isinstance(part, Unfinished) for part in parts)
        played.engine.load_weights(None, version)  # type: ignore[arg-type]
        played.engine.resume(running, states(parts, is_closed=is_closed))
    played.finish(len(requests), ended)
    for label, episode in whole.items():
        assert without_versions(ended[label]) == without_versions(episode)
        check_tokens(ended[label], label, played)
    if not is_closed:
        assert len(played.pool.opened) == len(requests)


def without_versions(episode: Generation) -> Generation:
    branches = tuple(map(without_versions, episode.branches))
    return replace(episode, version=0, versions=None, branches=branches)


def compacts_late(problem: Problem, seed: int) -> Program:
    """Ask with more than fits before each call, as agents do that compact their history then."""
    for word in ("first", "second"):
        try:
            yield from ask(chat(user("word " * 300)))
        except AgentError:
            yield from ask(chat(user(word)))
    return 1.0


def test_requests_that_were_refused_are_refused_again_when_an_agent_starts_again():
    whole = agents(compacts_late, max_context=100).play([request()])["a"]
    assert whole.episode is not None
    assert (whole.episode.error, whole.episode.counts["calls"]) == (None, 2)
    for polls in range(1, 12):
        played = agents(compacts_late, max_context=100)
        played.engine.submit([request()])
        ended: dict[str, Generation] = {}
        for _ in range(polls):
            ended |= {generation.request_id: generation for generation in played.engine.poll()}
        if not ended:
            parts = played.engine.suspend(["a"])
            played.engine.resume([request()], states(parts, is_closed=True))
            played.finish(1, ended)
        assert without_versions(ended["a"]) == without_versions(whole)


def test_a_request_that_waits_when_its_episode_ends_gets_an_error():
    """A client elsewhere, which does not end with the agent's process, would wait for hours."""
    asked: list[Any] = []

    def leaves_one(problem: Problem, seed: int) -> Program:
        for word in ("one", "two"):
            pending = yield chat(user(word))
            asked.append(pending)
        yield asked
        return 1.0

    (episode,) = agents(leaves_one).play([request()]).values()
    assert episode.episode is not None
    assert episode.episode.error is None
    failures = [pending.answers.exception(timeout=1) for pending in asked]
    assert sorted(map(str, failures)) == ["None", "the episode has ended"]


def test_a_request_beside_one_that_has_reserved_all_tokens_waits_for_what_that_leaves():
    """Agents that ask side by side send their requests at different moments."""
    second: list[Any] = []

    def asks_two(problem: Problem, seed: int) -> Program:
        first = yield chat(user("one"))
        yield [first]
        yield second
        return 1.0

    played = agents(asks_two, by_load=True)
    played.engine.submit([request()])
    ended: dict[str, Generation] = {}
    while not played.inner.sampled:
        ended |= {generation.request_id: generation for generation in played.engine.poll()}
    (agent,) = played.pool.opened
    second.append(agent.session.submit(chat(user("two"))))
    episode = played.finish(1, ended)["a"].episode
    assert episode is not None
    assert (episode.error, episode.is_cut) == (None, False)
    assert [call["finish"] for call in episode.calls] == ["stop", "stop"]


def says_abc(asked: GenerationRequest) -> tuple[Sequence[int], Finish]:
    return [*TOKENIZER("abc", add_special_tokens=False)["input_ids"], END], "stop"


@for_each_row(("added", "parent"), [("c", 0), ("", None)])
def test_a_text_goes_on_behind_the_stop_text_that_was_sampled(added: str, parent: int | None):
    """What the policy has read is the text that the agent sent: no stop text twice, none hidden."""

    def reacts(problem: Problem, seed: int) -> Program:
        (thought,) = yield from ask(AgentRequest(prompt="Once", stop=("c",)))
        assert (thought.text, thought.stop) == ("ab", "c")
        yield from ask(AgentRequest(prompt=f"Once{thought.text}{added} then"))
        return 1.0

    pool = LocalAgentPool(reacts)
    played = agents_of(pool, agent_options(), script=says_abc)
    (episode,) = played.play([request()]).values()
    assert episode.episode is not None
    assert episode.episode.error is None
    assert episode.episode.calls[1]["parent"] == parent
    read = TOKENIZER.decode(played.inner.sampled["a/1"].prompt_ids)
    assert read.endswith(f"Onceab{added} then")


@for_each_row(("content", "num_branches"), [("ab", 0), ("abc", 0), ("abd", 1)])
def test_an_answer_is_known_again_with_its_stop_text(content: str, num_branches: int):
    """Agents whose form has an end mark ask to stop there, and put the mark back."""

    def reacts(problem: Problem, seed: int) -> Program:
        messages = [user(problem.prompt)]
        for _ in range(3):
            (thought,) = yield from ask(chat(*messages, stop=("c",)))
            assert thought.text == "ab"
            messages += [{"role": "assistant", "content": content}, user("Go on.")]
        return 1.0

    pool = LocalAgentPool(reacts)
    (episode,) = agents_of(pool, agent_options(), script=says_abc).play([request()]).values()
    assert episode.episode is not None
    assert episode.episode.error is None
    branches = {call["conversation"] for call in episode.episode.calls}
    assert (len(branches) > 1) is bool(num_branches)


def test_a_conversation_that_begins_with_an_empty_answer_is_read_as_it_was():
    """Nothing was left for its first call while another one was sampled, and then something was."""
    tree = CallTree()
    empty = tree.add(chat(user("one")), None, (1, 2, 3), 0)
    empty.finish = "length"
    empty.message = {"role": "assistant", "content": ""}
    tree.deliver(empty, 0)
    messages = (user("one"), empty.message, user("two"))
    call = tree.add(chat(*messages), empty, (4, 5), 1)
    call.add(Generation("", [6, 7], [-1.0, -2.0], "stop", 3))
    call.finish = "stop"
    stored = tree.generations("a", PROMPT, {0, 1})
    (first, second) = calls_of([each.record() for each in tree.calls], stored, PROMPT).calls
    assert (first.new_ids, list(first.token_ids)) == ((1, 2, 3), [])
    assert (second.new_ids, list(second.token_ids)) == ((4, 5), [6, 7])
    assert second.context_ids == call.context_ids
    assert second.version == 3


def test_an_agent_that_does_something_else_when_it_starts_again_is_an_error():
    starts: list[int] = []

    def moody(problem: Problem, seed: int, *, waits: bool = False) -> Program:
        starts.append(len(starts))
        word = f"try {len(starts)}" if len(starts) > 1 else "first"
        if len(starts) > 1 and waits:
            return 1.0
        yield from ask(chat(user(word)))
        yield from ask(chat(user("second")))
        return 1.0

    for make in (moody, partial(moody, waits=True)):
        starts.clear()
        played = agents(make)
        played.engine.submit([request()])
        while not played.engine.suspend([]) and len(played.inner.sampled) < 2:
            played.engine.poll()
        parts = played.engine.suspend(["a"])
        played.engine.resume([request()], states(parts, is_closed=True))
        (episode,) = played.finish(1, {}).values()
        assert episode.episode is not None
        assert "the agent is not deterministic" in (episode.episode.error or "")
