"""Each rule on metrics made by hand: it holds beyond its threshold, it is silent before it, and it
says what to do.
"""

import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from dapo.config import Config, build_config
from dapo.libs.sample_intervals import difference_interval
from dapo.runs.metric_table import METRICS
from dapo.training.rules.all_rules import RULES, LiveRules, active_findings
from dapo.training.rules.finding import Finding
from dapo.training.rules.history import AUDIT_GAP, FIRST, MAY_DIVERGE, WINDOW, MetricHistory
from dapo.training.rules.mean_test import STAKES, MeanTest
from dapo.training.rules.outcome_rules import AUDIT_EVIDENCE
from dapo.training.rules.update_rules import FALL_STEPS
from helpers.paths import ROOT
from helpers.tables import for_each_row

HEALTHY: Mapping[str, float] = {
    "rollout/groups_generated": 10,
    "rollout/groups_trained": 4,
    "rollout/groups_all_correct": 3,
    "rollout/groups_all_wrong": 3,
    "rollout/keep_rate": 0.4,
    "rollout/all_correct_fraction": 0.3,
    "rollout/all_wrong_fraction": 0.3,
    "rollout/truncated_fraction": 0.1,
    "rollout/response_tokens_mean": 20.0,
    "rollout/verifier_errors": 0,
    "rollout/tokens_in_minibatches": 300,
    "rollout/engine_logprob_gap_mean": 0.01,
    "rollout/epoch": 1,
    "reward/accuracy": 0.5,
    "reward/mean": 0.1,
    "loss/entropy": 0.5,
    "loss/approx_kl": 1e-4,
    "loss/ratio_mean": 1.0,
    "loss/clip_high_fraction": 0.01,
    "loss/clip_low_fraction": 0.01,
    "optim/grad_norm": 0.3,
    "optim/skipped": 0,
    "optim/update_tokens": 280,
    "optim/lr": 1e-6,
    "time/judge_wait_s": 0.1,
    "time/step_s": 10.0,
}


def options(**changed: Any) -> Config:
    raw = {"model": "tiny-random", "data": {"train": "builtin:sums"}, "optim": {"warmup_steps": 0}}
    raw |= {"rollout": {"prompts_per_step": 4, "group_size": 4}, "train": {"minibatch_groups": 2}}
    return build_config(
        raw, [f"{name.replace('__', '.')}={value}" for name, value in changed.items()]
    )


def found(
    late: Mapping[str, float | None],
    config: Config | None = None,
    *,
    early: Any = HEALTHY,
    steps: int = 10,
) -> list[Finding]:
    """The findings after `FIRST` steps as `early` and further ones with `late` over that; None: not
    logged.
    """
    history = MetricHistory()
    for step in range(1, steps + 1):
        record = dict(early) | (dict(late) if step > FIRST else {})
        history.add(
            {"step": step} | {name: value for name, value in record.items() if value is not None}
        )
    return loadable(active_findings(history, config or options()), config or options())


def loadable(findings: list[Finding], config: Config) -> list[Finding]:
    """The findings; what each proposes is typed after the options of the run."""
    for change in (change for each in findings for change in each.change):
        build_config(config.model_dump(mode="json"), shlex.split(change))
    return findings


def names(findings: list[Finding]) -> set[str]:
    return {each.name for each in findings}


def test_a_healthy_run_has_no_finding():
    assert found({}) == []


