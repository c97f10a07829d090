"""`train.token_budget`: a run ends after the step that reaches it, as one of that many steps
does.
"""

import json
from pathlib import Path

import pytest

from dapo.analysis.check.summary import explain
from dapo.cli.train import resume_run, start_run
from dapo.core.errors import ConfigError
from dapo.runs.directory import RunDirectory
from helpers.async_runs import async_config, run_or_resume
from helpers.tiny_runs import contents, differences, metrics, saved_steps, tiny

OFTEN = ("train.save_every=1", "train.eval_every=3", "train.keep_checkpoints=9", "log.rollouts=all")


def spent_by(run: Path, step: int) -> int:
    """The tokens generated up to a step."""
    return sum(
        row.get("rollout/tokens_generated", 0) for row in metrics(run) if row["step"] <= step
    )


def started(path: Path, *overrides: str) -> Path:
    start_run(tiny(*OFTEN, *overrides), run_dir=path, config_name="x")
    return path


def test_a_run_with_a_budget_equals_one_of_as_many_steps_and_a_larger_budget_goes_on(
    tmp_path: Path, capsys
):
    whole = started(tmp_path / "whole", "train.num_steps=4")
    first = spent_by(whole, 1)
    budget = started(tmp_path / "budget", "train.num_steps=4", f"train.token_budget={first + 1}")
    assert saved_steps(budget) == ["step_000001", "step_000002"]
    assert (budget / "eval" / "step_000002.json").exists()
    summary = json.loads((budget / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"]) == ("finished", 2)
    assert spent_by(budget, 2) > first >= spent_by(budget, 1)
    two = started(tmp_path / "two", "train.num_steps=2")
    assert differences(contents(budget), contents(two)) == []

    capsys.readouterr()
    resume_run(budget, [])
    assert "already at step 2 of 4, with train.token_budget spent" in capsys.readouterr().out
    resume_run(budget, ["train.token_budget=1000000"])
    unlike = differences(contents(budget), contents(whole))
    # the evaluation after step 2 is one more, and so is the accuracy that its checkpoint and its
    # line hold
    assert not [name for name in unlike if "step_000004" in name and "eval" in name]
    assert (budget / "eval" / "step_000004.json").read_bytes() == (
        whole / "eval" / "step_000004.json"
    ).read_bytes()


def test_a_budget_of_exactly_the_tokens_of_a_step_ends_with_it(tmp_path: Path):
    one = started(tmp_path / "one", "train.num_steps=1")
    exact = started(
        tmp_path / "exact", "train.num_steps=3", f"train.token_budget={spent_by(one, 1)}"
    )
    assert saved_steps(exact) == ["step_000001"]


def test_a_run_that_was_killed_before_its_summary_ends_where_it_would_have(tmp_path: Path):
    whole = started(tmp_path / "whole", "train.num_steps=9", "train.token_budget=200")
    last = saved_steps(whole)[-1]
    before = contents(whole)
    (whole / "summary.json").unlink()
    resume_run(whole, [])
    assert differences(contents(whole), before) == []
    assert RunDirectory(whole).exit_reason() == "finished"
    assert saved_steps(whole)[-1] == last


def test_one_step_off_samples_no_batch_beyond_the_budget(tmp_path: Path):
    plain = async_config(*OFTEN, "train.num_steps=2")
    run_or_resume(tmp_path / "two", plain)
    budget = spent_by(tmp_path / "two", 1) + 1
    config = async_config(*OFTEN, "train.num_steps=6", f"train.token_budget={budget}")
    state = run_or_resume(tmp_path / "budget", config)
    assert (state.step, state.prefetched_batch) == (2, None)
    assert differences(contents(tmp_path / "budget"), contents(tmp_path / "two")) == []


def test_a_falling_rate_and_a_budget_are_refused_together_and_check_names_the_budget():
    with pytest.raises(
        ConfigError,
        match=r"may end the run earlier; set optim\.schedule=constant, or leave the budget out",
    ):
        tiny("optim.schedule=linear", "train.token_budget=1000")
    shown = list(explain(tiny("train.token_budget=123456")))
    assert any(
        "ends earlier with the step that reaches 123,456 generated tokens" in line for line in shown
    )
