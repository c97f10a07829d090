"""The how-to texts of CONTRIBUTING.md, carried out in a copy of the repository: what they say is
enough, and the laws hold afterwards.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.paths import ROOT

TOPICS = ("A verifier", "An engine", "A loss", "An option", "A metric")
COPIED = ("src", "configs", "docs", "tests", "examples", "evidence", "benchmarks")
CHECKS = "tests/helpers/how_to_checks.py"
"""What each how-to promises, one test a topic."""
LAWS = (
    "tests/system/test_imports.py",
    "tests/cli/test_safeguards.py",
    "tests/config/test_config.py",
    "tests/policy/test_objective.py",
    "tests/runs/test_metric_table.py",
)
CHOSEN = " or ".join(
    (
        "how_to_checks",
        "(test_imports and not walker)",
        "test_safeguards",
        "test_metric_table",
        # of the configuration, what reads every option
        "test_every_option",
        "every_condition",
        "test_the_page_of_options",
        "test_the_tables_of_methods",
        # of the objective, what holds for each row of the table of losses
        "(test_objective and reinforce)",
    )
)


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


def output_of(copy: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy / "src")},
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_the_how_tos_promise_and_the_laws_hold_on_the_tree_that_they_change(tmp_path: Path):
    for folder in COPIED:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results", "*.egg-info")
        )
    for name in ("README.md", "pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for topic in TOPICS:
        carry_out(topic, tmp_path)
    # `make docs`, as the how-tos say
    for kind in ("options", "metrics"):
        page = output_of(tmp_path, "docs/generated_pages.py", kind)
        (tmp_path / "docs" / f"{kind}.md").write_text(page, encoding="utf-8")
    output_of(tmp_path, "docs/generated_pages.py", "docs/losses.md")
    pytest_options = ("-q", "-p", "no:cacheprovider", "-rA", "-k", CHOSEN)
    output = output_of(tmp_path, "-m", "pytest", *pytest_options, CHECKS, *LAWS)
    for file in (CHECKS, *LAWS):
        assert f"PASSED {file}::" in output, f"{file}: no test was chosen"
    assert output.count(f"PASSED {CHECKS}::") == len(TOPICS)


def test_a_change_of_lines_that_a_file_does_not_have_is_found(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    apply(" x = 1\n-y = 2\n+y = 3\n+z = 4\n", tmp_path / "a.py")
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 3\nz = 4\n"
    with pytest.raises(AssertionError, match="does not have"):
        apply(" x = 2\n+y = 3\n", tmp_path / "a.py")
