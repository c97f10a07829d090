"""How a worker gets the result of an agent: of a coroutine, and of a command that it starts."""

import asyncio
import sys
import threading
import time
from typing import Any

from dapo.environments.agents.worker import _command, _result_of
from dapo.types import Problem

PROBLEM = Problem("1", "What is 17 + 25?", "42")


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
