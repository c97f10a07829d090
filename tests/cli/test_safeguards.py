"""Differences from the paper: each option that could be one says the paper's value, or is on the
page of safeguards.
"""

import re

import pytest

from dapo.analysis.check.summary import differences_from_paper
from dapo.config import Config, build_config, load_config
from dapo.config.engines import ENGINES
from dapo.config.option_fields import known_about, options_of, section_in
from dapo.core.errors import ConfigError
from dapo.sampling.batch import sampling_plan
from helpers.paths import ROOT, TINY

PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
SAFEGUARDS = PAGE[PAGE.index("## Safeguards") : PAGE.index("## Paper values")]
ROWS = [line for line in SAFEGUARDS.splitlines() if line.startswith("| ")][1:]

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
    "train.epochs",
    "optim.warmup_ratio",  # another way to write optim.warmup_steps
    # parts of an option whose default is the paper's
    *("model.lora.rank", "model.lora.alpha"),
    *("loss.reference.model", "loss.reference.every"),
    *("loss.reference.server.url", "loss.reference.server.model"),
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
    "data.order",  # by default problems are shuffled
    *("critic.lr", "critic.gae_lambda", "critic.pretrain_steps"),
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
    *("rollout.engine", "rollout.engines", "rollout.clock", "rollout.options"),
    *("distributed.trainer_ranks", "distributed.gpus_per_process"),
    "dynamic_sampling.oversampling",  # the trained groups are the same
    # beyond them there is no verdict: a safeguard
    *("reward.workers", "reward.timeout_s", "reward.memory_gib"),
    # how an agent is reached: it is sampled as the run samples
    *("environment.command", "environment.foreign_sampling", "environment.listen"),
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
    unexplained = {
        name
        for name, info in options.items()
        if "paper" not in known_about(info) and f"`{name}`" not in "\n".join(ROWS)
    }
    assert unexplained - NO_DIFFERENCE == set(), (
        "give the option its paper= value, or a row of docs/paper.md, Safeguards"
    )
    assert NO_DIFFERENCE - unexplained == set(), "no such option, or it has a paper's value"


def test_defaults_that_are_not_the_papers_are_named_on_its_page():
    lines = list(differences_from_paper(default()))
    assert lines == [
        "loss.max_approx_kl: 10 (paper: none)",
        "eval.samples_per_problem: 1 (paper: 32)",
    ]
    assert all(f"`{line.split(':')[0]}`" in PAGE for line in lines)


def test_each_safeguard_has_a_test_and_names_its_option_or_its_constant():
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src" / "dapo").rglob("*.py")
    )
    options = {name for name, _ in options_of()}
    assert len(ROWS) == 8
    for row in ROWS:
        assert "::test_" in row
        named = options & set(re.findall(r"`([a-z_]+\.[a-z_]+)`", row))
        constants = re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", row)
        assert named or constants, row
        assert all(
            re.search(rf"^{constant} = ", source, flags=re.MULTILINE) for constant in constants
        ), row


def test_a_least_response_length_is_no_option_and_no_run_asks_for_one():
    with pytest.raises(ConfigError, match=r"unknown option rollout\.min_response_tokens"):
        load_config(TINY, ["rollout.min_response_tokens=3"])
    assert sampling_plan(load_config(TINY).rollout, (2,), seed=0).min_response_tokens == 0
