"""The shipped configurations: every one parses, and `dapo_32b` holds the paper's numbers."""

from pathlib import Path

import pytest

from dapo.analysis.check.summary import differences_from_paper, explain, ignored_options
from dapo.config import dump_config, load_config
from dapo.config.data_spec import parse_spec
from helpers.paths import CONFIGS
from helpers.shipped_configs import SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_parses_and_sets_nothing_in_vain(name: str, tmp_path: Path):
    config = SHIPPED[name]
    parse_spec(config.data.train_source)
    assert not [line for line in ignored_options(config) if "log." in line or "eval" in line]
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    unit = "demonstrations" if config.is_supervised else "prompts"
    assert any(unit in line for line in explain(config))


def test_all_four_configs_are_shipped():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= {
        "quickstart",
        "tiny",
        "gsm8k_0.5b",
        "dapo_32b",
    }


def test_dapo_32b_holds_the_papers_numbers():
    config = load_config(CONFIGS / "dapo_32b.yaml")
    assert list(differences_from_paper(config)) == []
    # arXiv 2503.14476, section 4.1, typed from the paper
    assert config.model.name == "Qwen/Qwen2.5-32B"
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (512, 16)
    # "mini-batch 512", in responses
    assert config.train.minibatch_groups * config.rollout.group_size == 512
    assert config.updates_per_step == 16
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.28)
    assert (config.optim.lr, config.optim.warmup_steps, config.optim.weight_decay) == (
        1e-6,
        20,
        0.1,
    )
    assert config.rollout.max_response_tokens == 16384 + 4096
    assert config.overlong.buffer_tokens == 4096
    assert config.rollout.temperature == 1.0
    assert (config.eval.samples_per_problem, config.eval.temperature, config.eval.top_p) == (
        32,
        1.0,
        0.7,
    )
    assert (config.loss.kl_coef, config.loss.aggregate, config.advantage.scale) == (
        0.0,
        "token",
        "std",
    )


def test_differences_from_the_paper_are_reported_with_both_numbers():
    config = load_config(CONFIGS / "dapo_32b.yaml", ["loss.clip_high=0.2", "overlong.mode=off"])
    assert list(differences_from_paper(config)) == [
        "overlong.mode: off (paper: soft)",
        "loss.clip_high: 0.2 (paper: 0.28)",
    ]
    assert list(ignored_options(config)) == [
        "overlong.buffer_tokens: overlong.mode is off",
        "overlong.penalty: overlong.mode is off",
    ]
