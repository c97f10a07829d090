"""Nonsense for agents before training and by `dapo test`: what fails, hangs or is not seeded."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dapo.config import build_config
from dapo.core.errors import ConfigError
from dapo.environments.agents import nonsense
from dapo.environments.agents.pool import AgentPool
from dapo.environments.nonsense import Play, compared, is_suspicious, verdict_on
from dapo.processes.output import WorkerOutput
from dapo.start.episodes import AgentEpisodes, agent_episodes
from dapo.types import Episode
from helpers import commands
from helpers.agents import PROBLEM, TOKENIZER
from helpers.tables import for_each_row

AGENT = "agent:helpers.faulty_agents"
SETTINGS: dict[str, Any] = {
    "model": "none",
    "data": {"train": "builtin:sums"},
    "environment": {"name": f"{AGENT}:play", "timeout_s": 1.0},
}


PATIENT_S = 60.0
"""A time limit that no agent reaches which does something, however busy the machine is."""


@pytest.fixture(scope="module")
def impatient() -> Iterator[AgentEpisodes]:
    """Episodes with a time limit of a second."""
    config = build_config(SETTINGS, [])
    with AgentPool(config.environment, memory_gib=0.25, output=WorkerOutput()) as pool:
        yield agent_episodes(config, TOKENIZER, pool)


def limited(impatient: AgentEpisodes, agent: str) -> AgentEpisodes:
    """Return the episodes of an agent: only one that hangs keeps the limit of a second."""
    if agent.startswith("hangs"):
        return impatient
    config = build_config(SETTINGS, [f"environment.timeout_s={PATIENT_S}"])
    return replace(impatient, config=config)


def started(impatient: AgentEpisodes, agent: str) -> str:
    """Do what a start of training does; return its warnings or its refusal."""
    try:
        return "\n".join(
            limited(impatient, agent).try_out([replace(PROBLEM, fields={"agent": agent})])
        )
    except ConfigError as refusal:
        return str(refusal)


@for_each_row(
    ("agent", "parts"),
    [
        ("one_call", ()),
        ("relay_calculator", ()),
        ("is_random", ()),
        # one kind of nonsense is a number
        ("answers_must_be_numbers", ()),
        (
            "raises",
            ("3 of 3 episodes of nonsense failed", "the game server is down (faulty_agents"),
        ),
        ("returns_nothing", ("3 of 3", "the agent ended without a reward: return a number")),
        ("hangs_behind_a_call", ("1 of 1", "the agent did nothing for 1 s")),
        ("asks_warmer", ("3 of 3", "temperature=0.7, and the run samples at temperature=1")),
        ("says_the_time", ("warning: agent helpers.", "draw from the global `random`")),
    ],
)
def test_an_agent_is_started_once_before_the_first_step(impatient, monkeypatch, agent, parts):
    monkeypatch.setattr(nonsense, "BUDGET_S", PATIENT_S)
    said = started(impatient, agent)
    assert [part for part in parts if part not in said] == []
    assert bool(said) is bool(parts)
    is_refused = bool(parts) and not said.startswith("warning")
    assert (f"dapo test {AGENT}:play plays the same episodes" in said) is is_refused


def test_an_agent_whose_first_episode_takes_long_is_a_warning(
    impatient: AgentEpisodes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nonsense, "BUDGET_S", 0.3)
    assert "has not ended within" in started(impatient, "hangs")


@for_each_row(
    ("agent", "verdict", "suspicious"),
    [
        ("is_random", "nothing suspicious in 10 episodes of nonsense, played twice", False),
        ("answers_must_be_numbers", "7 of 10 episodes failed: agent: raised ValueError", True),
        ("says_the_time", "10 of 10 episodes differ when they are repeated", True),
        ("hangs", "1 of 1 episodes failed: the agent did nothing for 1 s", True),
    ],
)
def test_all_episodes_of_nonsense_are_judged(impatient, agent, verdict, suspicious):
    plays = limited(impatient, agent).play_nonsense([replace(PROBLEM, fields={"agent": agent})])
    assert verdict_on(plays).startswith(verdict)
    assert is_suspicious(plays) is suspicious


def test_an_episode_that_failed_in_one_of_two_plays_says_nothing_of_the_seed():
    first = Play(0, "a number", Episode((), (1.0,)))
    late = Play(0, "a number", Episode((), (), error="the agent did nothing for 1 s"))
    other = Play(0, "a number", Episode((), (2.0,)))
    assert compared(first, first).differs is False
    assert compared(first, other).differs is True
    assert compared(first, late) == late
    assert compared(late, first) == late


def test_the_command_tests_an_agent_by_its_name(capsys: pytest.CaptureFixture[str]):
    code, out, _ = commands.run(capsys, "test", f"{AGENT}:says_the_time", "--verbose")
    assert (code, out.count("random text")) == (1, 3)
    assert "the agent is not deterministic" in out
    code, _, err = commands.run(capsys, "test", f"{AGENT}:no_such_agent")
    assert (code, "environment.name=agent:" in err, "no_such_agent" in err) == (2, True, True)


@for_each_row(
    ("options", "message"),
    [
        (["environment.tools=[math:sqrt]"], "sends its own tools with its requests"),
        (["environment.credit=turn"], "set environment.credit=episode"),
        (["data.system=Be brief."], "data.system would not be seen: the agent helpers.faulty"),
        (["data.instruction=Be brief."], "writes its own messages; write the text there"),
        (["environment.command=[node, a.js]"], "both play the episodes; leave one of them out"),
    ],
)
def test_an_option_that_an_agent_would_leave_without_effect_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_config(SETTINGS, options)


def test_a_program_that_is_not_there_is_refused_with_its_option():
    config = build_config({**SETTINGS, "environment": {"command": ["no-such-program", "a b"]}}, [])
    with pytest.raises(
        ConfigError, match=r"environment.command=no-such-program 'a b': there is no"
    ):
        AgentPool(config.environment, memory_gib=0.25, output=WorkerOutput())