RUNS_AGENT = {"environment__name": "agent:my_agent:solve"}
ASYNC = {"schedule": "async", "rollout__engines": 1}
KEPT = "rollout/groups_trained"
FLAT = "rollout/zero_advantage_fraction"
AGENT: dict[str, float | None] = {"rollout/turns_mean": 3.0}
FAULTS: list[tuple[str, dict[str, float | None], dict[str, float | None], dict[str, Any]]] = [
    # rule, metrics just beyond the threshold, just before it, options
    ("too_easy", {KEPT: 2, "rollout/groups_all_correct": 5}, {KEPT: 2.5, "rollout/groups_all_correct": 5}, {}),
    ("too_hard", {KEPT: 2, "rollout/groups_all_wrong": 5}, {KEPT: 2.5, "rollout/groups_all_wrong": 5}, {}),
    ("equal_rewards", {KEPT: 2, "rollout/groups_zero_variance": 9}, {KEPT: 3, "rollout/groups_zero_variance": 9}, {}),
    ("filtered", {KEPT: 2, "rollout/groups_filtered": 9}, {KEPT: 3, "rollout/groups_filtered": 9}, {}),
    ("too_hard", {FLAT: 0.8, "reward/accuracy": 0.1}, {FLAT: 0.75},
     {"dynamic_sampling__enabled": "false"}),
    ("too_easy", {FLAT: 0.8, "reward/accuracy": 0.8}, {FLAT: 0.75},
     {"dynamic_sampling__enabled": "false"}),
    ("equal_rewards", {FLAT: 0.8, "reward/accuracy": None}, {FLAT: 0.75},
     {"dynamic_sampling__enabled": "false"}),
    # of 40
    ("verifier_errors", {"rollout/verifier_errors": 3}, {"rollout/verifier_errors": 2}, {}),
    ("verifier_errors", {"audit/errors": 2, "audit/responses": 16}, {"audit/errors": 1, "audit/responses": 20}, {}),
    ("truncation", {"rollout/truncated_fraction": 0.51}, {"rollout/truncated_fraction": 0.5}, {}),
    ("length_explosion", {"rollout/response_tokens_mean": 40.0},
     {"rollout/response_tokens_mean": 40.0, "reward/accuracy": 0.56}, {}),
    ("length_explosion", {"rollout/response_tokens_mean": 41.0}, {"rollout/response_tokens_mean": 39.0}, {}),
    ("length_collapse", {"rollout/response_tokens_mean": 11.0},
     {"rollout/response_tokens_mean": 11.0, "reward/accuracy": 0.56}, {}),
    ("length_collapse", {"rollout/response_tokens_mean": 12.0}, {"rollout/response_tokens_mean": 12.1}, {}),
    ("repeated_text", {"rollout/looping_fraction": 0.11}, {"rollout/looping_fraction": 0.1}, {}),
    ("many_answers", {"rollout/many_answers_fraction": 0.11}, {"rollout/many_answers_fraction": 0.1}, {}),
    ("one_problem", {"rollout/top_problem_fraction": 0.51}, {}, {}),
    ("entropy_collapse", {"loss/entropy": 0.04}, {"loss/entropy": 0.06}, {}),
    ("entropy_collapse", {"loss/entropy": 0.04}, {"loss/entropy": 0.04, "reward/accuracy": 0.9}, {}),
    ("entropy_collapse", {"loss/entropy": 0.04, "reward/accuracy": 0.54},
     {"loss/entropy": 0.04, "reward/accuracy": 0.56}, {}),  # it learns its task, from 0.5
    ("entropy_explosion", {"loss/entropy": 1.01}, {"loss/entropy": 0.99}, {}),
    ("entropy_explosion", {"loss/entropy": 1.01}, {"loss/entropy": 1.01, "reward/accuracy": 0.56}, {}),
    ("entropy_explosion", {"loss/entropy": 1.21}, {"loss/entropy": 1.19}, {"loss__entropy_target": 0.8}),
    ("entropy_explosion", {"loss/entropy": 1.01, "reward/accuracy": 0.9}, {"loss/entropy": 0.99},
     {"loss__entropy_coef": 1}),  # the bonus outweighs whatever is learned
    ("sampler_gap", {"rollout/engine_logprob_gap_mean": 0.11}, {"rollout/engine_logprob_gap_mean": 0.1}, {}),
    ("sampler_gap", {"rollout/engine_logprob_gap_mean": float("nan")}, {}, {}),
    ("skipped_updates", {"optim/skipped": 1}, {"optim/skipped": 0}, {}),
    ("lr_too_high", {"loss/approx_kl": 0.11}, {"loss/approx_kl": 0.1}, {}),
    ("lr_too_high", {"loss/clip_high_fraction": 0.2}, {"loss/clip_high_fraction": 0.19}, {}),
    ("lr_too_low", {"loss/approx_kl": 1e-9}, {"loss/approx_kl": 2e-8}, {}),
    ("lr_too_low", {"loss/approx_kl": 1e-9}, {"loss/approx_kl": 1e-9, FLAT: 1.0}, {}),
    # of 40
    ("environment_errors", {"rollout/environment_errors": 3}, {"rollout/environment_errors": 2}, {}),
    ("verifier_errors", {"rollout/verifier_errors": 6, "rollout/environment_errors": 3},
     {"rollout/verifier_errors": 5, "rollout/environment_errors": 3}, {}),
    ("episodes_cut", {"rollout/episodes_cut_fraction": 0.91}, {"rollout/episodes_cut_fraction": 0.9}, {}),
    # of 10 groups of 4 with 3 calls each, so 120 calls, 80 of them behind another one
    ("rewritten_history", AGENT | {"rollout/rewritten_histories": 41},
     AGENT | {"rollout/rewritten_histories": 40}, RUNS_AGENT),
    ("refused_requests", AGENT | {"rollout/refused_requests": 7}, AGENT | {"rollout/refused_requests": 6}, RUNS_AGENT),
    ("overridden_requests", AGENT | {"rollout/overridden_requests": 61},
     AGENT | {"rollout/overridden_requests": 60}, RUNS_AGENT),
    ("empty_answers", AGENT | {"rollout/empty_answers": 7}, AGENT | {"rollout/empty_answers": 6}, RUNS_AGENT),
    ("masked_tokens", AGENT | {"rollout/masked_tokens": 201}, AGENT | {"rollout/masked_tokens": 200}, RUNS_AGENT),
    ("slow_agent", {"time/environment_s": 5.1, "time/step_s": 10.0},
     {"time/environment_s": 4.9, "time/step_s": 10.0}, RUNS_AGENT),
    ("slow_agent", {"time/environment_s": 1.1, "time/step_s": 1.2},
     {"time/environment_s": 0.9, "time/step_s": 1.0}, RUNS_AGENT),
    ("episodes_cut", {"rollout/episodes_cut_fraction": 1.0},
     {"rollout/episodes_cut_fraction": 1.0, "rollout/truncated_fraction": 0.6}, {}),
    ("no_tool_calls", {"rollout/tool_calls": 0}, {"rollout/tool_calls": 1}, {"environment__tools": "[a:b]"}),
    ("no_tool_calls", {"rollout/tool_calls": 0}, {}, {"environment__tools": "[a:b]"}),
    ("tool_errors", {"rollout/tool_calls": 10, "rollout/tool_errors": 9.1},
     {"rollout/tool_calls": 10, "rollout/tool_errors": 9}, {}),
    ("too_stale", {"loss/engine_weight_truncated_fraction": 0.051},
     {"loss/engine_weight_truncated_fraction": 0.05}, ASYNC),
    ("stale_work", {"rollout/tokens_generated": 100, "rollout/tokens_stale": 11},
     {"rollout/tokens_generated": 100, "rollout/tokens_stale": 10}, ASYNC),
    ("idle_engine", {"time/engine_idle_s": 5.1}, {"time/engine_idle_s": 5.0}, ASYNC),
    ("idle_engine", {"time/engine_idle_s": 5.1, "time/step_s": 30.0, "time/evaluate_s": 20.0},
     {"time/engine_idle_s": 5.1, "time/step_s": 30.0, "time/evaluate_s": 19.0}, ASYNC),
    ("idle_trainer", {"time/trainer_idle_s": 5.1}, {"time/trainer_idle_s": 5.0}, ASYNC),
    ("slow_verifier", {"time/judge_wait_s": 5.1}, {"time/judge_wait_s": 4.9}, {}),
    ("slow_verifier", {"time/judge_wait_s": 5.1}, {"time/judge_wait_s": 0.9, "time/step_s": 1.0}, {}),
    ("slow_verifier", {"time/judge_wait_s": 5.1, "time/step_s": 30.0, "time/evaluate_s": 20.0},
     {"time/judge_wait_s": 5.1, "time/step_s": 30.0, "time/evaluate_s": 19.0}, {}),
]  # fmt: skip


NONE_RIGHT: dict[str, float | None] = {
    "reward/accuracy": 0.0, "rollout/groups_generated": 64, KEPT: 0, "rollout/groups_all_wrong": 64,
    "rollout/groups_all_correct": 0, "rollout/keep_rate": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("logged", "changed", "result"),
    [
        (NONE_RIGHT, {}, "every response to 320 prompts is wrong, so nothing is learned"),
        (
            {"reward/accuracy": 0.0, FLAT: 1.0},
            {"dynamic_sampling__enabled": "false"},
            "so nothing is learned",
        ),
        # the penalty on length gives groups that are all wrong a spread, which dynamic sampling
        # would have dropped
        (
            {"reward/accuracy": 0.0},
            {"dynamic_sampling__enabled": "false"},
            "learned is the penalty on length",
        ),
    ],
)
def test_where_no_response_is_right_the_problems_are_named_and_no_option(
    logged: dict[str, float | None], changed: dict[str, Any], result: str
):
    config = options(**changed)
    never_right = HEALTHY | {"reward/accuracy": 0.0}
    (case,) = [each for each in found(logged, config, early=never_right) if each.name == "too_hard"]
    assert (case.severity, case.change) == ("error", ())
    assert result in case.cause
    assert case.advice.startswith(
        "mix in problems that the model solves at times, data.train={mix: {easy: SOURCE"
    )
    assert case.advice in case.one_line()
    one_right = [
        each
        for each in found(logged | {"reward/accuracy": 0.001}, config)
        if each.severity == "error"
    ]
    assert one_right == []


def test_where_scores_decide_partial_credit_teaches_although_no_response_is_right():
    never_right = HEALTHY | {"reward/accuracy": 0.0}
    logged = NONE_RIGHT | {"rollout/groups_all_wrong": 16, "rollout/groups_trained": 48}
    logged["rollout/keep_rate"] = 0.75
    by_score = options(dynamic_sampling__metric="score")
    for config, expected in ((options(), ["too_hard"]), (by_score, [])):
        names = [each.name for each in found(logged, config, early=never_right)]
        assert [name for name in names if name == "too_hard"] == expected


def test_a_run_that_has_had_a_correct_response_may_have_another_one():
    """Runs that learned have had five steps without one (evidence: curriculum_small, every group
    trains).
    """
    config = options(dynamic_sampling__enabled="false")
    flat = {"reward/accuracy": 0.0, FLAT: 1.0}
    assert [each.severity for each in found(flat, config, early=HEALTHY | flat)] == ["error"]
    assert [each.severity for each in found(flat, config)] == ["warning"]


