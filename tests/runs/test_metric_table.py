"""The table of metrics is complete: every logged name is in it, and what it lists is logged."""

import ast
import re
from pathlib import Path

import pytest

import dapo
from dapo.cli.train import start_run
from dapo.runs.metric_table import METRICS, OUTCOMES, PHASES, SECTIONS, metric_of
from dapo.sampling import queue
from dapo.sampling.rollout_metrics import mean_of_updates
from docs.generated_pages import metrics_page
from helpers.async_runs import async_config, run_or_resume
from helpers.paths import ROOT
from helpers.tables import for_each_row
from helpers.tiny_runs import logged_names, tiny


def test_the_page_of_metrics_is_what_the_table_gives():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_page(), (
        "run `make docs`"
    )


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_run_logs_all_metrics_of_the_table_that_have_no_condition_and_no_others(
    tmp_path: Path, schedule: str
):
    if schedule == "sync":
        start_run(tiny("train.num_steps=3"), run_dir=tmp_path / "run", config_name="t")
    else:
        run_or_resume(tmp_path / "run", async_config("train.num_steps=3", "schedule=async"))
    logged = {metric_of(name) for name in logged_names(tmp_path / "run")}
    not_logged = [metric for metric in METRICS if metric not in logged]
    assert [metric.name for metric in not_logged if not metric.when] == []
    conditions = {"with more than one update per step"}
    conditions |= (
        {"with `schedule: async`", "with `max_staleness` from 2 on"}
        if schedule == "async"
        else set()
    )
    assert [metric.name for metric in not_logged if metric.when in conditions] == []


def test_every_metric_that_the_code_names_is_in_the_table():
    name = re.compile(rf"({'|'.join(SECTIONS)})/[a-z]\w+")
    for path in Path(dapo.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and name.fullmatch(node.value)
            ):
                # an f-string adds the bin
                metric_of(node.value + "0_20" * node.value.endswith("_"))


def test_every_outcome_of_a_group_is_explained():
    assert (*queue.COUNTED, "stale") == OUTCOMES
    assert metric_of("rollout/groups_zero_variance").name == "rollout/groups_{outcome}"
    with pytest.raises(KeyError, match="rollout/groups_no_spread is not in the table"):
        metric_of("rollout/groups_no_spread")


def test_every_phase_that_is_timed_or_shown_is_in_the_table():
    named = set()
    for path in Path(dapo.__file__).parent.rglob("*.py"):
        named |= set(re.findall(r'\.phase\(\s*"([^"]+)"', path.read_text(encoding="utf-8")))
    assert named
    assert named <= PHASES.keys()


def test_updates_are_combined_as_the_table_says():
    updates = [
        {
            "loss/policy": 1.0,
            "rollout/engine_logprob_gap_max": 3.0,
            "optim/skipped": 1.0,
            "loss/kl": 5.0,
        },
        {"loss/policy": 2.0, "rollout/engine_logprob_gap_max": 1.0, "optim/skipped": 1.0},
    ]
    assert mean_of_updates(updates) == {
        "loss/policy": 1.5,
        "rollout/engine_logprob_gap_max": 3.0,
        "optim/skipped": 2.0,
        "loss/kl": 5.0,
    }


PER_TOKEN = (
    "loss/entropy",
    "loss/ratio_mean",
    "loss/approx_kl",
    "loss/token_prob_mean",
    "loss/clip_low_fraction",
    "loss/clip_high_fraction",
    "loss/clip_dual_fraction",
    "loss/engine_weight_mean",
    "loss/engine_weight_truncated_fraction",
    "rollout/engine_logprob_gap_mean",
)


@for_each_row("name", PER_TOKEN)
def test_means_over_tokens_weigh_each_update_by_its_tokens(name: str):
    updates = [{name: 0.0, "optim/update_tokens": 2000.0}, {name: 0.4, "optim/update_tokens": 20.0}]
    assert mean_of_updates(updates)[name] == pytest.approx(8 / 2020)
    assert mean_of_updates([*updates, {"optim/update_tokens": 0.0}])[name] == pytest.approx(
        8 / 2020
    )


def test_the_probability_at_the_upper_clip_is_a_mean_over_the_tokens_clipped_there():
    updates = [
        {
            "optim/update_tokens": 1000.0,
            "loss/clip_high_fraction": 0.03,
            "loss/clipped_high_prob_mean": 0.2,
        },
        {
            "optim/update_tokens": 100.0,
            "loss/clip_high_fraction": 0.1,
            "loss/clipped_high_prob_mean": 0.6,
        },
        {"optim/update_tokens": 500.0, "loss/clip_high_fraction": 0.0},
    ]
    found = mean_of_updates(updates)
    assert found["loss/clipped_high_prob_mean"] == pytest.approx((30 * 0.2 + 10 * 0.6) / 40)
    assert found["loss/clip_high_fraction"] == pytest.approx(40 / 1600)
    assert found["optim/update_tokens"] == 1600
