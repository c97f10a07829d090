"""Runs with nothing left to train are answered at once: no command loads torch to say so."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.runs.directory import RunDirectory
from helpers.commands import run as command
from helpers.fresh_commands import FreshCommands


@pytest.fixture(scope="module")
def fresh() -> Iterator[FreshCommands]:
    commands = FreshCommands()
    yield commands
    commands.close()


@pytest.fixture
def ended(sync_run: Path, tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return Path(shutil.copytree(sync_run, tmp_path / "folder" / "run"))


def solve(path: Path) -> None:
    """Let the run have ended because its problems were solved, before its last step."""
    directory = RunDirectory(path)
    summary = json.loads(directory.summary.read_text())
    directory.write_summary(summary | {"exit_reason": "solved"})
    os.utime(directory.curves)


def test_a_finished_run_that_is_resumed_says_so_without_torch(fresh: FreshCommands, ended: Path):
    answer = fresh.run(["resume", "run"], ended.parent)
    assert (answer.code, answer.err, answer.heavy) == (0, "", [])
    assert answer.out == (
        "already at step 4 of 4; to train on: dapo resume run train.num_steps=8\n"
    )
    refused = fresh.run(["resume", "run", "optim.lr=1e-5"], ended.parent)
    assert (refused.code, refused.heavy) == (2, [])
    assert "has no step left for a change of its options; add train.num_steps=8" in refused.err


def test_a_solved_run_that_is_resumed_says_so_and_what_would_train_on(
    fresh: FreshCommands, ended: Path
):
    solve(ended)
    answer = fresh.run(["resume", "run"], ended.parent)
    assert (answer.code, answer.err, answer.heavy) == (0, "", [])
    assert answer.out == (
        "already solved at step 4 of 4: all responses of its last search were correct; to train on:"
        " dapo fork run data.train=HARDER.jsonl\n"
    )


def test_what_a_kill_has_prevented_is_completed(ended: Path, capsys: pytest.CaptureFixture[str]):
    (ended / "curves.png").unlink()
    assert command(capsys, "resume", str(ended))[0] == 0
    assert (ended / "curves.png").exists()


def test_clean_lists_without_torch_and_says_that_nothing_was_removed(
    fresh: FreshCommands, ended: Path
):
    answer = fresh.run(["clean", "run", "--dry-run"], ended.parent)
    assert (answer.code, answer.err, answer.heavy) == (0, "", [])
    assert answer.out.endswith("would be freed; nothing was removed, --yes does it\n")
    assert answer.out == fresh.run(["clean", "run"], ended.parent).out


def test_a_fork_without_a_step_takes_the_newest_checkpoint(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    to = ("--no-train", "--run-dir", str(tmp_path / "fork"))
    code, out, _ = command(capsys, "fork", str(ended), "train.num_steps=6", *to)
    assert code == 0
    assert out.startswith(f"the newest checkpoint of {ended} is that of step 4 (--step chooses)\n")
    assert RunDirectory(tmp_path / "fork").checkpoints.newest_step() == 4