def test_wrong_responses_of_groups_without_a_signal_are_examples_of_too_hard_problems():
    (shows,) = [rule.response for rule in RULES if rule.name == "too_hard"]
    assert shows is not None
    wrong = {"outcome": "trained", "correct": False}
    assert shows(wrong | {"outcome": "all_wrong", "advantage": None})
    assert shows(wrong | {"advantage": 0.0})
    assert not shows(wrong | {"advantage": -0.25})
    assert not shows({"outcome": "trained", "correct": True, "advantage": 0.0})


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        ({"filter": "my:keep"}, ("dynamic_sampling.filter=null",)),
        ({"min_spread": 0.5}, ("dynamic_sampling.min_spread=0",)),
        ({"mean_between": "[0,9]"}, ("dynamic_sampling.mean_between=[null,null]",)),
    ],
)
def test_the_filter_that_rejects_most_groups_is_the_option_to_change(
    changed: dict[str, Any], change: tuple[str, ...]
):
    config = options(**{f"dynamic_sampling__{name}": value for name, value in changed.items()})
    cases = found({"rollout/groups_trained": 2, "rollout/groups_filtered": 9}, config)
    (case,) = [each for each in cases if each.name == "filtered"]
    assert case.change == change


@for_each_row(["name", "beyond", "before", "changed"], FAULTS)
def test_a_rule_holds_beyond_its_threshold_and_not_before_it(
    name: str,
    beyond: dict[str, float | None],
    before: dict[str, float | None],
    changed: dict[str, Any],
):
    config = options(**changed)
    assert name in names(found(beyond, config))
    assert name not in names(found(before, config))


CUT = {"rollout/truncated_fraction": 0.94}
EXCLUDED: list[tuple[str, dict[str, float | None], dict[str, float | None], dict[str, Any]]] = [
    # rule, metrics that show it, what else shows that the option is not the cause, options of both
    # runs
    ("lr_too_low", {"loss/approx_kl": 1e-9}, {FLAT: 0.5}, {}),  # two groups, in one of two updates
    ("lr_too_low", {"loss/approx_kl": 1e-9}, {KEPT: 2}, {}),  # a short batch
    ("lr_too_low", {"loss/approx_kl": 1e-9}, {"optim/lr": 1e-8}, {}),  # its schedule is at the end
    ("lr_too_low", {"loss/approx_kl": 1e-9}, {"optim/skipped": 2}, {}),
    ("lr_too_low", {"loss/approx_kl": 1e-9}, {FLAT: 0.9} | CUT, {"overlong__mode": "filter"}),
    ("too_hard", {FLAT: 0.8, "reward/accuracy": 0.1}, CUT, {"dynamic_sampling__enabled": "false"}),
    ("too_hard", {KEPT: 2, "rollout/groups_all_wrong": 5}, CUT, {}),
    # groups that begin again were not judged: 2 of 6 carry a signal
    ("too_hard", {KEPT: 2, "rollout/groups_all_wrong": 5}, {"rollout/groups_stale": 4}, ASYNC),
    ("too_easy", {FLAT: 0.8, "reward/accuracy": 0.8}, CUT,
     {"dynamic_sampling__enabled": "false", "overlong__mode": "filter"}),
    ("too_hard", {FLAT: 0.8, "reward/accuracy": 0.1}, {"rollout/verifier_errors": 32},
     {"dynamic_sampling__enabled": "false"}),
    ("equal_rewards", {FLAT: 0.8, "reward/accuracy": None}, CUT, {"dynamic_sampling__enabled": "false"}),
    ("truncation", {"rollout/truncated_fraction": 0.7}, {"rollout/looping_fraction": 0.5}, {}),
    ("length_explosion", {"rollout/response_tokens_mean": 60.0}, {"reward/accuracy": 0.56}, {}),
    ("length_collapse", {"rollout/response_tokens_mean": 9.0}, {"reward/accuracy": 0.95}, {}),
    ("gradient_spike", {"optim/grad_norm": 9.0}, {FLAT: 0.8, "reward/accuracy": 0.8},
     {"dynamic_sampling__enabled": "false"}),  # of few groups whose norms are otherwise small
    # of the tokens that train
    ("entropy_collapse", {"loss/entropy": 0.01}, {"rollout/entropy_estimate": 0.5}, {}),
    ("entropy_explosion", {"loss/entropy": 2.0}, {"rollout/entropy_estimate": 0.5}, {}),
]  # fmt: skip


@for_each_row(["name", "shown", "more", "changed"], EXCLUDED)
def test_a_rule_is_silent_where_something_else_explains_what_it_sees(
    name: str,
    shown: dict[str, float | None],
    more: dict[str, float | None],
    changed: dict[str, Any],
):
    config = options(**changed)
    early = HEALTHY | {"rollout/entropy_estimate": 0.5}
    if name == "gradient_spike":
        assert name in names(spiked(shown, config, early))
        assert name not in names(spiked(shown | more, config, early | {FLAT: 0.8}))
        return
    alike: dict[str, Any] = {"rollout/entropy_estimate": shown.get("loss/entropy", 0.5)}
    assert name in names(found(alike | shown, config, early=early))
    assert name not in names(found(alike | shown | more, config, early=early))


def spiked(
    last: Mapping[str, float | None], config: Config, early: Mapping[str, Any]
) -> list[Finding]:
    """The findings after ten steps as `early` and one with `last` over that."""
    history = MetricHistory()
    for step in range(1, 11):
        history.add({"step": step} | dict(early))
    history.add({"step": 11} | dict(early) | dict(last))
    return active_findings(history, config)


def finding(name: str, late: dict[str, float | None], **changed: Any) -> Finding:
    (case,) = [each for each in found(late, options(**changed)) if each.name == name]
    return case


def test_a_finding_proposes_no_value_that_an_option_has_and_no_option_without_effect():
    looping: dict[str, float | None] = {"rollout/looping_fraction": 0.5}
    assert finding("repeated_text", looping).change == ("overlong.mode=filter",)
    assert finding("repeated_text", looping, overlong__mode="filter").change == ()
    one: dict[str, float | None] = {"rollout/top_problem_fraction": 0.6}
    assert finding("one_problem", one).change == ("loss.aggregate=sequence",)
    assert finding("one_problem", one, loss__aggregate="sequence").change == ()
    gap: dict[str, float | None] = {"rollout/engine_logprob_gap_mean": 0.2}
    assert finding("sampler_gap", gap, model__dtype="float32").change == (
        "loss.engine_correction=tis",
    )
    collapsed: dict[str, float | None] = {"loss/entropy": 0.01}
    assert any(
        each.startswith("loss.clip_high") for each in finding("entropy_collapse", collapsed).change
    )
    for preset, wider in (("grpo", "loss.clip_high=0.28"), ("gspo", "loss.clip_high=0.0005")):
        assert wider in finding("entropy_collapse", collapsed, preset=preset).change
    one_update = finding("entropy_collapse", collapsed, train__minibatch_groups=4)
    assert [each.partition("=")[0] for each in one_update.change] == ["optim.lr"]
    silent = {FLAT: 1.0, "reward/accuracy": None}
    assert finding("equal_rewards", silent, dynamic_sampling__enabled="false").change == ()
    waits: dict[str, float | None] = {"time/judge_wait_s": 6.0}
    # responses per step
    assert finding("slow_verifier", waits, reward__workers=5).change == ("reward.workers=16",)
    assert finding("slow_verifier", waits, reward__workers=16).change == ()
    slow: dict[str, float | None] = {"time/environment_s": 6.0, "time/step_s": 10.0}
    assert finding("slow_agent", slow, **RUNS_AGENT).change == (
        "environment.lag_polls=16",
        "rollout.clock=load",
    )
    # there answers count when they come, whatever environment.lag_polls is
    assert finding("slow_agent", slow, **RUNS_AGENT, rollout__clock="load").change == ()


