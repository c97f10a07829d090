"""Environments in processes: each fault is an error of its episode alone, and a lost process is rebuilt."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dapo.config.environment import EnvironmentConfig
from dapo.core.errors import ConfigError
from dapo.environments.pool import EnvironmentPool
from dapo.rewards.workers.output import VerifierOutput
from dapo.types import Problem

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and orphans are those of Linux")
PROBLEM = Problem("1", "Q", "A", fields={"digits": [1, 2]})


def open_pool(name: str, *, memory_gib: float = 1.0, **options: Any) -> EnvironmentPool:
    config = EnvironmentConfig(name=name, **{"workers": 1, "timeout_s": 30.0, **options})
    return EnvironmentPool(config, memory_gib=memory_gib, output=VerifierOutput())


@pytest.fixture(scope="module")
def hostile() -> Iterator[EnvironmentPool]:
    with open_pool("helpers.environments:Hostile", timeout_s=4.0, memory_gib=0.3) as pool:
        yield pool


ERRORS = {
    "raise": "raised ValueError: it broke",
    "exit": "the worker process exited with code 3",
    "sys.exit": "raised SystemExit: 4",
    "loop": "timed out after 4 s",
    "segfault": "the worker process was killed by SIGSEGV",
    "kill itself": "the worker process was killed by SIGKILL",
    "memory": "raised MemoryError",
    "chdir": "it left the working directory changed, so its process was replaced",
    "close everything": "the worker process ",
    "no result": "raised TypeError: expected a StepResult, got NoneType",
    "a text": "raised TypeError: expected a StepResult, got str",
    "number": "raised TypeError: the observation is int '5', expected a text or a list of messages",
    "messages of numbers": "raised TypeError: the observation is list",
    "nan": "raised ValueError: the reward is nan, expected a finite number",
    "infinite": "raised ValueError: the reward is inf",
    "text reward": "raised ValueError: could not convert string to float: 'much'",
}


@pytest.mark.parametrize("action", ERRORS)
def test_a_fault_is_an_error_of_its_episode_and_another_episode_goes_on(hostile: EnvironmentPool, action: str):
    other, episode = hostile.open(PROBLEM, 1), hostile.open(PROBLEM, 2)
    assert other.step("first").result(60)["observation"] == "read first"
    assert episode.step("before").result(60)["observation"] == "read before"
    assert episode.step(action).result(120)["error"].startswith(ERRORS[action])
    assert episode.step("after").result(60) == {"error": episode.error}
    assert other.step("second").result(60)["observation"] == "read second"
    episode.close()
    other.close()


@pytest.mark.parametrize("action", ["raise", "exit", "loop", "no result"])
def test_a_fault_at_the_beginning_is_an_error_of_every_call(hostile: EnvironmentPool, action: str):
    episode = hostile.open(Problem("2", "Q", action), 1)
    found = episode.reset.result(60)
    if action == "no result":  # None: the problem's own prompt
        assert found == {"prompt": None}
    else:
        assert "error" in found
        assert episode.step("x").result(60) == {"error": episode.error}


@pytest.mark.parametrize(("action", "observation"), [("fork", "forked"), ("print", "printed"), ("surrogate", "\ud800")])
def test_harmless_actions_are_answered(hostile: EnvironmentPool, action: str, observation: str):
    assert hostile.open(PROBLEM, 1).step(action).result(60)["observation"] == observation


def test_an_observation_of_ten_million_characters_arrives(hostile: EnvironmentPool):
    assert len(hostile.open(PROBLEM, 1).step("large").result(60)["observation"]) == 10**7


def test_a_lost_process_is_replaced_and_its_episodes_are_rebuilt_from_their_calls():
    with open_pool("helpers.environments:Dice") as pool:
        alone = pool.open(PROBLEM, 7)
        expected = [alone.step(str(i)).result(60)["observation"] for i in range(6)]
        first, second = pool.open(PROBLEM, 7), pool.open(PROBLEM, 8)
        found = []
        for i in range(6):
            if i in (2, 4):
                os.kill(pool.worker_pids[0], signal.SIGKILL)
            second.step("between")
            found.append(first.step(str(i)).result(60)["observation"])
        assert found == expected
        assert second.step("last").result(60)["observation"] != expected[-1]


def test_two_episodes_in_one_process_do_not_share_the_global_random_state():
    with open_pool("helpers.environments:Dice") as pool:
        whole = pool.open(PROBLEM, 3)
        expected = [whole.step("x").result(60)["observation"] for _ in range(4)]
        one, two = pool.open(PROBLEM, 3), pool.open(PROBLEM, 4)
        found = [(one.step("x").result(60)["observation"], two.step("x").result(60))[0] for _ in range(4)]
        assert found == expected


def test_an_environment_that_cannot_be_repeated_is_an_error_when_its_process_is_lost():
    with open_pool("helpers.environments:Forgetful") as pool:
        kept, lost = pool.open(PROBLEM, 1), pool.open(PROBLEM, 2)
        assert "observation" in kept.step("a").result(60)
        assert lost.step("exit").result(60)["error"] == "the worker process exited with code 3"
        expected = "the environment is no function of its seed and its actions: call 1 (step) was answered differently"
        assert kept.step("b").result(60) == {"error": expected}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("calclator", {}, "environment.name=calclator: there is no such environment; did you mean calculator?"),
        ("calculator", {"digits": 3}, "environment.name=calculator: making one with digits raised TypeError"),
        ("helpers.environments:Missing", {}, "module helpers.environments has no 'Missing'"),
        (
            "helpers.environments:LocalPool",
            {"make": 1},
            "environment.name=helpers.environments:LocalPool: LocalPool has no",
        ),
        ("textarena:Chess", {}, "textarena"),
        ("skyrl:gsm9k", {}, "environment.name=skyrl:gsm9k: .*skyrl.gym"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_a_sentence(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as refused:
        open_pool(name, options=options)
    assert "\n" not in str(refused.value)


def test_pending_calls_of_a_closed_pool_are_errors():
    pool = open_pool("helpers.environments:Hostile")
    episode = pool.open(PROBLEM, 1)
    future, after = episode.step("loop"), episode.step("later")
    pool.close()
    assert "error" in future.result(30)
    assert "error" in after.result(30)
    assert pool.open(PROBLEM, 1).reset.result(5) == {"error": "the environment pool is closed"}
