"""How a worker calls an agent and gets its result: a function, a class, a coroutine, a command."""

import asyncio
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dapo.core.errors import ConfigError
from dapo.environments.agents.engine import _judged
from dapo.environments.agents.worker import _command, _function, _report, _result_of, row_of
from dapo.rewards.verdicts import problem_to_frame
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


def test_the_columns_of_the_data_keep_their_values_in_the_row():
    """As `reset` of an environment gets them; only the prompt is the problem's."""
    own = {"id": 17, "question": "what is 2+3?", "answer": 5, "level": 3, "messages": "a note"}
    problem = Problem("446947ca", "Solve: what is 2+3?", "5", fields=own)
    prompt = [{"role": "user", "content": "Solve: what is 2+3?"}]
    assert row_of(problem) == own | {"prompt": problem.prompt, "messages": prompt}
    assert row_of(PROBLEM) == {
        "id": "1",
        "question": PROBLEM.prompt,
        "answer": "42",
        "prompt": PROBLEM.prompt,
        "messages": [{"role": "user", "content": PROBLEM.prompt}],
    }


@for_each_row(
    ("result", "judged"),
    [
        (
            {"score": 1.0, "acc": True, "pred": "5", "notes": None, "steps": 3},
            (1.0, None, {"acc": 1.0, "steps": 3.0}),
        ),
        ({"reward": 0.5, "correct": False, "trace": ["a"]}, (0.5, False, {})),
    ],
)
def test_what_is_no_number_beside_a_score_is_left_out(result: Any, judged: Any):
    session = SimpleNamespace(id="s")
    running: Any = SimpleNamespace(
        result=result, tree=SimpleNamespace(calls=[]), agent=SimpleNamespace(session=session)
    )
    assert _judged(running)[:3] == judged


def test_the_sdks_of_both_services_find_the_endpoint(monkeypatch: pytest.MonkeyPatch):
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
    for name in names:
        monkeypatch.setenv(name, "a person's own")
    url = "http://127.0.0.1:1/sessions/x/v1"
    message = {"problem": problem_to_frame(PROBLEM), "seed": 1, "url": url, "key": "sk"}
    report = _report(message, lambda problem, url, key: {name: os.environ[name] for name in names})
    addresses = (url, "sk", "http://127.0.0.1:1/sessions/x", "sk")
    assert report == {"result": dict(zip(names, addresses, strict=True))}
