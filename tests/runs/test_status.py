"""How a run stands, by its directory: every state, what is estimated, and that a live run is left
alone.
"""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dapo.core.errors import CheckpointError
from dapo.runs.directory import RunDirectory
from dapo.runs.status import run_status
from helpers.commands import run
from helpers.run_files import append_bytes, log_metrics

MODEL = "smollm2-135m-instruct"
CONFIG = "model: {name: tiny-random}\ndata: {train: builtin:sums}\ntrain: {num_steps: 10}\n"
# of steps 1 to 3: the whole step, and its evaluation
SECONDS = [(10.0, 0.0), (12.0, 0.0), (41.0, 30.0)]
SUMMARY = {
    "steps": 3,
    "wall_s": 1.0,
    "tokens_generated": 1,
    "tokens_trained": 1,
    "eval_first": None,
    "eval_last": None,
}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run with the metrics of three steps."""
    found = RunDirectory.create(tmp_path / "run", CONFIG, {"folder": "."})
    lines: list[dict[str, Any]] = [{"step": 0, "eval/sums/accuracy": 0.1, "time/evaluate_s": 30.0}]
    for step, (seconds, evaluation) in enumerate(SECONDS, start=1):
        lines.append(
            {
                "step": step,
                "reward/mean": 0.1 * step,
                "time/step_s": seconds,
                "time/evaluate_s": evaluation,
            }
        )
    lines[-1] |= {"eval/sums/accuracy": 0.5, "eval/sums/low": 0.4, "eval/sums/high": None}
    log_metrics(found.metrics, lines)
    append_bytes(found.metrics, b'{"step": 4, "rew')
    return found


def test_a_live_run_is_seen_with_its_process_and_what_is_left_and_keeps_its_lock(
    directory: RunDirectory,
):
    with directory.lock(9):  # dapo resume RUN train.num_steps=9
        status = run_status(directory.path)
        with (
            pytest.raises(CheckpointError, match=f"in use by process {os.getpid()};"),
            directory.lock(),
        ):
            pass
    assert (status.state, status.process, status.exit_reason) == ("running", os.getpid(), None)
    assert (status.step, status.num_steps) == (3, 9)
    # without their evaluations the steps take 10, 12 and 11 s; an evaluation takes 10 s of a step
    # on average
    assert status.seconds_left == pytest.approx((11 + 10) * 6)
    assert status.seconds_since_step is not None
    assert status.metrics["reward/mean"] == pytest.approx(0.3)
    assert status.evaluations == {"sums": {"step": 3, "accuracy": 0.5, "low": 0.4, "high": None}}
    with directory.lock():  # of a process that has only just begun
        assert run_status(directory.path).num_steps == 10


@pytest.mark.parametrize(
    ("reason", "state", "code", "shown"),
    [
        ("finished", "finished", 0, " s ago run "),
        ("solved", "solved", 0, ": all problems of a step were solved"),
        (
            "interrupted: stopped by SIGINT",
            "stopped",
            0,
            ": stopped by SIGINT; continue with: dapo resume",
        ),
        (
            "stopped: the reward is high enough",
            "stopped",
            0,
            ": the reward is high enough; continue with: dapo resume",
        ),
        (None, "stopped", 0, ": its process was killed; continue with: dapo resume"),
        (
            "NumericsError: weights that are not finite",
            "failed",
            1,
            ": NumericsError: weights that are not",
        ),
    ],
)
def test_an_ended_run_says_how_and_only_a_failed_one_exits_1(
    capsys: pytest.CaptureFixture[str],
    directory: RunDirectory,
    reason: str | None,
    state: str,
    code: int,
    shown: str,
):
    if reason is not None:
        directory.write_summary({**SUMMARY, "num_steps": 7, "exit_reason": reason})
    status = run_status(directory.path)
    assert (status.state, status.process, status.exit_reason) == (state, None, reason)
    assert (status.seconds_left, status.seconds_since_step) == (None, None)
    assert status.num_steps == (10 if reason is None else 7)
    before = sorted(path.name for path in directory.path.iterdir())
    given, out, err = run(capsys, "status", str(directory.path))
    assert (given, err) == (code, "")
    assert out.startswith(f"{state}, step 3/{status.num_steps}, accuracy 50.0%, ")
    assert shown in " ".join(out.split())
    given, out, _ = run(capsys, "status", str(directory.path), str(directory.path))
    assert given == code
    assert out.count(f" {state} ") == 2
    assert sorted(path.name for path in directory.path.iterdir()) == before


def test_disk_use_is_the_sum_of_the_files_and_of_their_folders(directory: RunDirectory):
    for name, size in (
        ("checkpoints/step_000002/a", 1000),
        ("rollouts/step_000001.parquet", 300),
        ("other/b", 50),
    ):
        path = directory.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    status = run_status(directory.path)
    own = sum(path.stat().st_size for path in directory.path.iterdir() if path.is_file())
    expected = {"total": own + 1350, "checkpoints": 1000, "rollouts": 300, "eval": 0, "logs": 0}
    assert status.disk_bytes == expected
    assert status.checkpoint == {
        "step": 2,
        "path": str(directory.checkpoints.folder / "step_000002"),
    }


def test_a_run_without_a_step_and_with_options_of_another_version_has_a_status(
    directory: RunDirectory,
):
    directory.metrics.unlink()
    directory.config.write_text(CONFIG + "bogus: 1\n")
    status = run_status(directory.path)
    assert (status.state, status.step, status.num_steps, status.metrics) == ("stopped", 0, None, {})


def test_a_table_of_runs_says_which_results_are_mean_scores(
    capsys: pytest.CaptureFixture[str], directory: RunDirectory, tmp_path: Path
):
    graded = RunDirectory.create(tmp_path / "graded", CONFIG, {"folder": "."})
    log_metrics(
        graded.metrics, [{"step": 0, "eval/sums/accuracy": 0.6, "eval/sums/score_mean": 0.6}]
    )
    code, out, _ = run(capsys, "status", str(directory.path), str(graded.path))
    assert (code, "50.0%" in out, "mean score 0.600" in out, "accuracy" in out) == (
        0,
        True,
        True,
        False,
    )


def test_several_sources_are_one_line_with_the_whole_and_the_worst(
    capsys: pytest.CaptureFixture[str], directory: RunDirectory
):
    evaluated = {"eval/a+b/accuracy": 0.5, "eval/a+b/low": 0.4, "eval/a+b/high": 0.6}
    by_source = {"eval/a/accuracy": 0.25, "eval/b/accuracy": 0.75}
    directory.metrics.unlink()
    log_metrics(directory.metrics, [{"step": 3, "reward/mean": 0.1, **evaluated, **by_source}])
    _, out, _ = run(capsys, "status", str(directory.path))
    shown = " ".join(out.split())
    assert "evaluation a+b 50.0% (40.0% to 60.0%), at step 3; the worst of 2 sources: a" in shown
    assert out.count("evaluation") == 1
    # the table has the accuracy of the whole, not of the last source
    _, out, _ = run(capsys, "status", str(directory.path), str(directory.path))
    assert out.count("50.0%") == 2


def test_the_result_is_of_the_newest_evaluation_whatever_was_evaluated_before(
    capsys: pytest.CaptureFixture[str], directory: RunDirectory
):
    old = {"eval/old/accuracy": 0.1, "eval/old/low": 0.05, "eval/old/high": 0.2}
    new = {"eval/new/accuracy": 0.9, "eval/new/low": 0.8, "eval/new/high": 0.95}
    directory.metrics.unlink()
    log_metrics(directory.metrics, [{"step": 3, "reward/mean": 0.1, **old}])
    log_metrics(directory.metrics, [{"step": 6, "reward/mean": 0.1, **new}])
    _, out, _ = run(capsys, "status", str(directory.path))
    shown = " ".join(out.split())
    assert "step 6/10, accuracy 90.0%" in shown
    assert "evaluation new 90.0% (80.0% to 95.0%), at step 6 checkpoint" in shown
    # nothing was judged in the newest one
    log_metrics(directory.metrics, [{"step": 9, "reward/mean": 0.1, "eval/new/truncated": 0.0}])
    _, out, _ = run(capsys, "status", str(directory.path))
    assert "accuracy 10.0%" not in out
    assert "evaluation " not in out


def test_following_prints_the_steps_and_ends_with_the_state_of_the_run(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The run ends while it is followed: a sleep logs a step, the next one ends the run."""
    monkeypatch.setattr("dapo.cli.status.POLL_S", 0.0)
    code, out, _ = run(capsys, "status", str(directory.path), "--follow")
    assert (code, out.count("stopped, step 3/10")) == (0, 1)  # it has ended: one sentence
    with ExitStack() as training:
        training.enter_context(directory.lock())
        events = iter([lambda: _log_a_step(directory), training.close])
        monkeypatch.setattr("dapo.cli.status.time.sleep", lambda _: next(events)())
        code, out, _ = run(capsys, "status", str(directory.path), "--follow")
    first, step, *last = out.splitlines()
    assert first.startswith("running, step 3/10, about ")
    assert step.startswith("step  4/10 ")
    assert " ".join(last).startswith("stopped, step 4/10, ")
    assert code == 0


