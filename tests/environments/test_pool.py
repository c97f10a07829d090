"""Environments in processes: episodes of one process are independent, and a lost process is
rebuilt.
"""

import os
import re
import signal
import sys
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from dapo.core.errors import ConfigError
from dapo.types import Problem
from helpers.environments import PROBLEM, open_pool

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="limits and orphans are those of Linux"
)


def test_a_lost_process_is_replaced_and_its_episodes_are_rebuilt_from_their_calls():
    with open_pool("helpers.environments:Dice") as pool:
        alone = pool.open(PROBLEM, 7)
        expected = [alone.step(str(i)).result(240)["observation"] for i in range(6)]
        first = pool.open(PROBLEM, 7)
        second = pool.open(PROBLEM, 8)
        found = []
        for i in range(6):
            if i in (2, 4):
                os.kill(pool.worker_pids[0], signal.SIGKILL)
            second.step("between")
            found.append(first.step(str(i)).result(240)["observation"])
        assert found == expected
        assert second.step("last").result(240)["observation"] != expected[-1]


def test_an_environment_gets_the_columns_with_their_types_also_when_it_is_rebuilt():
    columns = {"day": date(2026, 1, 2), "price": Decimal("1.50"), "key": UUID(int=7)}
    problem = Problem("1", "q", "5", "s", columns)
    expected = f"date 2026-01-02, Decimal 1.50, UUID {UUID(int=7)}"
    with open_pool("helpers.environments:NamesTypes") as pool:
        episode = pool.open(problem, 7)
        assert episode.reset.result(60)["prompt"] == expected
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        assert episode.step("x").result(60)["done"]  # its reset was repeated, and is the same


def test_two_episodes_in_one_process_do_not_share_the_global_random_state():
    with open_pool("helpers.environments:Dice") as pool:
        whole = pool.open(PROBLEM, 3)
        expected = [whole.step("x").result(240)["observation"] for _ in range(4)]
        one = pool.open(PROBLEM, 3)
        two = pool.open(PROBLEM, 4)
        found = [
            (one.step("x").result(240)["observation"], two.step("x").result(240))[0]
            for _ in range(4)
        ]
        assert found == expected


def test_reset_draws_other_numbers_than_the_constructor():
    with open_pool("helpers.environments:DrawsTwice") as pool:
        prompt = pool.open(PROBLEM, 3).reset.result(60)["prompt"]
        assert pool.open(PROBLEM, 3).reset.result(60)["prompt"] == prompt
        assert len(set(re.findall(r"0\.\d+", prompt))) == 4


def test_an_environment_that_cannot_be_repeated_is_an_error_when_its_process_is_lost():
    with open_pool("helpers.environments:Forgetful") as pool:
        kept = pool.open(PROBLEM, 1)
        lost = pool.open(PROBLEM, 2)
        assert "observation" in kept.step("a").result(240)
        assert lost.step("exit").result(240)["error"] == "the worker process exited with code 3"
        expected = (
            "the environment is not deterministic: replaying the same actions with the same seed"
            " gave a different answer to call 1 (step)"
        )
        assert kept.step("b").result(240) == {"error": expected}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "calclator",
            {},
            "environment.name=calclator: there is no such environment; did you mean calculator?",
        ),
        (
            "calculator",
            {"digits": 3},
            "environment.name=calculator: making one with digits raised TypeError",
        ),
        ("helpers.environments:Missing", {}, "module helpers.environments has no 'Missing'"),
        (
            "helpers.environments:LocalPool",
            {"make": 1},
            "environment.name=helpers.environments:LocalPool: LocalPool has no",
        ),
        (
            "helpers.faulty_environments:SeedAlone",
            {},
            r"SeedAlone.reset\(seed=None, options=None\) is called as reset\(problem, seed\)",
        ),
        ("helpers.faulty_environments:TwoInputs", {}, r"is called as step\(action\)"),
        ("helpers.faulty_environments:NeedsModel", {}, "environment.options={model: VALUE}"),
        ("gym:CartPole-v1", {}, "Gymnasium have arrays, and a policy reads text"),
        ("textarena:Chess", {}, "textarena"),
        ("skyrl:gsm9k", {}, "environment.name=skyrl:gsm9k: .*skyrl.gym"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_a_sentence(
    name: str, options: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as refused:
        open_pool(name, options=options)
    assert "\n" not in str(refused.value)


def test_pending_calls_of_a_closed_pool_are_errors():
    pool = open_pool("helpers.hostile_environments:Hostile")
    episode = pool.open(PROBLEM, 1)
    future = episode.step("loop")
    after = episode.step("later")
    pool.close()
    assert "error" in future.result(30)
    assert "error" in after.result(30)
    assert pool.open(PROBLEM, 1).reset.result(5) == {"error": "the environment pool is closed"}
