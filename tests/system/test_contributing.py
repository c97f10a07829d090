"""The how-to texts of CONTRIBUTING.md, carried out in a copy of the package: what they say is enough."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.paths import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of src/ that may be changed."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def snippets(topic: str) -> dict[str, str]:
    """The code of one how-to, by the comment in its first line."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = page.partition(f"- **{topic}**")[2].partition("\n- **")[0]
    found = [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)  ```", text, re.DOTALL)]
    return {code.partition("\n")[0].removeprefix("# "): code.partition("\n")[2] for code in found}


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    return subprocess.run(
        [sys.executable, *command], cwd=copy, env=environment, text=True, capture_output=True, timeout=120, check=False
    )


def test_a_verifier_is_a_file_and_a_row_of_the_table(copy: Path):
    code = snippets("A verifier")
    name = "src/dapo/rewards/verifiers/even.py"
    (copy / name).write_text(code[name], encoding="utf-8")
    table = copy / "src/dapo/rewards/verifier.py"
    start, end = (
        "VERIFIERS: Mapping[str, Registration] = {\n",
        code["a row of VERIFIERS in src/dapo/rewards/verifier.py"],
    )
    text = table.read_text(encoding="utf-8")
    assert text.count(start) == 1
    table.write_text(text.replace(start, start + end), encoding="utf-8")
    script = """
from dapo.rewards import VerifierPool, get_verifier
from dapo.config.reward import RewardConfig
from dapo.types import Problem

problem = Problem("1", "An even number?", "", "here")
verify = get_verifier("even", minimum=4)
print([verify(problem, response).correct for response in ("4", "2", "5", "")])
print(verify(Problem("1", "", "", "here"), "4").error)
with VerifierPool(RewardConfig(verifier="even", workers=1)) as pool:
    print([verdict.score for verdict in pool.submit(problem, ["2", "x"], [(), ()]).result(60)])
"""
    done = run(copy, "-c", script)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[True, False, False, False]",
        "even: the problem has no prompt",
        "[1.0, -1.0]",
    ]
    tested = run(copy, "-m", "dapo", "reward", "test", "even", "--right", "42")
    assert tested.returncode == 0, tested.stdout + tested.stderr