def test_ctrl_c_ends_the_following_alone_and_the_object_is_printed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dapo.cli.status.time.sleep", interrupt)
    with directory.lock():
        code, out, _ = run(capsys, "status", str(directory.path), "--follow", "--json")
    assert (code, json.loads(out)["runs"][0]["state"]) == (0, "running")


def _log_a_step(directory: RunDirectory) -> None:
    directory.truncate_after(3)  # without the part of a line behind it
    log_metrics(directory.metrics, [{"step": 4, "reward/mean": 0.4, "time/step_s": 1.0}])


def test_a_table_of_runs_keeps_paths_whole_and_one_line_to_a_run_on_80_columns(
    capsys: pytest.CaptureFixture[str],
    directory: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    runs = ["runs/quickstart-20261129-023111", "runs/quickstart-20261130-113111"]
    for name in runs:
        shutil.copytree(directory.path, name)
        Path(name, "config.yaml").write_text(CONFIG.replace("tiny-random", MODEL))
    for width, shows_all in ((80, False), (120, True)):
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = run(capsys, "status", *runs)
        rows = [line for line in out.splitlines() if line.strip().startswith("runs/")]
        assert [row.split()[0] for row in rows] == runs
        assert max(map(len, out.splitlines())) <= width
        assert ("disk" in out, MODEL in out, "accuracy" in out) == (shows_all, shows_all, True)
