"""An option that a resume changes lasts, or is refused; readers know which options were in force in
which step.
"""

import math
import os
import shutil
from pathlib import Path

import pytest
import yaml

import dapo
from dapo.analysis.compare import compare_runs
from dapo.cli.train import resume_run, start_run
from dapo.core.errors import CheckpointError, ConfigError
from dapo.runs.checkpoints import WEIGHTS_ONLY, require_optimizer_state, step_of
from dapo.runs.curves import Mark, curves_figure, marks_of
from dapo.runs.directory import RunDirectory
from dapo.runs.status import run_status
from dapo.runs.stored_config import load_run_config, with_overrides
from dapo.start import run as execute
from dapo.start.fork import create_fork, plan_fork
from helpers.commands import own_errors
from helpers.commands import run as run_command
from helpers.forked_workers import WorkerForks
from helpers.tiny_runs import metrics, tiny

SAVES = ("train.num_steps=1", "train.save_every=1", "train.keep_checkpoints=9")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose learning rate and length were changed after step 1, and which was continued once
    more.
    """
    path = tmp_path_factory.mktemp("changed") / "run"
    start_run(
        tiny(*SAVES, "optim.lr=0.001", "optim.warmup_steps=0"), run_dir=path, config_name="tiny"
    )
    resume_run(path, ["optim.lr=0.002", "train.num_steps=2"])
    resume_run(path, ["train.num_steps=3"])
    return path


def test_a_later_resume_keeps_it(changed: Path):
    assert [row["optim/lr"] for row in metrics(changed) if "optim/lr" in row] == [
        0.001,
        0.002,
        0.002,
    ]
    assert yaml.safe_load((changed / "config.yaml").read_text())["optim"]["lr"] == 0.002
    assert load_run_config(RunDirectory(changed)).train.num_steps == 3


def test_the_options_of_earlier_steps_are_kept(changed: Path):
    rates = [load_run_config(RunDirectory(changed), step=step).optim.lr for step in (1, 2, 3)]
    assert rates == [0.001, 0.002, 0.002]
    assert run_status(changed).changes == [
        {"after_step": 1, "options": {"optim.lr": [0.001, 0.002], "train.num_steps": [1, 2]}},
        {"after_step": 2, "options": {"train.num_steps": [2, 3]}},
    ]


def test_status_and_compare_print_the_changes(
    changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, out, _ = run_command(capsys, "status", str(changed))
    changes = "changed optim.lr 0.001 -> 0.002, train.num_steps 1 -> 2, after step 1 changed"
    assert changes in " ".join(out.split())
    other = tmp_path / "other"
    start_run(tiny(*SAVES, "optim.lr=0.5"), run_dir=other, config_name="tiny")
    assert (
        f"{changed} changed options after step 2: train.num_steps 2 -> 3"
        in compare_runs(changed, other).notes
    )


def test_a_fork_begins_with_the_options_of_its_step(changed: Path, tmp_path: Path):
    parent = RunDirectory(changed)
    early = create_fork(plan_fork(parent, 1, ["train.num_steps=5"]), tmp_path / "early", ["dapo"])
    late = create_fork(plan_fork(parent, 2, ["train.num_steps=5"]), tmp_path / "late", ["dapo"])
    assert list(early.earlier_configs()) == [1]
    assert list(late.earlier_configs()) == [1, 2]
    assert [load_run_config(late, step=step).optim.lr for step in (1, 2, 3)] == [
        0.001,
        0.002,
        0.002,
    ]


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
    assert load_run_config(run, ["reward.options.extract=final"]).reward.options == {
        "extract": "final"
    }
    overrides = ["reward.verifier=dapo.rewards.examples:has_digit"]
    assert load_run_config(run, ["reward.options.extract=final", *overrides]).reward.options == {
        "extract": "final"
    }
    run.replace_config(
        run.config.read_text().replace("options: {}", "options: {extract: final}"), after=3
    )
    assert load_run_config(run, overrides).reward.options == {}


class TestReplaceConfig:
    def test_a_run_that_falls_back_to_an_earlier_checkpoint(self, tmp_path: Path):
        run = RunDirectory.create(tmp_path / "run", "one", {})
        run.replace_config("two", after=10)
        # the checkpoint of step 10 was lost: the run goes on with the new options
        run.replace_config("two", after=5)
        assert {step: path.read_text() for step, path in run.earlier_configs().items()} == {
            5: "one"
        }
        assert [run.config_of(step).read_text() for step in (1, 5, 6, 11)] == [
            "one",
            "one",
            "two",
            "two",
        ]

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


def test_a_preset_cannot_change_because_its_options_would_not(changed: Path):
    before = (changed / "config.yaml").read_text()
    for resume in (
        lambda: resume_run(changed, ["preset=grpo"]),
        lambda: dapo.resume(changed, preset="rloo"),
    ):
        with pytest.raises(
            ConfigError,
            match="preset cannot change in a resumed run: a run has a value for each option",
        ):
            resume()
    assert (changed / "config.yaml").read_text() == before


def test_the_command_of_a_run_has_its_newest_options_and_the_resumes_behind_it(changed: Path):
    started = ["dapo", "train", "tiny", "optim.lr=0.001", "train.seed=5", "--run-dir", "a=b"]
    newest = ["dapo", "train", "tiny", "optim.lr=0.002", "train.seed=5", "train.num_steps=3"]
    words = with_overrides(started, ["optim.lr=0.002", "train.num_steps=3"])
    assert words == [*newest, "--run-dir", "a=b"]
    assert dapo.load(changed).command.splitlines()[1:3] == [
        f"# after step 1: dapo resume {changed} optim.lr=0.002 train.num_steps=2",
        f"# after step 2: dapo resume {changed} train.num_steps=3",
    ]


def test_the_curves_mark_each_change_and_join_no_evaluations_of_two_rewards(changed: Path):
    run = RunDirectory(changed)
    first = marks_of(run)[:1]
    assert first == [Mark(1, "optim.lr=0.002", is_of_reward=False)]
    axes = curves_figure(run.metrics, marks=first).axes
    assert [text.get_text() for text in axes[0].texts] == ["optim.lr=0.002"]
    for panel in axes[:4]:
        assert [1.5, 1.5] in [list(line.get_xdata()) for line in panel.lines]
    before, after = [
        next(line for line in figure.axes[0].lines if line.get_label().startswith("held out: "))
        for figure in (
            curves_figure(run.metrics),
            curves_figure(run.metrics, marks=[Mark(1, "reward changed", is_of_reward=True)]),
        )
    ]
    gap = list(after.get_xdata()).index(1.5)
    assert math.isnan(after.get_ydata()[gap])
    assert [x for x in after.get_xdata() if x != 1.5] == list(before.get_xdata())


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_run_is_not_cut_to_fewer_steps_than_it_has(
    is_killed: bool, changed: Path, tmp_path: Path
):
    run = shutil.copytree(changed, tmp_path / "run")
    if is_killed:
        (run / "summary.json").unlink(missing_ok=True)
    with pytest.raises(
        ConfigError, match=r"the run is at step 3; train\.num_steps=1 is behind it: expected more"
    ):
        resume_run(run, ["train.num_steps=1"])
    assert load_run_config(RunDirectory(run)).train.num_steps == 3


def test_the_damage_of_the_newest_checkpoint_is_named_before_the_one_without_moments(
    tmp_path: Path,
):
    older = tmp_path / "run" / "checkpoints" / "step_000010"
    older.mkdir(parents=True)
    (older / WEIGHTS_ONLY).touch()
    with pytest.raises(CheckpointError) as found:
        require_optimizer_state(older, ["step_000012 is damaged (a checksum)"])
    assert str(found.value).startswith(
        f"step_000012 is damaged (a checksum), but {older} holds only weights"
    )
    assert "A run with train.keep_checkpoints=2 can be continued" in str(found.value)


def test_a_closed_output_ends_a_run_which_is_saved_and_says_so(
    worker_forks: WorkerForks, tmp_path: Path
):
    reader, writer = os.pipe()
    command = ("train", "tiny", "train.num_steps=500", "--run-dir", str(tmp_path / "run"))
    with (tmp_path / "errors").open("w") as errors, open(writer, "w") as output:
        process = worker_forks.command(*command, output=output, errors=errors)
    with open(reader) as lines:
        while "2/500" not in lines.readline():
            assert process.poll() is None
    code = process.wait(60)
    message = own_errors((tmp_path / "errors").read_text()).strip()
    expected = "the output was closed, so training ends here; dapo resume RUN continues it"
    assert (code, message) == (1, f"error: {expected}")
    assert RunDirectory(tmp_path / "run").exit_reason() == f"DapoError: {expected}"
    checkpoint = RunDirectory(tmp_path / "run").checkpoints.latest(warn=pytest.fail)
    assert checkpoint is not None
    assert step_of(checkpoint) == metrics(tmp_path / "run")[-1]["step"]


def test_the_summary_names_an_error_that_is_no_users_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(execute, "train", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start_run(tiny(), run_dir=tmp_path / "run", config_name="tiny")
    assert RunDirectory(tmp_path / "run").exit_reason() == "ZeroDivisionError: division by zero"