def test_the_fixes_of_async_follow_its_bound_and_do_not_hold_for_sync():
    over: dict[str, float | None] = {"loss/engine_weight_truncated_fraction": 0.2}
    assert finding("too_stale", over, **ASYNC, max_staleness=4).change == (
        "max_staleness=2",
        "optim.lr=5e-07",
    )
    assert finding("too_stale", over, **ASYNC, max_staleness=1).change == ("optim.lr=5e-07",)
    stale: dict[str, float | None] = {"rollout/tokens_generated": 100, "rollout/tokens_stale": 50}
    assert finding("stale_work", stale, **ASYNC).change == ("max_staleness=4",)
    assert finding("idle_trainer", {"time/trainer_idle_s": 9.0}, **ASYNC).change == (
        "rollout.engines=2",
    )
    on_gpu = finding("idle_trainer", {"time/trainer_idle_s": 9.0}, **ASYNC, train__device="cuda")
    assert on_gpu.change == ()
    assert on_gpu.advice.endswith("rollout.engines=2 where another GPU is idle")
    waits = {"time/engine_idle_s": 9.0, "time/trainer_idle_s": 9.0}
    assert found(over | stale | waits, options(loss__engine_correction="tis")) == []


def test_where_dynamic_sampling_is_proposed_its_batch_allows_a_higher_learning_rate():
    flat: dict[str, float | None] = {FLAT: 0.84, "reward/accuracy": 0.9}
    proposed = finding("too_easy", flat, dynamic_sampling__enabled="false")
    assert proposed.change[0] == "dynamic_sampling.enabled=true"
    assert proposed.advice.endswith("with dynamic sampling optim.lr may be up to 2.5 times as high")
    kept: dict[str, float | None] = {"rollout/groups_trained": 1.6, "rollout/groups_all_correct": 5}
    assert "optim.lr" not in finding("too_easy", kept).advice


def test_a_longer_time_limit_is_proposed_only_where_calls_last_as_long():
    errors: dict[str, float | None] = {"rollout/verifier_errors": 8}  # of 40
    assert finding("verifier_errors", errors | {"time/verifier_call_s": 2.1}).change == (
        "reward.timeout_s=20",
    )
    at_once = finding("verifier_errors", errors | {"time/verifier_call_s": 0.01})
    assert at_once.change == ()
    assert at_once.one_line().endswith("; dapo test shows what the verifier says")


def test_an_audit_that_fails_is_a_finding_unless_it_judged_a_few_responses():
    failed: dict[str, float | None] = {"audit/errors": 16, "audit/responses": 16}
    audit = finding("verifier_errors", failed)
    assert (audit.severity, audit.change) == ("error", ())
    assert "100% of the audited responses have no verdict of audit.verifier" in audit.one_line()
    assert found({"audit/errors": 0.4, "audit/responses": 0.4}) == []  # two in the window
    assert (
        "of the responses have no verdict, and train nothing"
        in finding("verifier_errors", failed | {"rollout/verifier_errors": 8}).cause
    )


def test_skipped_updates_name_the_loss_or_the_limit_that_skips_them():
    skipped: dict[str, float | None] = {"optim/skipped": 1}
    assert finding("skipped_updates", skipped).change == ("optim.lr=1e-07",)
    assert finding("skipped_updates", skipped, loss__max_approx_kl=1e-5).change == (
        "loss.max_approx_kl=1",
    )
    own = finding("skipped_updates", skipped, loss__function="tests.losses:mine")
    assert (own.change, "tests.losses:mine" in own.advice) == ((), True)


def test_truncated_responses_that_are_right_go_on_after_their_answer():
    right = finding("truncation", {"rollout/truncated_fraction": 0.9, "reward/accuracy": 0.8})
    assert (right.change, right.cause.endswith("they continue after their answer")) == ((), True)
    masked = finding(
        "truncation", {FLAT: 0.95} | CUT, overlong__mode="filter", dynamic_sampling__enabled="false"
    )
    assert "do not train, so that 5% of the groups have a token with an advantage" in masked.cause


def test_the_limit_of_the_evaluation_is_proposed_where_it_has_one():
    history = MetricHistory()
    history.add({"step": 0, "eval/held/accuracy": 0.1, "eval/held/low": 0, "eval/held/high": 1,
                 "eval/held/truncated_fraction": 0.9})  # fmt: skip
    (case,) = active_findings(history, options(eval__max_response_tokens=64))
    assert case.change == ("eval.max_response_tokens=128",)


def test_where_most_wrong_responses_are_cut_off_the_limit_is_named_before_the_problems():
    case = next(
        each
        for each in found(NONE_RIGHT | CUT, early=HEALTHY | NONE_RIGHT)
        if each.name == "too_hard"
    )
    assert case.cause.startswith(
        "94% of the responses reach 20480 tokens, the limit: every response to 320 prompts"
    )
    assert case.change == ("rollout.max_response_tokens=40960",)


@for_each_row(["mode", "steps"], itertools.product(["soft", "filter"], [1, 2, 3, 8]))
def test_where_all_responses_are_truncated_no_step_blames_the_problems(mode: str, steps: int):
    cut = {
        "rollout/truncated_fraction": 1.0,
        "rollout/groups_trained": 0,
        "rollout/keep_rate": 0.0,
        "reward/accuracy": 0.1,
    }
    cut |= {"rollout/groups_all_correct": 0, "rollout/groups_all_wrong": 10}
    config = options(overlong__mode=mode)
    live = LiveRules(config)
    said = [
        case
        for step in range(1, steps + 1)
        for case in live.add({"step": step, **HEALTHY, **cut})[0]
    ]
    assert "truncation" in names(said)
    assert "too_hard" not in names(said)


def test_the_first_evaluation_of_a_graded_reward_is_no_accuracy():
    history = MetricHistory()
    scores = {
        "accuracy": 1.8,
        "score_mean": 1.8,
        "low": 1.2,
        "high": 2.4,
        "truncated_fraction": 0.9,
    }
    history.add({"step": 0} | {f"eval/held/{name}": value for name, value in scores.items()})
    (case,) = active_findings(history, options())
    assert case.cause.endswith("they are judged before they have answered")


def test_an_evaluation_whose_scores_do_not_vary_counts_although_it_has_no_interval():
    history = MetricHistory()
    for step, score in ((0, 0.5), (4, 0.75)):
        scores = {"accuracy": score, "score_mean": score, "truncated_fraction": 0.1}
        record = {f"eval/held/{name}": value for name, value in scores.items()}
        # a source has an accuracy alone
        history.add({"step": step, "eval/a/accuracy": 0.0} | record)
    assert history.evaluations == 2
    assert history.gain == 0.25
    assert history.last_evaluation is not None
    assert math.isnan(history.last_evaluation.high)
    assert history.last_evaluation.is_score


