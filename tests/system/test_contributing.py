"""The how-to texts of CONTRIBUTING.md, carried out in a copy of the package: what they say is
enough.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from helpers.paths import ROOT

PAGES = str(ROOT / "docs" / "generated_pages.py")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of src/ that may be changed."""
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def how_to(topic: str) -> str:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = page.partition(f"- **{topic}**")[2].partition("\n- **")[0]
    assert text, topic
    return text


def snippets(topic: str, language: str = "python") -> list[str]:
    """The code of one how-to."""
    found = re.findall(rf"```{language}\n(.*?)  ```", how_to(topic), re.DOTALL)
    return [textwrap.dedent(code) for code in found]


def carry_out(topic: str, copy: Path) -> None:
    """Write the files of a how-to, `# PATH` in their first line, and apply its changes, `--- PATH`
    before each.
    """
    for code in snippets(topic):
        path, _, text = code.partition("\n")
        file = copy / path.removeprefix("# ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for code in snippets(topic, "diff"):
        for path, change in re.findall(
            r"^--- (\S+)\n((?:[ +-].*\n)+?)(?=--- |\Z)", code, re.MULTILINE
        ):
            apply(change, copy / path)


def apply(change: str, path: Path) -> None:
    """Replace the lines of a change that begin with a space or `-` by those that begin with a space
    or `+`.
    """
    lines = change.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"CONTRIBUTING.md changes lines that {path} does not have:\n{old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def output_of(copy: Path, *command: str) -> str:
    done = run(copy, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_verifier_is_a_file_and_a_row_of_the_table(copy: Path):
    carry_out("A verifier", copy)
    script = """
from dapo.rewards import VerifierPool, get_verifier
from dapo.config.reward_options import RewardConfig
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
    output_of(copy, "-m", "dapo", "test", "even", "--right", "42")


def test_a_loss_is_a_function_and_a_row_of_the_table(copy: Path):
    carry_out("A loss", copy)
    options = (
        "tiny",
        "loss.surrogate=reinforce",
        "train.num_steps=1",
        "train.minibatch_groups=4",
        "data.eval=null",
    )
    output_of(copy, "-m", "dapo", "train", *options, "--run-dir", "run")
    (logged,) = map(json.loads, (copy / "run" / "metrics.jsonl").read_text().splitlines())
    rows = pq.read_table(copy / "run" / "rollouts").to_pylist()
    trained = [row for row in rows if row["outcome"] == "trained"]
    num_tokens = sum(row["response_tokens"] for row in trained)
    loss = (
        -sum(row["advantage"] * math.fsum(row["engine_logprobs"]) for row in trained) / num_tokens
    )
    assert abs(loss) > 1e-3
    assert logged["loss/policy"] == pytest.approx(loss, abs=1e-6)
    assert "  loss        REINFORCE, without a ratio, averaged by token\n" in output_of(
        copy, "-m", "dapo", "check", *options
    )
    assert " reinforce: A log pi; clip: " in output_of(copy, PAGES, "options")
    tests = [str(ROOT / "tests" / "policy" / "test_objective.py"), "-k", "reinforce"]
    assert "passed" in output_of(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def test_an_engine_is_a_folder_a_section_and_a_row_of_the_table(copy: Path):
    carry_out("An engine", copy)
    assert "per_poll  default 4, unit responses\n" in output_of(
        copy, "-m", "dapo", "show", "rollout.plain"
    )
    options = ["rollout.engine=plain", "train.num_steps=1", "data.eval=null"]
    assert "the plain engine" in output_of(copy, "-m", "dapo", "check", "tiny", *options)
    own_process = [*options, "rollout.engines=1", "rollout.plain.per_poll=3"]
    output_of(copy, "-m", "dapo", "train", "configs/tiny.yaml", *options, "--run-dir", "a")
    output_of(copy, "-m", "dapo", "train", "configs/tiny.yaml", *own_process, "--run-dir", "b")
    tables = [
        pq.read_table(copy / name / "rollouts" / "step_000001.parquet") for name in ("a", "b")
    ]
    assert tables[0].num_rows >= 16
    assert tables[0].equals(tables[1])
    for name in ("a", "b"):  # the engine samples from the distribution that trains
        [row] = [
            json.loads(line) for line in (copy / name / "metrics.jsonl").read_text().splitlines()
        ]
        assert 0 <= row["rollout/engine_logprob_gap_max"] < 1e-5


def test_an_option_is_a_field_that_is_read_where_its_section_arrives(copy: Path):
    carry_out("An option", copy)
    assert output_of(copy, "-m", "dapo", "show", "optim.eps").startswith(
        "optim.eps  default 1e-08, paper 1e-08\n"
    )
    assert "  - optim.eps: 0.1 (paper: 1e-08)\n" in output_of(
        copy, "-m", "dapo", "check", "tiny", "optim.eps=0.1"
    )
    assert "| `optim.eps` | `1e-08` | `1e-08` |  | Number" in output_of(
        copy, str(ROOT / "docs" / "generated_pages.py"), "options"
    )
    refused = run(copy, "-m", "dapo", "check", "tiny", "optim.eps=0")
    assert (
        refused.stderr
        == "error: command line: option optim.eps: input should be greater than 0, got 0\n"
    )
    script = """
import dapo

for eps in (1e-8, 1e6):
    with dapo.session(config="tiny", **{"optim.eps": eps}) as session:
        print(session.update(session.collect())["loss/approx_kl"] > 1e-9)
"""
    # so large an eps leaves no update
    assert output_of(copy, "-c", script).splitlines()[-2:] == ["True", "False"]


def test_a_metric_is_a_row_of_the_table_and_a_value(copy: Path):
    carry_out("A metric", copy)
    output_of(
        copy,
        "-m",
        "dapo",
        "train",
        "tiny",
        "train.num_steps=1",
        "data.eval=null",
        "--run-dir",
        "run",
    )
    rows = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["rollout/responses_trained"] == 16
    page = output_of(copy, PAGES, "metrics")
    assert (
        "| `rollout/responses_trained` | responses | The number of responses that train. |" in page
    )


TOPICS = ("A verifier", "An engine", "A loss", "An option", "A metric")
LAWS = (
    "tests/system/test_imports.py",
    "tests/config/test_config.py",
    "tests/cli/test_safeguards.py",
)
"""The tests of structure, and those that read every option."""


def test_the_laws_hold_on_a_tree_that_all_the_how_tos_have_changed(copy: Path):
    for folder in ("docs", "tests", "examples", "evidence", "benchmarks"):
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    for name in ("README.md", "pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, copy / name)
    for topic in TOPICS:
        carry_out(topic, copy)
    pages = {"options": "docs/options.md", "metrics": "docs/metrics.md"}
    for kind, page in pages.items():  # `make docs`, as the how-tos say
        (copy / page).write_text(output_of(copy, "docs/generated_pages.py", kind), encoding="utf-8")
    output_of(copy, "docs/generated_pages.py", "docs/losses.md")
    output = output_of(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LAWS)
    assert " passed" in output


def test_a_change_of_lines_that_a_file_does_not_have_is_found(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    apply(" x = 1\n-y = 2\n+y = 3\n+z = 4\n", tmp_path / "a.py")
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 3\nz = 4\n"
    with pytest.raises(AssertionError, match="does not have"):
        apply(" x = 2\n+y = 3\n", tmp_path / "a.py")
