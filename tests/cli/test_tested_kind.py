"""`dapo test NAME`: whether a name is a reward or an environment."""

from pathlib import Path

import pytest

from dapo.cli.tested_kind import find_kind
from dapo.core.errors import ConfigError
from helpers.run_files import new_run

RUN = "model: tiny-random\ndata: {train: 'builtin:sums'}\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("math", "reward"),
        ("environment", "reward"),
        ("helpers.reward_functions:needs_solution", "reward"),
        ("calculator", "environment"),
        ("textarena:Wordle-v0", "environment"),
        ("agent:module:function", "environment"),
        ("helpers.environments:Echo", "environment"),
        ("helpers.environments:Forgetful", "environment"),
    ],
)
def test_the_kind_is_found_from_the_name(name: str, kind: str):
    assert find_kind(name) == kind


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("reward: {verifier: math}\n", "reward"),
        ("environment: calculator\n", "environment"),
        ("environment: calculator\nreward: {verifier: environment}\n", "environment"),
        ("environment: {tools: ['math:sqrt']}\nreward: {verifier: math}\n", "reward"),
        ("environment: {command: [node, my_agent.js]}\n", "environment"),
    ],
)
def test_a_run_is_tested_for_what_rewards_it(tmp_path: Path, options: str, kind: str):
    run = new_run(tmp_path / "run")
    run.config.write_text(RUN + options)
    assert find_kind(str(run.path)) == kind


def test_a_run_with_an_environment_and_a_verifier_needs_a_flag(tmp_path: Path):
    run = new_run(tmp_path / "run")
    run.config.write_text(f"{RUN}environment: calculator\nreward: {{verifier: math}}\n")
    with pytest.raises(ConfigError, match="choose with --environment or --reward"):
        find_kind(str(run.path))
    assert find_kind(str(run.path), is_reward=True) == "reward"
    assert find_kind(str(run.path), is_environment=True) == "environment"
