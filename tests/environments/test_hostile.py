"""Environments that misbehave: each fault is an error of its episode alone, never a zero, and
nothing stops the run.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo.cli.train import start_run
from dapo.config.environment import EnvironmentConfig
from dapo.core.errors import ConfigError
from dapo.environments.pool import EnvironmentPool
from dapo.environments.starts import environment_seed
from dapo.processes.output import WorkerOutput
from dapo.runs.rollout_table import read_rollouts
from dapo.types import Problem
from helpers.environments import PROBLEM, open_pool
from helpers.hostile_environments import ACTIONS, fault_of
from helpers.tiny_runs import metrics, tiny

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits and orphans are those of Linux"),
    pytest.mark.usefixtures("forked_workers"),
]
ANSWER_S = 240
"""For an answer: it may wait for three starts of a process, on a machine busy with others."""
HOSTILE = "helpers.hostile_environments:Hostile"

ERRORS = {
    "raise": "raised ValueError: it broke (hostile_environments.py, line ",
    "raise nothing": "raised AssertionError (",
    "no text": "raised NoText: (its text cannot be read)",
    "long error": f"raised ValueError: {'x' * 300} (",
    "half an error": "raised ValueError: \ud800\0 (",
    "sys.exit": "raised SystemExit: 4",
    "generator exit": "raised GeneratorExit",
    "stop iteration": "raised StopIteration",
    "keyboard interrupt": "the worker process was killed by SIGINT",
    "recursion": "raised RecursionError",
    "warning": "raised UserWarning: odd",
    "read the input": "raised EOFError",
    "exit": "the worker process exited with code 3",
    "segfault": "the worker process was killed by SIGSEGV",
    "kill itself": "the worker process was killed by SIGKILL",
    "kill its supervisor": "the supervisor of the worker process was ended",
    "memory": "raised MemoryError (a worker may use reward.memory_gib)",
    "memory of children": (
        "the worker process and its descendants used more than 0.3 GiB (reward.memory_gib)"
    ),
    "chdir": "it left the working directory changed, so its process was replaced",
    "close the input": "it left standard input closed or replaced, so its process was replaced",
    "close the output": "it left standard output closed or replaced, so its process was replaced",
    "close everything": "the worker process ",
    "no json": "the worker process exited with code 1",
    "forged number": (
        "the worker process sent an invalid answer (the answer to a different request)"
    ),
    "forged answer": "the worker process sent an invalid answer ('observation')",
    "forged reward": (
        "the worker process sent an invalid answer (the reward is str 'much', expected a number or"
        " None)"
    ),
    "forged nonsense": "the worker process sent an invalid answer (",
    "no result": "step: expected a StepResult, got NoneType",
    "a text": "step: expected a StepResult, got str",
    "generator": "step: expected a StepResult, got generator",
    "class": "step: expected a StepResult, got type",
    "number": "step: the observation is int '5', expected a text or a list of messages",
    "bytes": "step: the observation is bytes",
    "messages of numbers": "step: the observation is list",
    "messages of pictures": "step: the observation is list",
    "no role": "step: the observation is list",
    "nan": "step: the reward is nan, expected a finite number",
    "infinite": "step: the reward is inf",
    "huge": "step: int too large to convert to float",
    "large reward": (
        "step: the reward is 1e+30, expected a finite number of at most 1e+12 in size"
    ),
    "reward in words": "step: the reward is str 'much', expected a number or None",
    "reward as a text": "step: the reward is str '1', expected a number or None",
    "rewards": "step: ",
    "complex": "step: ",
    "done in words": "step: done is str 'no', expected True or False",
    "done unknown": "step: done is NoneType None, expected True or False",
    "correct in words": "step: correct is str 'no', expected True or False",
    "half correct": "step: correct is float 0.5, expected True or False",
    "half a call": "step: 'float' object cannot be interpreted as an integer",
    "calls": "step: ",
    "calls below zero": ("step: tool_errors is -1, expected a number from 0 to 1,000,000"),
    "too large": "the worker process ",
}
HARMLESS = {
    "fork": "forked",
    "subprocess": "left behind",
    "print": "printed",
    "thread": "a thread stays",
    "alarm": "an alarm comes",
    "variables": "cleared",
    "no garbage collection": "kept",
    "seed": "seeded",
    "large": "y" * 10**7,
    "half a character": "\ud800",
    "null": "a\0b",
    "text of a class": "as it is",
    "number of numpy": "half",
    "true": "true",
    "no output": "no output",
}
HANGING = ("loop", "deaf", "slow number", "endless messages", "busy")


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with open_pool(HOSTILE, memory_gib=0.3) as opened:
        yield opened


def test_each_action_has_its_expected_outcome():
    assert len(ACTIONS) >= 70
    assert ACTIONS.keys() == {*ERRORS, *HARMLESS, *HANGING}


def test_a_fault_is_an_error_of_its_episode_and_another_episode_goes_on(pool: EnvironmentPool):
    wrong = dict[str, str]()
    for action, expected in ERRORS.items():
        other = pool.open(PROBLEM, 1)
        episode = pool.open(PROBLEM, 2)
        assert other.step("first").result(ANSWER_S)["observation"] == "read first"
        assert episode.step("before").result(ANSWER_S)["observation"] == "read before"
        error = episode.step(action).result(ANSWER_S).get("error", "none")
        if not error.startswith(expected):
            wrong[action] = error
        assert episode.step("after").result(ANSWER_S) == {"error": episode.error}, action
        assert other.step("second").result(ANSWER_S)["observation"] == "read second", action
        episode.close()
        other.close()
    assert wrong == {}


def test_a_harmless_action_is_answered_and_another_episode_goes_on(pool: EnvironmentPool):
    for action, observation in HARMLESS.items():
        other = pool.open(PROBLEM, 1)
        episode = pool.open(PROBLEM, 2)
        assert other.step("first").result(ANSWER_S)["observation"] == "read first"
        answer = episode.step(action).result(ANSWER_S)
        assert answer.get("observation") == observation, (action, answer.get("error"))
        assert (answer["done"], answer["correct"]) == (False, None), action
        assert answer["reward"] == {"number of numpy": 0.5, "true": 1.0}.get(action), action
        assert other.step("second").result(ANSWER_S)["observation"] == "read second", action
        episode.close()
        other.close()


@pytest.mark.parametrize("action", ["raise", "exit", "number", "messages of numbers", "no result"])
def test_a_fault_at_the_beginning_is_an_error_of_every_call(pool: EnvironmentPool, action: str):
    episode = pool.open(Problem("2", "Q", action), 1)
    found = episode.reset.result(ANSWER_S)
    if action == "no result":  # None: the problem's own prompt
        assert found == {"prompt": None}
    else:
        assert "error" in found
        assert episode.step("x").result(ANSWER_S) == {"error": episode.error}


def test_what_hangs_takes_its_time_limit_and_no_more():
    with open_pool(HOSTILE, timeout_s=4.0, memory_gib=0.3, workers=len(HANGING) + 1) as pool:
        episodes = [pool.open(PROBLEM, 1) for _ in (*HANGING, "the last")]
        for episode in episodes:
            assert episode.reset.result(ANSWER_S) == {"prompt": None}
        began = time.monotonic()
        answers = [episode.step(action) for episode, action in zip(episodes, HANGING, strict=False)]
        assert episodes[-1].step("x").result(ANSWER_S)["observation"] == "read x"
        assert [answer.result(ANSWER_S) for answer in answers] == [
            {"error": "timed out after 4 s"}
        ] * len(HANGING)
        assert time.monotonic() - began < 20  # one after the other they would take that


def test_an_episode_whose_close_fails_costs_no_other_episode():
    with open_pool(HOSTILE, timeout_s=3.0) as pool:
        other = pool.open(PROBLEM, 1)
        assert other.step("first").result(ANSWER_S)["observation"] == "read first"
        for action in ("raise in close", "exit in close", "loop in close"):
            episode = pool.open(PROBLEM, 2)
            assert episode.step(action).result(ANSWER_S)["observation"] == f"read {action}"
            episode.close()
            assert other.step(action).result(ANSWER_S)["observation"] == f"read {action}"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "making one with how raised ValueError: it broke"),
        ("exit", "the worker process exited with code 3"),
        ("loop", "the worker process was not ready after 4 s"),
        ("memory", "making one with how raised MemoryError (a worker may use reward.memory_gib)"),
    ],
)
def test_a_constructor_that_fails_is_refused_in_a_sentence(how: str, reason: str):
    name = "helpers.hostile_environments:Startup"
    config = EnvironmentConfig(name=name, options={"how": how}, workers=1)
    with pytest.raises(ConfigError) as refused:
        EnvironmentPool(
            config,
            memory_gib=0.3,
            startup_s=4.0 if how == "loop" else 60.0,
            output=WorkerOutput(),
        )
    assert str(refused.value).startswith(f"environment.name={name}: {reason}")


def test_a_constructor_that_fails_later_is_an_error_of_its_episode_and_its_process_goes_on():
    with open_pool(
        "helpers.hostile_environments:Startup", options={"how": "raise", "after": 2}
    ) as pool:
        first = pool.open(PROBLEM, 1)
        second = pool.open(PROBLEM, 1)
        assert first.reset.result(ANSWER_S) == {"prompt": None}
        assert second.reset.result(ANSWER_S)["error"].startswith("raised ValueError: it broke")
        (process,) = pool.worker_pids
        second.close()
        assert first.step("x").result(ANSWER_S)["observation"] == "read x"
        assert pool.worker_pids == [process]


def test_a_constructor_that_forks_leaves_one_process_that_answers():
    with open_pool("helpers.hostile_environments:Startup", options={"how": "fork"}) as pool:
        episode = pool.open(PROBLEM, 1)
        for action in "abc":
            assert episode.step(action).result(ANSWER_S)["observation"] == f"read {action}"


def test_an_environment_whose_episodes_share_a_state_is_an_error_when_its_process_is_lost():
    with open_pool("helpers.hostile_environments:Sharing") as pool:
        one, two, third = (pool.open(PROBLEM, 1) for _ in range(3))
        assert [each.step("x").result(ANSWER_S)["observation"] for each in (one, two)] == ["1", "2"]
        assert "exited" in third.step("exit").result(ANSWER_S)["error"]
        assert (
            "with the same seed gave a different answer to call 1 (step)"
            in two.step("x").result(ANSWER_S)["error"]
        )


def test_a_run_counts_the_faults_of_its_episodes_and_trains_on_none_of_them(tmp_path: Path):
    config = tiny(
        "environment=helpers.hostile_environments:SeldomHostile",
        "environment.max_observation_tokens=24",
        "rollout.max_response_tokens=64",
        "reward.verifier=auto",
        "train.num_steps=2",
        "data.eval=null",
        "train.eval_every=0",
        "dynamic_sampling.enabled=false",
    )
    start_run(config, run_dir=tmp_path / "run", config_name="t")
    columns = [
        "step",
        "problem_id",
        "episode",
        "error",
        "outcome",
        "score",
        "correct",
        "reward",
        "advantage",
    ]
    rows: list[dict[str, Any]] = read_rollouts(
        sorted((tmp_path / "run/rollouts").iterdir()), columns
    ).to_pylist()
    found: set[str] = set()
    num_faults = Counter[int]()
    for row in rows:
        episode = json.loads(row["episode"])
        first = "end" if episode["is_cut"] and len(episode["messages"]) == 1 else "step"
        fault = fault_of(
            environment_seed(config.train.seed, Problem(row["problem_id"], "", "")), first
        )
        if fault is None:
            assert row["error"] is None
            assert abs(row["score"]) >= 0.5
        else:
            found.add(fault)
            num_faults[row["step"]] += 1
            expected = ERRORS[fault].replace("\ud800", "\\ud800")
            if expected.startswith("step: "):  # the method whose result is wrong
                expected = expected.replace("step", first, 1)
            assert row["error"].startswith(f"environment: {expected}")
            assert [row[name] for name in ("score", "correct", "reward", "advantage")] == [None] * 4
    assert len(found) >= 2
    for row in metrics(tmp_path / "run")[1:]:
        assert row["rollout/environment_errors"] == num_faults[row["step"]] > 0
