"""Differences from the paper: each option that could be one says the paper's value, and each
safeguard is named.
"""

import re

import pytest

from dapo.cli.check.summary import differences_from_paper, explain, safeguards
from dapo.config import Config, build_config, load_config
from dapo.config.engines import ENGINES
from dapo.config.option_fields import known_about, options_of, section_in
from dapo.core.errors import ConfigError
from dapo.training.rollout import sampling_plan
from helpers.paths import ROOT, TINY

PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")

NO_DIFFERENCE = {
    # what is trained on what, which the paper leaves to the user
    *(
        "preset",
        "model.name",
        "data.train",
        "data.chat_template_kwargs",
        "data.eval",
        "data.demonstrations",
        "data.instruction",
        "data.system",
        "data.chat_template",
    ),
    *(
        "reward.verifier",
        "reward.options",
        "train.num_steps",
        "train.seed",
        "model.trust_remote_code",
    ),
    "train.token_budget",
    # parts of an option whose default is the paper's
    *("model.lora.rank", "model.lora.alpha"),
    # parts of `environment.name`: without an environment they change nothing
    *(
        "environment.options",
        "environment.tools",
        "environment.max_turns",
        "environment.max_turn_tokens",
    ),
    *(
        "environment.max_observation_tokens",
        "environment.history",
        "environment.credit",
        "environment.timeout_s",
    ),
    *("environment.workers", "environment.lag_polls"),
    "max_staleness",  # a part of `schedule: async`
    *("critic.lr", "critic.gae_lambda", "critic.pretrain_steps"),
    *("dynamic_sampling.filter.min_spread", "dynamic_sampling.filter.mean_between"),
    *("loss.engine_ratio", "loss.engine_over_cap"),
    # where and how fast it runs, and what is computed is the same up to rounding
    *(
        "model.dtype",
        "launcher",
        "train.microbatch_tokens",
        "train.recompute",
        "train.threads",
        "train.device",
    ),
    *("rollout.engine", "rollout.engines", "rollout.clock"),
    *("distributed.trainer_ranks", "distributed.gpus_per_process"),
    # beyond them there is no verdict: a safeguard
    *("reward.workers", "reward.timeout_s", "reward.memory_gib"),
    # what is written and measured
    *("train.save_every", "train.keep_checkpoints", "train.eval_every", "eval.max_response_tokens"),
    *("log.sinks", "log.rollouts", "profile.steps", "audit.share"),
}
"""Options without a value of the paper, whose default changes no update."""
ENGINE_SECTIONS = tuple(f"rollout.{engine}." for engine in ENGINES)
"""The options of one engine: how fast it samples, and what is sampled is the same up to rounding.
"""


def default() -> Config:
    return build_config({"model": "tiny-random", "data": {"train": "builtin:sums"}}, [])


def test_an_option_has_the_papers_value_or_is_a_safeguard_or_changes_no_update():
    options = {
        name: info
        for name, info in options_of()
        if not section_in(info.annotation) and not name.startswith(ENGINE_SECTIONS)
    }
    shown = "\n".join(safeguards(default()))
    unexplained = {
        name
        for name, info in options.items()
        if "paper" not in known_about(info) and f"{name}=" not in shown
    }
    assert unexplained - NO_DIFFERENCE == set(), (
        "give the option its paper= value, or list it as a safeguard"
    )
    assert NO_DIFFERENCE - unexplained == set(), "no such option, or it has a paper's value"


def test_defaults_that_are_not_the_papers_are_named_on_its_page():
    lines = list(differences_from_paper(default()))
    assert lines == [
        "loss.max_approx_kl: 10 (paper: none)",
        "eval.samples_per_problem: 1 (paper: 32)",
    ]
    assert all(f"`{line.split(':')[0]}`" in PAGE for line in lines)


def test_each_safeguard_is_a_row_of_the_paper_page_with_a_test():
    section = PAGE[PAGE.index("## Safeguards") : PAGE.index("## Paper values")]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    # one more than by default
    lines = list(safeguards(default().changed("loss", old_logprobs="engine")))
    assert len(rows) == len(lines)
    assert all("::test_" in row for row in rows)
    for row, line in zip(rows, lines, strict=True):
        named = re.findall(r"[a-z_]+\.[a-z_]+(?==)", line)
        assert all(f"`{name}`" in row for name in named), (row, named)
        assert named or any(
            f"`{constant}`" in row for constant in re.findall(r"[A-Z]+(?:_[A-Z]+)+", row)
        )


def test_safeguards_follow_the_options_and_check_prints_them():
    config = load_config(TINY, ["loss.max_approx_kl=null"])
    lines = list(safeguards(config))
    assert not any("max_approx_kl" in line for line in lines)
    assert any(line.endswith(": a short batch is trained on") for line in lines)
    printed = list(explain(config))
    assert all(f"  - {line}" in printed for line in lines)
    without = list(safeguards(load_config(TINY, ["dynamic_sampling.enabled=false"])))
    assert not any("max_groups_per_step" in line for line in without)


def test_a_least_response_length_is_no_option_and_no_run_asks_for_one():
    with pytest.raises(ConfigError, match=r"unknown option rollout\.min_response_tokens"):
        load_config(TINY, ["rollout.min_response_tokens=3"])
    assert sampling_plan(load_config(TINY).rollout, (2,), seed=0).min_response_tokens == 0