def test_an_evaluation_without_a_verdict_is_not_counted():
    history = MetricHistory()
    history.add({"step": 0, "eval/held/truncated_fraction": 0.0})
    assert history.evaluations == 0


def test_a_gradient_that_is_clipped_like_all_others_is_no_spike():
    assert "gradient_spike" in names(
        spiked({"optim/grad_norm": 90.0}, options(), HEALTHY | {"optim/grad_norm": 0.9})
    )
    usual = HEALTHY | {"optim/grad_norm": 5.0}  # above max_grad_norm
    assert "gradient_spike" not in names(spiked({"optim/grad_norm": 90.0}, options(), usual))


def test_shorter_responses_are_what_is_wanted_where_many_are_cut_off():
    short: dict[str, float | None] = {"rollout/response_tokens_mean": 9.0}
    assert "length_collapse" not in names(
        found(short, early=HEALTHY | {"rollout/truncated_fraction": 0.21})
    )
    (finding,) = [
        each
        for each in found(short | {"rollout/length_preference": -0.03})
        if each.name == "length_collapse"
    ]
    assert "favour the shorter responses" in finding.cause
    (finding,) = [
        each
        for each in found(short | {"rollout/length_preference": -0.01})
        if each.name == "length_collapse"
    ]
    assert "favour" not in finding.cause


@for_each_row(
    ("early_reward", "late_reward", "mode", "change"),
    [
        (0.4, 0.5, "soft", ("overlong.mode=filter",)),  # it has taught to be short
        (0.5, 0.4, "soft", ("overlong.mode=filter",)),
        (0.5, 0.5, "soft", ()),  # no response has reached the buffer
        (0.4, 0.5, "filter", ()),
    ],
)
def test_masking_is_proposed_where_the_soft_punishment_has_cost_reward(
    early_reward: float, late_reward: float, mode: str, change: tuple[str, ...]
):
    scores = {"reward/score_mean": 0.5}
    late = scores | {"rollout/response_tokens_mean": 9.0, "reward/mean": late_reward}
    findings = found(
        late,
        options(overlong__mode=mode),
        early=HEALTHY | scores | {"reward/mean": early_reward},
    )
    (finding,) = [each for each in findings if each.name == "length_collapse"]
    assert finding.change == change


@for_each_row(
    ("accuracy", "changed", "advice"),
    [
        (0.5, {}, "partial credit with"),
        (0.5, {"dynamic_sampling__metric": "score"}, "pay for brevity"),
        (None, {}, "pay for brevity"),
    ],
)
def test_partial_credit_is_advised_only_where_scores_do_not_train_yet(
    accuracy: float | None, changed: dict[str, Any], advice: str
):
    short = {"rollout/response_tokens_mean": 9.0, "reward/accuracy": accuracy}
    findings = found(short, options(**changed))
    (finding,) = [each for each in findings if each.name == "length_collapse"]
    assert advice in finding.advice


def test_length_under_selection_is_judged_by_held_out_accuracy_alone():
    long: dict[str, float | None] = {"rollout/response_tokens_mean": 60.0}
    assert "length_explosion" in names(found(long))
    assert "length_explosion" not in names(found(long, options(dynamic_sampling__predict=True)))


@for_each_row(
    ("changed", "is_error"),
    [
        ({"preset": "dapo"}, True),
        ({"preset": "grpo"}, True),
        ({"preset": "ppo"}, True),
        ({"preset": "rloo"}, True),
        ({"preset": "reinforce_pp"}, True),
        ({"preset": "dr_grpo"}, True),
        ({"preset": "cispo"}, True),  # its one bound is a ratio of 5
        ({"preset": "gspo"}, False),
        ({"loss__surrogate": "gspo"}, False),
        ({"preset": "sapo"}, False),
        ({"loss__clip_low": 0.05, "loss__clip_high": 0.05}, False),
        ({"loss__function": "tests.losses:mine"}, False),
    ],
)
def test_clipped_tokens_count_where_only_a_large_step_reaches_the_bound(
    changed: dict[str, Any], is_error: bool
):
    clipped: dict[str, float | None] = {
        "loss/clip_high_fraction": 0.22,
        "loss/clip_low_fraction": 0.22,
    }
    config = options(**changed)
    assert ("lr_too_high" in names(found(clipped, config))) == is_error
    # the divergence counts in each
    assert "lr_too_high" in names(found({"loss/approx_kl": 0.2}, config))


@pytest.mark.parametrize(("skipped", "severity"), [(0.2, "warning"), (0.3, "error")])
def test_few_skipped_updates_are_a_warning(skipped: float, severity: str):
    (case,) = found({"optim/skipped": skipped})  # per step, of two updates
    assert (case.name, case.severity) == ("skipped_updates", severity)


def test_one_step_that_moves_far_is_no_learning_rate():
    history = MetricHistory()
    for step in range(1, 11):
        history.add({**HEALTHY, "step": step, "loss/approx_kl": 2.0 if step == 8 else 1e-4})
    assert "lr_too_high" not in names(active_findings(history, options()))


def trained(
    *steps: tuple[float, float], held_out: Mapping[int, float] = {}, **changed: Any
) -> list[Finding]:
    """The findings of a run with these entropies and accuracies."""
    history = MetricHistory()
    for step, (entropy, accuracy) in enumerate(steps, start=1):
        record = {**HEALTHY, "step": step, "loss/entropy": entropy, "reward/accuracy": accuracy}
        if step in held_out:
            ends = {"accuracy": held_out[step], "low": 0.0, "high": 1.0}
            record |= {f"eval/held/{name}": value for name, value in ends.items()}
        history.add(record)
    return active_findings(history, options(**changed))


def test_a_certain_policy_is_judged_by_what_accuracy_does():
    start = [(0.5, 0.3)] * FIRST
    certain = (0.02, 0.3)
    (collapse,) = trained(*start, *[certain] * 10)
    assert (collapse.name, collapse.severity) == ("entropy_collapse", "error")
    assert (
        "0.02 nats per token, after 0.5 in the first steps, and reward/accuracy has not risen: 70%"
        in collapse.cause
    )
    assert trained(*start, *[(0.02, 0.7)] * 100) == []  # a plateau of what was learned
    assert trained(*start, *[certain] * 10, held_out={1: 0.2, 12: 0.3}) == []
    assert trained(*start, *[certain] * 10, held_out={1: 0.3, 12: 0.3}) != []
    fallen = trained(*start, *[(0.5, 0.8)] * FALL_STEPS, *[(0.02, 0.39)] * FALL_STEPS)
    assert [each.severity for each in fallen] == ["error"]
    assert "reward/accuracy has halved" in fallen[0].cause
    assert trained(*start, *[(0.5, 0.8)] * FALL_STEPS, *[(0.02, 0.41)] * FALL_STEPS) == []
    assert trained(*[(0.008, 0.3)] * 20) == []  # it was as certain before
    assert trained(*[(0.015, 0.3)] * FIRST, *[(0.008, 0.3)] * 20) == []


def test_a_score_has_no_known_maximum_so_a_certain_policy_that_gains_by_it_is_a_warning():
    early = {"reward/accuracy": None, "reward/score_mean": 0.3}
    late = {"loss/entropy": 0.02}
    for score, severity in ((0.3, "error"), (1.0, "warning")):
        (case,) = found({**late, "reward/score_mean": score}, early=HEALTHY | early)
        assert (case.name, case.severity) == ("entropy_collapse", severity)


