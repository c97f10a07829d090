"""The console's lines in the run directory."""

import os
import stat
from pathlib import Path

import pytest

from dapo.core.errors import DapoError
from dapo.runs.console import ProgressDisplay
from dapo.runs.console_log import MAX_BYTES, ConsoleLog, LoggedDisplay
from dapo.runs.directory import RunDirectory
from dapo.start.run import RunCallbacks, continued_run, run_training
from helpers.finished_runs import cut_copy

METRICS = {"reward/mean": 0.5, "time/step_s": 2.0}


def test_the_log_has_the_lines_that_the_console_shows(tmp_path, capsys):
    path = tmp_path / "logs" / "console.log"
    log = ConsoleLog(path, pytest.fail)
    shown = ProgressDisplay(3, first_step=2)
    display = LoggedDisplay(shown, log, 3, first_step=2)
    display.recall([{"step": 1, **METRICS}])
    display.message("a rule warns: \x1b[31mred")
    display.log(2, {**METRICS, "eval/sums/accuracy": 0.5})
    start, *lines = path.read_text().splitlines()  # before the display is closed, as after a kill
    display.close()
    assert start.startswith("--- from step 2 of 3, ")
    assert lines == capsys.readouterr().out.splitlines()
    assert lines[0] == r"a rule warns: \x1b[31mred"
    assert [line[:8] for line in lines[1:]] == ["step 2/3", "step 2: "]


def test_the_log_is_bounded_and_keeps_the_newest_lines(tmp_path):
    path = tmp_path / "logs" / "console.log"
    log = ConsoleLog(path, pytest.fail)
    line = "x" * 9_999
    for i in range(MAX_BYTES // 10_000 + 50):
        log.line(f"{i:5} {line}")
    lines = path.read_text().splitlines()
    assert path.stat().st_size <= MAX_BYTES
    assert lines[0] == "(earlier lines were removed)"
    numbers = [int(text[:5]) for text in lines[1:]]
    assert numbers == list(range(numbers[0], MAX_BYTES // 10_000 + 50))
    assert len(numbers) > 200
    # others on the machine do not read it
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_log_that_cannot_be_written_warns_once_and_ends_nothing(tmp_path):
    path = tmp_path / "console.log"
    os.symlink(tmp_path / "elsewhere", path)
    warnings: list[str] = []
    log = ConsoleLog(path, warnings.append)
    for _ in range(3):
        log.line("a line")
    assert len(warnings) == 1
    assert f"{path} gets no further lines: " in warnings[0]
    assert not (tmp_path / "elsewhere").exists()


def test_a_resumed_run_keeps_the_lines_of_the_process_before_and_their_warnings(
    sync_run: Path, tmp_path: Path
):
    run = RunDirectory(cut_copy(sync_run, tmp_path / "run", step=3))
    before = run.console_log.read_text()
    assert "step 4/4  reward" in before
    warnings: list[str] = []
    with continued_run(run.path, []) as ready:
        callbacks = RunCallbacks(warn=warnings.append)
        run_training(ready, callbacks)  # type: ignore[arg-type]
    text = run.console_log.read_text()
    assert text.startswith(before)
    later = text.removeprefix(before)
    assert later.startswith("--- from step 4 of 4, ")
    assert "\nstep 4/4  reward" in later
    for warning in warnings:
        assert f"\nwarning: {warning}\n" in later


def test_the_reason_why_a_process_ended_is_the_last_line(sync_run: Path, tmp_path: Path):
    run = RunDirectory(cut_copy(sync_run, tmp_path / "run", step=3))

    def fail(step: int, metrics: object) -> None:
        raise ValueError("of the caller")

    with pytest.raises(DapoError), continued_run(run.path, []) as ready:
        run_training(ready, RunCallbacks(warn=print, on_step=[fail]))  # type: ignore[arg-type]
    last = run.console_log.read_text().splitlines()[-1]
    assert last.startswith("ended: ListenerFailed: a callback after a step raised ValueError: of")
