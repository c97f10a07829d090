"""How a worker calls an agent and gets its result: a function, a class, a coroutine, a command."""

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from dapo.core.errors import ConfigError
from dapo.environments.agents.worker import _command, _function, _result_of
from dapo.types import Problem
from helpers.tables import for_each_row

PROBLEM = Problem("1", "What is 17 + 25?", "42")


class WithoutRun:
    def solve(self, problem: Problem) -> float:
        return 1.0


class WithLimit:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def run(self, data: Any) -> float:
        return float(self.limit)


def limited(problem: Problem, limit: int = 1) -> float:
    return float(limit)


def by_name(*, problem: Problem) -> float:
    return 1.0


def played(code: str) -> Any:
    return _command([sys.executable, "-c", code])(PROBLEM, "http://127.0.0.1:1/v1", "key")


def test_the_last_line_of_a_command_is_its_reward():
    assert played("import json, sys; print('a'); print(len(json.load(sys.stdin)['prompt']))") == 16
    assert played("print(0.5); print(' ')") == 0.5
    assert played("pass") is None
    # the problem is larger than a pipe and not read
    long = Problem("1", "x" * 10**6, "42")
    assert _command([sys.executable, "-c", "print(1)"])(long, "http://127.0.0.1:1/v1", "key") == 1
    assert played(r"import sys; sys.stdout.buffer.write(b'\xff\n1\n')") == 1
    assert "exit code 3" in played("raise SystemExit(3)").reason
    assert "the last line of the command is 'right'" in played("print('right')").reason


def test_a_process_that_a_command_leaves_behind_is_not_waited_for():
    left = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(8)'])"
    start = time.monotonic()
    assert played(f"import subprocess, sys; {left}; print(1)") == 1
    assert time.monotonic() - start < 7


def test_a_thread_of_an_agent_that_is_blocked_is_not_waited_for():
    release = threading.Event()

    async def play() -> float:
        asyncio.get_running_loop().run_in_executor(None, release.wait, 60)
        await asyncio.sleep(0)
        return 0.5

    start = time.monotonic()
    try:
        assert _result_of(play()) == 0.5
        assert time.monotonic() - start < 30
    finally:
        release.set()
        asyncio.get_event_loop_policy().get_event_loop().close()
        asyncio.set_event_loop(None)


@for_each_row(
    ("name", "options", "message"),
    [
        ("WithoutRun", {}, r"WithoutRun has no method run\(self, data"),
        ("WithLimit", {}, r"making WithLimit with no options raised TypeError: .*'limit'"),
        ("limited", {"limits": 3}, r"limited\(problem, limit=1\) has no parameter limits"),
        ("by_name", {}, r"a function of the problem, .* got by_name\(\*, problem: "),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_in_a_sentence(
    name: str, options: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        _function(f"{__name__}:{name}", options)


def test_the_options_reach_a_function_or_the_constructor_of_a_class():
    for name in ("limited", "WithLimit"):
        play = _function(f"{__name__}:{name}", {"limit": 3})
        assert play(PROBLEM, "http://127.0.0.1:1/v1", "key") == 3