def test_selection_keeps_accuracy_near_one_half_so_only_held_out_accuracy_proves_a_collapse():
    steps = [*[(0.5, 0.5)] * FIRST, *[(0.02, 0.5)] * 10]
    selected = {"dynamic_sampling__predict": True}
    assert [each.severity for each in trained(*steps, **selected)] == ["warning"]
    (proved,) = trained(*steps, held_out={1: 0.2, 12: 0.2}, **selected)
    assert proved.severity == "error"
    assert trained(*steps, held_out={1: 0.2, 12: 0.3}, **selected) == []


def test_tools_that_are_called_no_more_are_named_although_no_option_names_them():
    early = HEALTHY | {"rollout/tool_calls": 5}
    (case,) = found({"rollout/tool_calls": 0}, early=early)
    assert (case.name, "no episode calls a tool any more" in case.cause) == ("no_tool_calls", True)
    assert found({"rollout/tool_calls": 0}, early=HEALTHY | {"rollout/tool_calls": 0}) == []


def test_many_answers_are_no_error_under_a_verifier_that_refuses_them():
    hedging: dict[str, float | None] = {"rollout/many_answers_fraction": 0.5}
    assert [each.severity for each in found(hedging, options(reward__verifier="gsm8k"))] == [
        "error"
    ]
    assert finding("many_answers", hedging, reward__verifier="gsm8k").change == (
        "reward.verifier=math",
    )
    for other in ("my_rewards:graded", "code"):  # math is no verifier of that task
        assert finding("many_answers", hedging, reward__verifier=other).change == ()
    (warning,) = found(hedging, options(reward__verifier="math"))
    assert (warning.severity, warning.change) == ("warning", ())


def test_the_first_steps_are_compared_with_none_of_themselves():
    history = MetricHistory()
    for step in range(1, FIRST + WINDOW + 1):
        assert history.first_mean("reward/accuracy") is None
        history.add({**HEALTHY, "step": step, "reward/accuracy": step / 10})
    assert history.first_mean("reward/accuracy") == pytest.approx(0.2)


def test_one_gradient_far_beyond_the_usual_ones_is_named_with_its_step():
    history = MetricHistory()
    for step in range(1, 11):
        history.add({**HEALTHY, "step": step, "optim/grad_norm": 4.0 if step == 8 else 0.3})
    (spike,) = active_findings(history, options())
    assert spike.name == "gradient_spike"
    assert spike.cause.startswith("the gradient of step 8 has the norm 4, 13 times the usual 0.3")
    for step in range(11, 11 + WINDOW):
        history.add({**HEALTHY, "step": step})
    assert active_findings(history, options()) == []  # it is past


@pytest.mark.parametrize(("norm", "is_spike"), [(9.9, False), (10.1, True)])
def test_a_gradient_is_a_spike_from_ten_times_the_usual_one(norm: float, is_spike: bool):
    history = MetricHistory()
    for step in range(1, 11):
        history.add({**HEALTHY, "step": step, "optim/grad_norm": norm * 0.3 if step == 8 else 0.3})
    assert ("gradient_spike" in names(active_findings(history, options()))) == is_spike


def test_one_update_per_step_leaves_clipping_without_effect_and_is_a_note():
    config = options(train__minibatch_groups=4)
    (note,) = found(
        {"loss/approx_kl": 0.0, "loss/clip_high_fraction": 0.0, "loss/clip_low_fraction": 0.0},
        config,
    )
    assert (note.name, note.severity, note.change) == (
        "idle_techniques",
        "note",
        ("train.minibatch_groups=2",),
    )


MOST_KEPT = {
    "rollout/groups_trained": 9,
    "rollout/groups_all_correct": 1,
    "rollout/groups_all_wrong": 0,
}
MOST_KEPT |= {"rollout/keep_rate": 0.9, "rollout/zero_advantage_fraction": 0.0}
BUFFER = {"overlong__buffer_tokens": 10, "rollout__max_response_tokens": 50}
IDLE = {
    "clip-higher": (
        {"loss/clip_high_fraction": 0.0009, "loss/movement": 0.01},
        {"loss/clip_high_fraction": 0.0011},
        {},
    ),
    "dynamic sampling": (
        MOST_KEPT,
        MOST_KEPT | {"rollout/groups_trained": 8, "rollout/groups_all_correct": 2},
        {},
    ),
    "overlong.mode=filter": (
        {"rollout/truncated_fraction": 0.019},
        {"rollout/truncated_fraction": 0.021},
        {"overlong__mode": "filter"},
    ),
    "overlong.mode=soft": (
        {"rollout/truncated_fraction": 0.0, "rollout/response_tokens_max": 40.0},
        {"rollout/truncated_fraction": 0.0, "rollout/response_tokens_max": 41.0},
        BUFFER,
    ),
    "the token-level loss": (
        {"rollout/response_tokens_max": 29.0},
        {"rollout/response_tokens_max": 31.0},
        {"overlong__mode": "off"},
    ),
}


@for_each_row("technique", IDLE)
def test_a_technique_with_nothing_to_act_on_is_idle_which_is_a_note(technique: str):
    idle, acting, changes = IDLE[technique]
    (note,) = found(idle, options(**changes))
    assert (note.name, note.severity, note.change) == ("idle_techniques", "note", ())
    assert note.cause.startswith(f"these techniques have nothing to act on: {technique} (")
    assert ";" not in note.cause
    assert found(acting, options(**changes)) == []


def test_an_idle_clip_is_shown_with_the_movement_that_it_needs():
    (note,) = found(
        {"loss/clip_high_fraction": 0.0, "loss/movement": 0.0123}, options(loss__clip_high=0.28)
    )
    assert (
        "tokens move by 0.012 nats per step (root mean square), and one is stopped from 0.25"
        " nats on" in note.cause
    )


@for_each_row(
    ("late", "changes"),
    [
        # equal bounds: clip-higher is off
        ({"loss/clip_high_fraction": 0.0}, {"loss__clip_high": 0.2}),
        ({"loss/clip_high_fraction": 0.0, "loss/movement": 0.0}, {}),  # no update moved the policy
        ({"loss/clip_high_fraction": math.nan, "loss/movement": math.nan}, {}),
        ({"rollout/truncated_fraction": 0.0, "rollout/response_tokens_max": math.nan}, {**BUFFER}),
        # no longest response: the buffer may be reached
        ({"rollout/truncated_fraction": 0.0}, {**BUFFER}),
    ],
)
def test_a_technique_is_not_called_idle_without_evidence(late, changes):
    assert found(late, options(**changes)) == []


def test_an_unknown_movement_is_left_out_of_the_note():
    (note,) = found({"loss/clip_high_fraction": 0.0, "loss/movement": math.nan})
    assert "(the upper clip stops 0 of the tokens: one is stopped from 0.25 nats on)" in note.cause


NAMES = [
    each.name for each in METRICS if "{" not in each.name and not each.name.startswith("eval/")
]


