"""`train.epochs`: a length in passes over the data, which becomes a number of steps at the start."""

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dapo.cli.train import resume_run, start_run
from dapo.config import build_config, dump_config, load_config
from dapo.core.errors import ConfigError
from dapo.policy.optim import schedule_of
from dapo.runs.directory import RunDirectory
from dapo.start.fork import plan_fork
from helpers.commands import run as run_command
from helpers.tiny_runs import EVENTFUL, contents, differences, metrics, tiny

OPTIONS = (*EVENTFUL, "train.eval_every=0", "train.keep_checkpoints=2")
"""Eleven problems, of which a step takes five."""


@given(
    rows=st.integers(1, 10_000),
    epochs=st.floats(0.01, 100),
    rows_per_step=st.integers(1, 512),
    is_supervised=st.booleans(),
)
def test_the_steps_take_the_rows_of_the_epochs_and_one_less_does_not(
    rows: int, epochs: float, rows_per_step: int, is_supervised: bool
):
    raw = {"model": "m", "data": {"train": "builtin:sums"}, "train": {"epochs": epochs}}
    raw["train"]["minibatch_groups"] = rows_per_step
    if is_supervised:
        raw |= {"preset": "sft", "data": {"demonstrations": "a.jsonl"}}
    else:
        raw["rollout"] = {"prompts_per_step": rows_per_step}
        raw["dynamic_sampling"] = {"enabled": False}
    config = build_config(raw).with_steps_of_epochs(rows)
    steps = config.train.num_steps
    assert config.train.epochs is None
    assert steps * rows_per_step >= rows * epochs * (1 - 1e-12)
    assert steps == 1 or (steps - 1) * rows_per_step < rows * epochs
    assert build_config(raw).train.last_step == math.inf
    # 5 steps are an option of preset=sft
    warmup = 5 if is_supervised else min(20, math.ceil(steps / 15))
    assert config.optim.warmup_steps <= warmup
    set_warmup = build_config(raw, ["optim.warmup_steps=30"]).with_steps_of_epochs(rows)
    assert set_warmup.optim.warmup_steps == 30


def test_the_length_that_is_set_last_replaces_the_other(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("model: m\ndata: {train: 'builtin:sums'}\ntrain: {num_steps: 40, seed: 3}\n")
    config = load_config(file, ["train.epochs=2"])
    assert (config.train.epochs, config.train.seed) == (2, 3)
    assert load_config(file, ["train.epochs=2", "train.num_steps=7"]).train.last_step == 7
    assert load_config(file, ["train={epochs: 1.5}"]).train.epochs == 1.5
    file.write_text("model: m\ndata: {train: 'builtin:sums'}\ntrain: {epochs: 3}\n")
    assert load_config(file, ["train.num_steps=7"]).train.last_step == 7
    file.write_text("model: m\ndata: {train: 'builtin:sums'}\ntrain: {epochs: 3, num_steps: 9}\n")
    with pytest.raises(ConfigError, match=r"epochs=3 sets train.num_steps, which is 9; set one"):
        load_config(file)


def test_a_written_configuration_with_epochs_loads_as_the_same_options(tmp_path: Path):
    config = build_config({"model": "m", "data": "builtin:sums"}, ["train.epochs=2"])
    file = tmp_path / "a.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


@given(ratio=st.floats(0, 0.99), num_steps=st.integers(1, 10_000))
def test_a_warm_up_may_be_a_share_of_the_steps(ratio: float, num_steps: int):
    options = [
        "optim.warmup_steps=7",
        f"optim.warmup_ratio={ratio}",
        f"train.num_steps={num_steps}",
    ]
    config = build_config({"model": "m", "data": "builtin:sums", "preset": "dapo"}, options)
    warmup = config.optim.warmup(num_steps)
    assert ratio * num_steps - 1 < warmup <= ratio * num_steps
    again = build_config(yaml.safe_load(dump_config(config)))
    assert again == config
    by_steps = ["optim.warmup_ratio=0.5", f"optim.warmup_steps={warmup}"]
    same = build_config({"model": "m", "data": "builtin:sums"}, by_steps)
    assert schedule_of(same.optim, num_steps) == schedule_of(config.optim, num_steps)
    both = {"warmup_ratio": ratio, "warmup_steps": 3}
    with pytest.raises(ConfigError, match=r"sets optim\.warmup_steps, which is 3; set one"):
        build_config({"model": "m", "data": "builtin:sums", "optim": both})


def test_a_run_of_epochs_is_the_run_of_their_steps_and_can_be_longer(tmp_path: Path):
    by_epochs, by_steps = tmp_path / "epochs", tmp_path / "steps"
    start_run(tiny(*OPTIONS, "train.epochs=1.1"), run_dir=by_epochs, config_name="t")
    start_run(tiny(*OPTIONS, "train.num_steps=3"), run_dir=by_steps, config_name="t")
    assert differences(contents(by_epochs), contents(by_steps)) == []
    log = (by_epochs / "logs" / "console.log").read_text()
    assert "3 steps: 11 rows x 1.1 epochs / 5 rows a step; " in log
    assert load_config(by_epochs / "config.yaml").train.num_steps == 3

    plan = plan_fork(RunDirectory(by_epochs), 3, ["train.epochs=3"])
    assert plan.config.train.num_steps == 7
    with pytest.raises(ConfigError, match="counts the rows of the parent"):
        plan_fork(RunDirectory(by_epochs), 3, ["train.epochs=3", "data.train=builtin:sums"])
    resume_run(by_epochs, ["train.epochs=2"])
    assert [row["step"] for row in metrics(by_epochs)][-1] == 5
    assert load_config(by_epochs / "config.yaml").train.last_step == 5
    with pytest.raises(ConfigError, match=r"num_steps=3 is behind it|no step left"):
        resume_run(by_epochs, ["train.epochs=1.1"])


def test_a_longer_run_with_a_share_of_warm_up_says_that_the_share_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["optim.warmup_ratio=0.5", "train.num_steps=2"]
    start_run(tiny(*OPTIONS, *options), run_dir=tmp_path / "run", config_name="t")
    first = [row["optim/lr"] for row in metrics(tmp_path / "run") if row["step"]]
    assert first[-1] == first[-2] == tiny(*OPTIONS).optim.lr
    capsys.readouterr()
    resume_run(tmp_path / "run", ["train.num_steps=4"])
    out = " ".join(capsys.readouterr().out.split())
    assert "is 4 now; the warm-up (optim.warmup_ratio) is a share of it" in out
    code, _, _ = run_command(
        capsys, "eval", str(tmp_path / "run"), "--data", "{builtin: {sums: {}}, size: 2}"
    )
    assert code == 0


def test_check_says_the_steps_and_what_does_not_fit_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "a.yaml"
    file.write_text(dump_config(tiny(*OPTIONS, "train.epochs=2")))
    _, out, _ = run_command(capsys, "check", str(file))
    assert "tokens; 5 steps" in " ".join(out.split())
    options = ["optim.schedule=linear", "optim.warmup_steps=5"]
    code, _, err = run_command(capsys, "check", str(file), *options)
    assert code != 0
    assert "train.epochs=2: optim.schedule=linear lowers the learning rate after" in err
    _, out, _ = run_command(capsys, "check", str(file), "data.train=hub:t/rows")
    assert "tokens; 2 epochs" in " ".join(out.split())
