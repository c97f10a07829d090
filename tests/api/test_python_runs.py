"""`dapo.train` from Python: a run like that of the command, with rows and functions that were only typed."""

import json
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.config import dump_config, load_config
from dapo.training.run_directory import RunDirectory
from helpers.commands import run as run_command

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_response_tokens": 6,
    "threads": 1,
    "workers": 1,
    "lr": 1e-3,
}
DIGITS = "dapo.rewards.examples:has_digit"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_in_memory_train_and_each_call_makes_a_new_run_directory():
    runs = [dapo.train("tiny-random", data=ROWS, reward=DIGITS, steps=1, **SMALL) for _ in range(2)]
    assert runs[0].path != runs[1].path
    for run in runs:
        assert run.path.parent == Path("runs")
        assert len(run.metrics) == 1
        assert [json.loads(line) for line in (run.path / "data/train.jsonl").read_text().splitlines()] == ROWS
    assert (runs[0].metrics["loss/policy"] == runs[1].metrics["loss/policy"]).all()


def test_the_command_line_of_a_run_is_read_as_its_options(capsys: pytest.CaptureFixture[str]):
    run = dapo.train("tiny-random", data=ROWS, reward=DIGITS, steps=1, run_dir="a b", **SMALL)
    arguments = json.loads((run.path / "manifest.json").read_text())["command"]
    assert arguments[:2] == ["dapo", "train"]
    arguments[arguments.index("--run-dir") + 1] = "again"
    code, _, err = run_command(capsys, *arguments[1:])
    assert (code, err) == (0, "")
    first, again = (load_config(RunDirectory.open(path).config) for path in ("a b", "again"))
    assert dump_config(first) == dump_config(again)