def test_no_rule_fails_where_a_metric_is_missing_or_not_a_number():
    """In every finding only losses, gradient norms and log-probabilities may be nan: there it is
    the fault.
    """
    others = {each: 5.1 for each in NAMES if each not in HEALTHY} | HEALTHY
    for config, name, value in itertools.product(
        (options(), options(**ASYNC), options(**BUFFER)), NAMES, (None, math.nan)
    ):
        history = MetricHistory()
        for step in range(1, 8):
            record = {"step": step, **others, name: value}
            history.add({each: number for each, number in record.items() if number is not None})
        causes = [each.cause for each in active_findings(history, config)]
        assert name.startswith(MAY_DIVERGE) or not any("nan" in cause for cause in causes), name


def test_all_idle_techniques_are_one_note():
    lengths = {"rollout/response_tokens_max": 21.0, "rollout/truncated_fraction": 0.0}
    (note,) = found(MOST_KEPT | lengths | {"loss/clip_high_fraction": 0.0}, options(**BUFFER))
    assert note.cause.count(";") == 3


@pytest.mark.parametrize(
    "late",
    [
        {"loss/approx_kl": 0.0, "loss/clip_high_fraction": 0.0, "loss/clip_low_fraction": 0.0},
        {
            "rollout/groups_trained": 2,
            "rollout/groups_all_wrong": 5,
            "rollout/zero_advantage_fraction": 1.0,
        },
        {
            "rollout/groups_trained": 2,
            "rollout/groups_all_correct": 5,
            "rollout/zero_advantage_fraction": 1.0,
        },
        {"loss/entropy": 0.02, "reward/accuracy": 0.5},
    ],
)
def test_a_run_whose_rewards_do_not_train_has_no_finding_about_signals(late: Mapping[str, float]):
    of_rewards = options(train__minibatch_groups=4)
    teacher = {"loss__reference__model": "smollm2-135m-instruct"}
    teacher |= {
        "reward__coef": 0,
        "loss__kl_coef": 1,
        "loss__kl_estimator": "full",
        "train__minibatch_groups": 4,
    }
    supervised = {
        "schedule": "supervised",
        "data__demonstrations": "sft.jsonl",
        "train__minibatch_groups": 4,
    }
    assert found(late, of_rewards) != []
    assert found(late, options(**teacher)) == []
    assert found(late, options(**supervised)) == []


SUPERVISED = {"schedule": "supervised", "data__demonstrations": "sft.jsonl"}
IMITATES: Mapping[str, float] = {
    "rollout/epoch": 0,
    "rollout/tokens_generated": 0,
    "rollout/tokens_in_minibatches": 300,
    "loss/nll": 2.0,
    "loss/entropy": 0.5,
    "optim/grad_norm": 0.3,
    "optim/skipped": 0,
    "optim/update_tokens": 300,
    "optim/lr": 1e-6,
    "time/step_s": 10.0,
}
"""A line of a supervised step, which samples no group."""


def test_the_steps_of_a_supervised_run_count_and_its_updates_are_examined():
    config = options(**SUPERVISED)
    assert found({}, config, early=IMITATES) == []
    (skipped,) = found({"optim/skipped": 1}, config, early=IMITATES)
    assert (skipped.name, skipped.steps) == ("skipped_updates", (6, 10))
    history = MetricHistory()
    for step in range(1, 4):
        history.add({"step": step, **IMITATES})
    assert history.steps == 3


def test_a_supervised_policy_may_grow_as_varied_as_examples_that_it_fits_better():
    config = options(**SUPERVISED)
    (case,) = found({"loss/entropy": 1.5, "loss/nll": 2.5}, config, early=IMITATES)
    assert case.name == "entropy_explosion"
    assert found({"loss/entropy": 1.5, "loss/nll": 1.5}, config, early=IMITATES) == []


def test_the_newest_evaluation_of_a_supervised_run_is_not_called_the_first():
    cut = {f"eval/held/{name}": value for name, value in EVALUATED_CUT.items()}
    (case,) = found(cut, options(**SUPERVISED), early=IMITATES)
    assert case.cause.startswith("90.0% of the responses of the last evaluation end at the limit")
    history = MetricHistory()
    history.add({"step": 0} | cut)
    (case,) = active_findings(history, options(**SUPERVISED))
    assert case.cause.startswith("90.0% of the responses of the first evaluation end at the limit")


EVALUATED_CUT = {"accuracy": 0.1, "low": 0.0, "high": 0.3, "truncated_fraction": 0.9}


def test_a_corrected_engine_may_differ():
    assert (
        found({"rollout/engine_logprob_gap_mean": 0.5}, options(loss__engine_correction="tis"))
        == []
    )


