"""Misspelt options and flags are answered with the exact text to type."""

import os
import shlex
from pathlib import Path

import pytest

from dapo.runs.directory import RunDirectory
from helpers.commands import run
from helpers.tables import for_each_row

LR = "did you mean optim.lr=1e-4?"
STEPS = "did you mean train.num_steps=5?"
TRL = "learning_rate=0.0001 is optim.lr=0.0001 here"


@for_each_row(
    ["typed", "answer"],
    [
        ("lr=1e-4", LR),
        ("optim_lr=1e-4", LR),
        ("optim-lr=1e-4", LR),
        ("optim__lr=1e-4", LR),
        ("Optim.LR=1e-4", LR),
        ("learning_rate=1e-4", TRL),
        ("--lr 1e-4", LR),
        ("--lr=1e-4", LR),
        ("-lr 1e-4", LR),
        ("--optim.lr 1e-4", LR),
        ("--optim-lr=1e-4", LR),
        ("--learning-rate 1e-4", TRL),
        ("--learning_rate=1e-4", TRL),
        ("optim.lr 1e-4", "type optim.lr=1e-4"),
        ("optim.lr:1e-4", "type optim.lr=1e-4"),
        ("optim.lr= 1e-4", "type optim.lr=1e-4"),
        ("optim.lr = 1e-4", "type optim.lr=1e-4"),
        ("lr 1e-4", "type optim.lr=1e-4"),
        ("lr", "type optim.lr=VALUE"),
        ("steps=5", STEPS),
        ("train.steps=5", STEPS),
        ("train_num_steps=5", STEPS),
        ("--steps 5", STEPS),
        ("--num-steps=5", STEPS),
        ("--temperature 0.7", "did you mean rollout.temperature=0.7 or eval.temperature=0.7?"),
        ("--model m --data d.jsonl", "did you mean model.name=m data.train=d.jsonl?"),
        ("--data 'my data.jsonl'", "did you mean 'data.train=my data.jsonl'?"),
        ("--run_dir x", "did you mean --run-dir?"),
        ("data.instruction=Be brief", "type 'data.instruction=Be brief'"),
        ("data.train=a.jsonl b.jsonl", "type 'data.train=[a.jsonl,b.jsonl]'"),
        ("data.train=a.jsonl,b.jsonl", "typed as a list, '[a.jsonl,b.jsonl]'"),
        ("--set optim.lr=1e-4", "did you mean optim.lr=1e-4?"),
        ("-o 'data.instruction=Be brief'", "did you mean 'data.instruction=Be brief'?"),
        ("optm.lr=1e-4", LR),
        ("--zebra 5", "No such option: --zebra"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_text_to_type(
    capsys: pytest.CaptureFixture[str], typed: str, answer: str
):
    code, out, err = run(capsys, "train", "tiny", *shlex.split(typed))
    assert (code, out) == (2, "")
    assert answer in err.splitlines()[-1]


@for_each_row(
    ["typed", "answer"],
    [
        ("stages.rewards.lr=1e-4", "did you mean stages.rewards.optim.lr=1e-4?"),
        ("stages.rewards.optim.rate=5", "unknown option optim.rate; "),
        ("stages.rewards.trains.num_steps=5", "did you mean stages.rewards.train.num_steps=5?"),
        ("stage.rewards.optim.lr=1e-4", "did you mean stages.rewards.optim.lr=1e-4?"),
    ],
)
def test_a_misspelt_option_of_a_stage_is_answered_with_its_stage(
    capsys: pytest.CaptureFixture[str], typed: str, answer: str
):
    code, out, err = run(capsys, "check", "gsm8k_laptop", typed)
    assert (code, out) == (2, "")
    assert answer in err.splitlines()[-1]


@for_each_row(
    ["words", "answer"],
    [
        (["show", "options", "lr"], "error: no option or section lr; did you mean optim.lr?"),
        (["show", "lr"], "page is named lr; did you mean optim.lr?"),
        (["check", "tiny", "--lr", "3"], "did you mean optim.lr=3?"),
        (["resume", "runs/a", "--steps", "9"], "did you mean train.num_steps=9?"),
        (["status", "--lr", "3"], "Error: No such option: --lr"),
        (["clean", "runs/a", "--yes", "--dry-run"], "keep one of them"),
        (["train"], "Type first: dapo train quickstart"),
    ],
)
def test_other_commands_name_what_is_meant_first(
    capsys: pytest.CaptureFixture[str], words: list[str], answer: str
):
    code, _, err = run(capsys, *words)
    assert code == 2
    assert answer in err


def test_a_command_without_its_argument_shows_its_example_with_the_newest_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, time in {"old": 1, "my run": 3, "older": 2}.items():
        config = RunDirectory.create(tmp_path / "runs" / name, "{}", {}).config
        os.utime(config, (time, time))
    monkeypatch.chdir(tmp_path)
    examples = {
        "chat": "dapo chat 'runs/my run' --temperature 0",
        "resume": "dapo resume 'runs/my run' train.num_steps=200",
        "compare": "dapo compare runs/a runs/b --by-step",
        "convert": "dapo convert grpo.py > my.yaml",
        "data stats": "dapo data stats train.jsonl --model",
    }
    for command, example in examples.items():
        code, _, err = run(capsys, *command.split())
        assert code == 2
        assert f"\nFor example: {example}" in err, command
