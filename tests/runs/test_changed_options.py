"""An option that a resume changes lasts, and every reader knows which options were in force in which step."""

from pathlib import Path

import pytest
import yaml

from dapo.analysis.compare import compare_runs
from dapo.cli.train import resume_run, start_run
from dapo.core.errors import CheckpointError, ConfigError
from dapo.runs.directory import RunDirectory
from dapo.runs.status import run_status
from dapo.runs.stored_config import load_run_config
from dapo.training.fork import create_fork, plan_fork
from helpers.commands import run as run_command
from helpers.tiny_runs import metrics, tiny

SAVES = ("train.num_steps=1", "train.save_every=1", "train.keep_checkpoints=9")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learning rate and length were changed after step 1, and which was continued once more."""
    path = tmp_path_factory.mktemp("changed") / "run"
    start_run(tiny(*SAVES, "optim.lr=0.001", "optim.warmup_steps=0"), run_dir=path, config_name="tiny")
    resume_run(path, ["optim.lr=0.002", "train.num_steps=2"])
    resume_run(path, ["train.num_steps=3"])
    return path


def test_a_later_resume_keeps_it(changed: Path):
    assert [row["optim/lr"] for row in metrics(changed) if "optim/lr" in row] == [0.001, 0.002, 0.002]
    assert yaml.safe_load((changed / "config.yaml").read_text())["optim"]["lr"] == 0.002
    assert load_run_config(RunDirectory(changed)).train.num_steps == 3


def test_the_options_of_earlier_steps_are_kept(changed: Path):
    rates = [load_run_config(RunDirectory(changed), step=step).optim.lr for step in (1, 2, 3)]
    assert rates == [0.001, 0.002, 0.002]
    assert run_status(changed).changes == [
        {"after_step": 1, "options": {"optim.lr": [0.001, 0.002], "train.num_steps": [1, 2]}},
        {"after_step": 2, "options": {"train.num_steps": [2, 3]}},
    ]


def test_status_and_compare_print_the_changes(changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, out, _ = run_command(capsys, "status", str(changed))
    assert "changed     optim.lr 0.001 -> 0.002, train.num_steps 1 -> 2, after step 1\n" in out
    other = tmp_path / "other"
    start_run(tiny(*SAVES, "optim.lr=0.5"), run_dir=other, config_name="tiny")
    assert f"{changed} changed options after step 2: train.num_steps 2 -> 3" in compare_runs(changed, other).notes


def test_a_fork_begins_with_the_options_of_its_step(changed: Path, tmp_path: Path):
    parent = RunDirectory(changed)
    early = create_fork(plan_fork(parent, 1, ["train.num_steps=5"]), tmp_path / "early", ["dapo"])
    late = create_fork(plan_fork(parent, 2, ["train.num_steps=5"]), tmp_path / "late", ["dapo"])
    assert list(early.earlier_configs()) == [1]
    assert list(late.earlier_configs()) == [1, 2]
    assert [load_run_config(late, step=step).optim.lr for step in (1, 2, 3)] == [0.001, 0.002, 0.002]


def test_an_option_that_cannot_work_changes_nothing(changed: Path):
    before = (changed / "config.yaml").read_text()
    with pytest.raises(ConfigError):
        resume_run(changed, ["rollout.group_size=1", "train.num_steps=4"])
    with pytest.raises(CheckpointError):
        resume_run(changed, ["model.lora={rank: 2}", "train.num_steps=4"])
    assert (changed / "config.yaml").read_text() == before
    assert list(RunDirectory(changed).earlier_configs()) == [1, 2]


def test_another_verifier_drops_the_options_of_the_former(changed: Path):
    run = RunDirectory(changed)
    assert load_run_config(run, ["reward.options.extract=final"]).reward.options == {"extract": "final"}
    overrides = ["reward.verifier=dapo.rewards.examples:has_digit"]
    assert load_run_config(run, ["reward.options.extract=final", *overrides]).reward.options == {"extract": "final"}
    run.replace_config(run.config.read_text().replace("options: {}", "options: {extract: final}"), after=3)
    assert load_run_config(run, overrides).reward.options == {}


class TestReplaceConfig:
    def test_a_run_that_falls_back_to_an_earlier_checkpoint(self, tmp_path: Path):
        run = RunDirectory.create(tmp_path / "run", "one", {})
        run.replace_config("two", after=10)
        run.replace_config("two", after=5)  # the checkpoint of step 10 was lost: the run goes on with the new options
        assert {step: path.read_text() for step, path in run.earlier_configs().items()} == {5: "one"}
        assert [run.config_of(step).read_text() for step in (1, 5, 6, 11)] == ["one", "one", "two", "two"]

    def test_a_change_that_is_taken_back_before_a_step_was_made(self, tmp_path: Path):
        run = RunDirectory.create(tmp_path / "run", "one", {})
        run.replace_config("two", after=10)
        run.replace_config("three", after=10)
        assert run.config_of(10).read_text() == "one"
        run.replace_config("one", after=10)
        assert run.earlier_configs() == {}
        assert run.config.read_text() == "one"

    def test_before_the_first_step_nothing_is_kept(self, tmp_path: Path):
        run = RunDirectory.create(tmp_path / "run", "one", {})
        run.replace_config("two", after=0)
        assert run.earlier_configs() == {}
        assert run.config.read_text() == "two"