def evaluated(
    *accuracies: float,
    training: tuple[float, float] = (0.4, 0.6),
    truncated: float = 0.0,
    **changed: Any,
) -> list[Finding]:
    """Findings of a run with an evaluation of these accuracies every other step, each with an
    interval of +-.05.
    """
    history = MetricHistory()
    steps = range(2 * len(accuracies))
    for step in steps:
        record = (
            {**HEALTHY, "reward/accuracy": training[0] if step <= FIRST else training[1]}
            if step
            else {}
        )
        if step % 2 == 0:
            value = accuracies[step // 2]
            ends = {
                "accuracy": value,
                "low": value - 0.05,
                "high": value + 0.05,
                "truncated_fraction": truncated * step,
            }
            record |= {f"eval/held/{name}": number for name, number in ends.items()}
        history.add({**record, "step": step})
    return active_findings(history, options(**changed))


def test_held_out_accuracy_that_falls_while_training_rises_is_overfitting():
    (overfit,) = evaluated(0.5, 0.7, 0.6, 0.5, 0.4)
    assert overfit.name == "overfit"
    assert "from 70.0% at step 2 to 40.0% at 8" in overfit.cause
    # typed after dapo resume, so no option that ends the run before its own step
    assert overfit.change == ("loss.kl_coef=0.001",)
    assert overfit.advice.startswith("go back to step 2: dapo fork RUN_DIR --step 2 while ")
    assert "dapo export RUN_DIR my-model --step 2 once it holds only weights" in overfit.advice
    (of_the_first,) = evaluated(0.7, 0.6, 0.6, 0.5, 0.4)
    assert of_the_first.advice.startswith("the model before training is the best: ")
    (stronger,) = evaluated(0.5, 0.7, 0.6, 0.5, 0.4, loss__kl_coef=0.002)
    assert stronger.change == ("loss.kl_coef=0.02",)
    (cut,) = evaluated(0.5, 0.7, 0.6, 0.5, 0.4, truncated=0.03)  # 24 % at the end
    assert "24% of its responses end at the limit of 20480 tokens, after 6%" in cut.cause
    assert cut.change == ("eval.max_response_tokens=40960",)
    assert evaluated(0.5, 0.7, 0.65, 0.65, 0.65) == []  # within the intervals
    # training falls as well, or stays
    assert evaluated(0.5, 0.7, 0.6, 0.5, 0.4, training=(0.5, 0.5)) == []


def audited(*fractions: float, problems: int = 16, **judges: str) -> list[Finding]:
    """Findings of a run whose reward accepts what the audit refuses, in these fractions of a step's
    problems.
    """
    history = MetricHistory()
    for step, fraction in enumerate(fractions, start=1):
        wrong = round(abs(fraction) * problems)
        history.add(
            HEALTHY
            | audit_metrics([float(np.sign(fraction))] * wrong + [0.0] * (problems - wrong), step)
        )
    config = options(**(judges or {"audit__verifier": "math"}))
    return loadable(active_findings(history, config), config)


def audit_metrics(gaps: Sequence[float], step: int = 1) -> dict[str, float]:
    low, high = difference_interval(gaps) or (math.nan, math.nan)
    gap = {"audit/gap": fmean(gaps), "audit/gap_low": low, "audit/gap_high": high}
    return gap | {"step": step, "audit/problems": len(gaps), "audit/mean": 0.2}


def test_the_audits_verifier_is_proposed_with_its_options():
    letters = {"audit__verifier": "{choice: {letters: ABCD}}"}
    (gap,) = audited(*[0.5] * 8, **letters)
    assert shlex.split(gap.change[0]) == [
        "reward.verifier=choice",
        'reward.options={"letters":"ABCD"}',
        "audit.verifier=null",
    ]
    (gap,) = audited(
        *[0.5] * 8,
        reward__verifier="exact",
        reward__options="{extract: final}",
        audit__verifier="math",
    )
    assert "reward.options={}" in shlex.split(gap.change[0])
    # a name that a shell must quote
    (gap,) = audited(*[0.5] * 8, audit__verifier="prüfung:score")
    assert shlex.split(gap.change[0]) == ["reward.verifier=prüfung:score", "audit.verifier=null"]


def test_a_gap_to_the_audit_is_a_finding_where_chance_does_not_explain_it():
    (gap,) = audited(*[0.5, 0.375] * 4)
    assert (gap.name, gap.severity, gap.change) == (
        "audit_gap",
        "error",
        ("reward.verifier=math audit.verifier=null",),
    )
    assert (
        "0.425 above the audit's on the same responses; a gap of at most 0.1 would look like this"
        in gap.cause
    )
    assert audited(*[0.25] * 5, problems=4) == []  # five equal means are no proof
    assert audited(*[0.1] * 1000, problems=500) == []
    assert audited(*[0.5] * 40, *[0.0] * WINDOW) == []  # it is past, whatever the evidence was
    assert len(audited(*[0.0] * 500, *[0.5] * 20)) == 1  # it begins late
    assert len(audited(*[1.0, 0.0] * 30, problems=1)) == 1
    assert audited(*[1.0, -1.0] * 100) == []  # two verifiers that disagree, and neither pays more


@for_each_row(["shares", "problems"], itertools.product([(0.1, 0), (0.5, 0.4)], [1, 64]))
def test_a_gap_of_honest_verifiers_is_an_error_in_few_runs_however_they_disagree(
    shares: tuple[float, float], problems: int
):
    assert_few_errors(*shares, problems)


@pytest.mark.nightly
@for_each_row(
    ["shares", "problems"],
    itertools.product([(0.1, 0), (0.2, 0.1), (0.3, 0.2), (0.5, 0.4)], [1, 8, 64]),
)
def test_a_gap_of_honest_verifiers_is_an_error_in_few_runs_at_all_of_these_shares(
    shares: tuple[float, float], problems: int
):
    assert_few_errors(*shares, problems)


def assert_few_errors(more: float, less: float, problems: int) -> None:
    """At a mean of 0.1, the largest that is allowed, at most 1 run in 20, of 200 steps, has an
    error at any of them.
    """
    draw = np.random.default_rng(7)
    gaps = draw.choice([1, -1, 0], p=[more, less, 1 - more - less], size=(100, 200, problems))
    assert sum(has_alarm(run) for run in gaps) <= 5


def test_a_gap_is_found_though_the_verifiers_disagree_both_ways():
    draw = np.random.default_rng(8)
    for more, less in ((0.3, 0), (0.6, 0.3)):
        gaps = draw.choice([1, -1, 0], p=[more, less, 1 - more - less], size=(20, 40, 16))
        assert sum(has_alarm(run) for run in gaps) == 20


def has_alarm(gaps: Any) -> bool:
    test = MeanTest(AUDIT_GAP)
    for step in gaps:
        test.add(float(step.mean()), num_problems=len(step), variance=float(step.var()))
        if test.wealth >= AUDIT_EVIDENCE:
            return True
    return False


def test_no_value_multiplies_wealth_by_more_than_a_fair_bet():
    """A player with stake s gets at most 1 + s (x - m), whose expectation is at most 1 at a mean of
    at most m.
    """
    values = np.linspace(-1, 1, 201)
    for x in values:
        before = MeanTest(AUDIT_GAP)
        test = MeanTest(AUDIT_GAP)
        test.add(float(x))
        fair = fmean(1 + stake * (x - AUDIT_GAP) for stake in STAKES)
        assert before.wealth == 0 < test.wealth <= fair / 2 * (1 + 1e-12)


def test_the_test_of_the_gap_reads_the_variance_of_a_steps_problems_from_its_interval():
    gaps = [1.0] * 5 + [-1.0] * 2 + [0.0] * 9
    history = MetricHistory()
    without = MetricHistory()
    test = MeanTest(AUDIT_GAP)
    history.add(HEALTHY | audit_metrics(gaps))
    test.add(fmean(gaps), num_problems=16, variance=float(np.var(gaps)))
    assert history.audit.wealth == pytest.approx(test.wealth)
    without.add(
        {
            name: value
            for name, value in (HEALTHY | audit_metrics(gaps)).items()
            if "gap_" not in name
        }
    )
    one = MeanTest(AUDIT_GAP)
    one.add(fmean(gaps))
    assert without.audit.wealth == one.wealth  # an unknown variance: as one problem


def test_truncation_is_named_before_the_first_step_where_an_evaluation_shows_it():
    history = MetricHistory()
    metrics = {"accuracy": 0.1, "low": 0.0, "high": 0.2, "truncated_fraction": 0.6}
    history.add({"step": 0} | {f"eval/held/{name}": value for name, value in metrics.items()})
    (truncated,) = active_findings(history, options())
    assert truncated.cause.startswith(
        "60.0% of the responses of the first evaluation end at the limit of 20480 tokens"
    )


def test_every_option_that_a_finding_names_can_be_set_on_the_command_line():
    for _, beyond, _, changed in FAULTS:
        for each in found(beyond, options(**changed)):
            for change in each.change:
                name, _, value = change.partition("=")
                options(**(changed | {name.replace(".", "__"): value}))


def test_a_warning_comes_once_with_what_to_do_and_a_resumed_run_does_not_repeat_it():
    records: list[dict[str, Any]] = [
        {**HEALTHY, "step": step} | ({"loss/approx_kl": 0.5} if step > 3 else {})
        for step in range(1, 12)
    ]
    whole = LiveRules(options())
    reported = [whole.add(record) for record in records]
    assert [len(new) for new, _ in reported] == [0] * 5 + [1] + [0] * 5
    assert [count for _, count in reported] == [0] * 5 + [1] * 6
    text = reported[5][0][0].one_line()
    assert text.startswith("each step moves the policy too far: 0.5 nats per token")
    assert text.endswith("; try optim.lr=1e-07")
    resumed = LiveRules(options(), records[:6])
    assert [resumed.add(record) for record in records[6:]] == reported[6:]


def test_notes_are_no_warnings():
    watch = LiveRules(options(train__minibatch_groups=4))
    assert watch.add({**HEALTHY, "step": 1}) == ([], 0)


def test_the_page_explains_every_rule_and_no_other():
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`", page, flags=re.MULTILINE) == [rule.name for rule in RULES]
