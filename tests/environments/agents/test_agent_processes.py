"""Agents in their own processes: whatever they do is an error of their episode, and leaves nothing."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.environments.agents import pool as agent_pool
from dapo.environments.agents.pool import AgentPool, without_proxy
from dapo.processes.output import WorkerOutput
from dapo.processes.supervisor import _descendants
from helpers.agents import agent_options, agents_of, to_play
from helpers.faulty_agents import MISBEHAVING
from helpers.processes import is_alive, wait_until
from helpers.tables import for_each_row

OPTIONS = agent_options(timeout_s=4.0, workers=1, max_turns=8)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentPool]:
    output = WorkerOutput()
    with AgentPool(OPTIONS, memory_gib=0.125, output=output) as opened:
        yield opened
        output.move_to(tmp_path_factory.mktemp("output") / "agents.log")


def processes() -> list[int]:
    return sorted(filter(is_alive, _descendants(os.getpid())))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Settling:
    """Agents of which one settles at each look, and then none; a look takes a while."""

    def __init__(self, healthy: int, looks: list[float]) -> None:
        self._healthy = healthy
        self._looks = looks
        self.settled: list[int] = []

    def look(self) -> bool:
        self._looks.append(self._looks[-1] + 3.0)
        if len(self.settled) < self._healthy:
            self.settled.append(len(self.settled))
        return True  # one of them hangs

    def pause(self, left_s: float) -> None:
        """Another look follows."""


def test_the_time_limit_begins_anew_with_each_agent_that_settles(
    pool: AgentPool, monkeypatch: pytest.MonkeyPatch
):
    """A hundred that start together on two cores are slow, and one that hangs is still found."""
    clock = [0.0]
    settling = Settling(healthy=100, looks=clock)
    monkeypatch.setattr(agent_pool, "_Settling", lambda *arguments: settling)
    monkeypatch.setattr(agent_pool.time, "monotonic", lambda: clock[-1])
    assert len(pool.settle({}, 4.0)) == 100
    assert clock[-1] == 100 * 3.0 + 2 * 3.0


def test_an_agent_beside_a_busy_process_is_told_what_helps(pool: AgentPool):
    name = "plays_beside_a_busy_process"
    (episode,) = agents_of(pool, OPTIONS).play([to_play(name)]).values()
    assert episode.episode is not None
    assert str(episode.episode.error).startswith(MISBEHAVING[name])
    assert "rollout.clock=load" in str(episode.episode.error)
    (episode,) = agents_of(pool, OPTIONS, by_load=True).play([to_play(name)]).values()
    assert episode.episode is not None
    assert episode.episode.error is None


@pytest.mark.nightly  # thirty agents that hang, spin and flood at once need a machine of their own
def test_whatever_an_agent_does_is_an_error_of_its_episode_and_leaves_nothing(pool: AgentPool):
    played = agents_of(pool, OPTIONS)
    played.play([to_play("one_call", "first")])
    wait_until(lambda: len(processes()) <= 2, what="the end of the first agent")
    processes_before = processes()
    descriptors_before = descriptors()
    began = time.monotonic()
    episodes = played.play([to_play(agent) for agent in MISBEHAVING])
    assert time.monotonic() - began < 60
    reasons = {name: episode.episode.error or "" for name, episode in episodes.items()}  # type: ignore[union-attr]
    wrong = {
        name: reason for name, reason in reasons.items() if not reason.startswith(MISBEHAVING[name])
    }
    assert wrong == {}
    assert all(len(reason) < 500 for reason in reasons.values())
    assert all(episode.episode.rewards[-1:] in ((), (0.0,)) for episode in episodes.values())  # type: ignore[union-attr]
    wait_until(
        lambda: not set(processes()) - set(processes_before), what="the end of all processes"
    )
    wait_until(lambda: descriptors() <= descriptors_before, what="the end of all connections")
    assert pool.server.num_connections == 0
    (episode,) = played.play([to_play("one_call", "again")]).values()
    assert episode.episode is not None
    assert episode.episode.error is None


def test_children_and_connections_of_an_agent_that_ends_well_end_with_it(pool: AgentPool):
    played = agents_of(pool, OPTIONS)
    before = processes()
    (episode,) = played.play([to_play("leaves_children")]).values()
    assert episode.episode is not None
    assert episode.episode.error is None
    wait_until(lambda: not set(processes()) - set(before), what="the end of all processes")


def test_a_library_that_an_episode_imports_is_there_in_later_ones_unless_it_keeps_a_key(
    pool: AgentPool,
):
    played = agents_of(pool, OPTIONS)
    found = []
    for number, (module, keeps) in enumerate(
        [("colorsys", False), ("tabnanny", True), ("helpers.tables", False)] * 2
    ):
        asked = to_play("imports_late", f"{number}", module=module, keeps=keeps)
        (episode,) = played.play([asked]).values()
        assert episode.episode is not None
        found.append(episode.episode.components["was_there"])
    # modules beside the agent's are the user's code, which may draw random numbers
    assert found == [0, 0, 0, 1, 0, 0]


def test_a_module_that_cannot_be_read_costs_no_reward(pool: AgentPool):
    (episode,) = agents_of(pool, OPTIONS).play([to_play("leaves_a_lazy_module")]).values()
    assert episode.episode is not None
    assert episode.episode.error is None
    assert sum(episode.episode.rewards) == 1.0


def test_an_agent_reaches_the_endpoint_where_the_machine_has_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nothing is there
    monkeypatch.setenv("NO_PROXY", "example.com")
    with AgentPool(OPTIONS, memory_gib=0.125, output=WorkerOutput()) as opened:
        (episode,) = agents_of(opened, OPTIONS).play([to_play("one_call")]).values()
    assert episode.episode is not None
    assert episode.episode.error is None


@for_each_row(
    ("before", "after"),
    [
        ({}, {"no_proxy": "::1", "NO_PROXY": "::1"}),
        ({"NO_PROXY": "a.b", "X": "y"}, {"no_proxy": "a.b,::1", "NO_PROXY": "a.b,::1", "X": "y"}),
        ({"no_proxy": "a", "NO_PROXY": "b"}, {"no_proxy": "a,::1", "NO_PROXY": "b,::1"}),
        ({"no_proxy": "*"}, {"no_proxy": "*"}),
    ],
)
def test_the_hosts_without_a_proxy_stay_and_the_endpoint_is_one(
    before: dict[str, str], after: dict[str, str]
):
    assert without_proxy(before, "::1") == after


def test_nothing_listens_beyond_loopback(pool: AgentPool):
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:
            continue
    listening = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/self/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # LISTEN
                listening.append(fields[1])
    ports = {f"0100007F:{port:04X}" for port in (pool.server.port, pool.server.control_port)}
    assert set(listening) >= ports
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}


def test_where_processes_cannot_be_seen_an_agent_is_waited_for_by_its_requests(pool: AgentPool):
    pool.sees_processes = False
    try:
        played = agents_of(pool, OPTIONS)
        requests = [to_play(agent) for agent in ("one_call", "wild", "raises")]
        episodes = played.play(requests)
        assert pool.sees_processes is False
    finally:
        pool.sees_processes = True
    expected = agents_of(pool, OPTIONS).play(requests)
    assert {name: episode.token_ids for name, episode in episodes.items()} == {
        name: episode.token_ids for name, episode in expected.items()
    }


def test_closed_in_the_middle_of_episodes_a_pool_leaves_nothing():
    before = processes()
    with AgentPool(OPTIONS, memory_gib=0.125, output=WorkerOutput()) as opened:
        played = agents_of(opened, OPTIONS, by_load=True)
        played.engine.submit([to_play(agent) for agent in ("hangs", "spins", "leaves_children")])
        wait_until(lambda: len(set(processes()) - set(before)) >= 9, what="the start of the agents")
        began = time.monotonic()
    assert time.monotonic() - began < 10
    wait_until(lambda: not set(processes()) - set(before), what="the end of all processes")
