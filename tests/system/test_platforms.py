"""What is of Linux alone is optional: the package trains where it is missing.

Windows is refused in one sentence.

The other systems are imitated: dapo's modules see `sys.platform`, modules and files as there
(helpers/not_linux).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.core import files
from helpers.paths import TESTS, TINY

NOT_LINUX = TESTS / "helpers" / "not_linux"


def python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that sees another system, and the processes that it starts."""
    path = os.pathsep.join([str(NOT_LINUX), os.environ.get("PYTHONPATH", "")])
    own = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=own, text=True, capture_output=True, timeout=250, check=False
    )


def test_a_run_trains_without_what_linux_alone_has(tmp_path: Path):
    seen = tmp_path / "seen"
    done = python(
        *(
            "-m",
            "dapo",
            "train",
            str(TINY),
            "--run-dir",
            "run",
            "train.num_steps=1",
            "train.threads=1",
        ),
        *("model.dtype=auto", "data.eval=null"),
        folder=tmp_path,
        DAPO_SEEN=str(seen),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1
    # a verifier's process sees that system, too
    assert "dapo.rewards.worker" in seen.read_text()


def test_the_imitated_system_lacks_what_the_test_says(tmp_path: Path):
    code = """
import dapo.core.files, dapo.core.processor, dapo.distributed.channel as c
import dapo.processes.supervisor as supervisor
print(dapo.core.files.os.__class__.__name__, hasattr(c.os, "memfd_create"), supervisor._LINUX, c.os.getpid() > 0)
print(dapo.core.processor.vector_extensions(), hasattr(__import__("os"), "memfd_create"))
"""
    done = python("-c", code, folder=tmp_path)
    assert done.stdout.split("\n")[:2] == ["Seen False False True", "[] True"], done.stderr


def test_code_is_refused_where_no_program_can_be_confined_unless_best_effort_is_asked_for(
    tmp_path: Path,
):
    code = """
from dapo.core.errors import RewardError
from dapo.rewards import get_verifier
from dapo.types import Problem
try:
    get_verifier("code")
except RewardError as error:
    print(error)
judge = get_verifier("code", isolation="best_effort")
problem = Problem("1", "Write add(a, b).", "assert add(1, 2) == 3")
print(judge(problem, "```python\\ndef add(a, b):\\n    return a + b\\n```").correct)
print(judge(problem, "```python\\ndef add(a, b):\\n    return a - b\\n```").correct)
"""
    done = python("-c", code, folder=tmp_path)
    refused, right, wrong = done.stdout.strip().rsplit("\n", 2)
    assert refused.startswith("code: on this machine a response's program could "), done.stderr
    assert "reward.options.isolation=best_effort" in refused
    assert (right, wrong) == ("True", "False")


def test_windows_is_refused_in_one_sentence_that_names_wsl(tmp_path: Path):
    code = "import sys; sys.platform = 'win32'; import dapo"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr.strip().splitlines()[-1]
        == "ImportError: dapo does not run on Windows; it runs in the Windows Subsystem for Linux"
        " (WSL): wsl --install"
    )


def test_a_new_file_gets_its_size_where_the_system_cannot_promise_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(os, "posix_fallocate")
    with open(tmp_path / "file", "wb") as file:
        files.reserve(file.fileno(), 12_345)
    assert (tmp_path / "file").stat().st_size == 12_345
