"""A package that pip installed adds a verifier, an environment, an engine, a loss and a command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.core.errors import ConfigError
from dapo.core.plugins import PluginTable
from helpers.paths import ROOT

SMALL = ("train.num_steps=2", "rollout.prompts_per_step=2", "rollout.group_size=4")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that holds `examples/own_package`."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "own_package"  # setuptools writes beside it
    shutil.copytree(ROOT / "examples" / "own_package", source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command = [*pip, "--no-build-isolation", "--target", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return folder


def dapo(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an installation that has the package."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "dapo", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def test_a_run_uses_the_verifier_the_engine_and_the_loss_of_a_package(
    site: Path, tmp_path: Path
) -> None:
    options = (
        "reward.verifier=shortest",
        "reward.options.max_chars=20",
        "rollout.engine=counted",
        "rollout.options.counts_file=requests.txt",
        "loss.surrogate=reinforce",
        "train.minibatch_groups=1",
    )
    result = dapo(site, tmp_path, "train", "tiny", *SMALL, *options, "--run-dir", "run")
    assert result.returncode == 0, result.stderr
    assert int((tmp_path / "requests.txt").read_text()) >= 2 * 2 * 4
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    scores = [
        row["reward/score_mean"] for row in map(json.loads, lines) if "reward/score_mean" in row
    ]
    assert scores
    assert all(0 <= score <= 1 for score in scores)


PLAY = """
from dapo.environments.adapters import environment_maker
from dapo.types import Problem
game = environment_maker("echo", {"turns": 2}, ()).make()
game.reset(Problem(id="1", prompt="Say it.", answer=""), 7)
print(game.step("abc"), game.step("abd"), sep="\\n")
"""


def test_an_environment_of_a_package_is_made_by_its_name(site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", PLAY]
    output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True, timeout=60)
    first, second = output.splitlines()
    assert "observation='abc', reward=0.0, done=False" in first
    assert "observation='abd', reward=2.0, done=True" in second


COMMANDS = """
import contextlib, io, json, sys
from dapo.cli.main import main
for words in sys.argv[1:]:
    texts = (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
        try:
            main(words.split())
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, *(text.getvalue() for text in texts)]))
"""
UNKNOWN = {
    "train tiny reward.verifier=shortes": "shortest",
    "train tiny environment=ecko": "echo",
    "train tiny rollout.engine=count": "counted",
    "train tiny loss.surrogate=reinforc": "reinforce",
}


def test_the_commands_and_the_names_of_a_package_are_listed_and_the_commands_run(
    site: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", COMMANDS, "hello Ada", "--help", *UNKNOWN]
    output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True, timeout=60)
    hello, help_text, *refusals = map(json.loads, output.splitlines())
    assert hello == [0, "hello Ada\n", ""]
    assert "Other packages" in help_text[1]
    assert "Greet somebody." in help_text[1]
    for name, (code, _, error) in zip(UNKNOWN.values(), refusals, strict=True):
        assert (code, name in error) == (2, True), error


def metadata(folder: Path, package: str, group: str, line: str) -> None:
    """Write what pip writes about a package with one entry point."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{line}\n")


def test_names_of_dapo_are_not_replaced_and_faults_name_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata(tmp_path, "first", "dapo.numbers", "one = no_such_module:ONE")
    metadata(tmp_path, "second", "dapo.numbers", "two = no_such_module:TWO")
    metadata(tmp_path, "third", "dapo.numbers", "pi = math:pi")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = PluginTable("dapo.numbers", {"one": 1}, int)
    message = "dapo.numbers: one = no_such_module:ONE of the package first is ignored: dapo has a"
    with pytest.warns(UserWarning, match=message):
        assert sorted(table) == ["one", "pi", "two"]
    assert table["one"] == 1
    assert "three" not in table
    with pytest.raises(KeyError):
        table["three"]
    message = (
        "dapo.numbers: two = no_such_module:TWO of the package second: importing it raised"
        " ModuleNotFoundError: No module named 'no_such_module'"
    )
    with pytest.raises(ConfigError, match=message):
        table["two"]
    with pytest.raises(ConfigError, match=r"third is a float; expected a builtins\.int"):
        table["pi"]
