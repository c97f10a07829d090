"""The part `distillation`: the same responses with and without a teacher, of which each trains."""

from typing import Any

import pytest

from benchmarks import bench, distillation
from benchmarks.compare import CONFIG, Work
from benchmarks.reward import half_of_the_problems
from dapo.config import load_config
from helpers.paths import ROOT

WORK = Work(**distillation.SHAPE)


@pytest.mark.parametrize(
    ("chosen", "coef"), [(distillation.TEACHER, 0), (distillation.NO_TEACHER, 1)]
)
def test_each_prompt_has_one_response_and_one_update_trains_all(
    chosen: tuple[str, ...], coef: float, tmp_path
) -> None:
    class Session:
        settings = bench.Settings()
        folder = tmp_path

        def start(self, *_: Any) -> None: ...

        def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"rows": [{"id": "1", "prompt": "1 + 1 = ?", "answer": "2"}] * WORK.prompts}

    config = load_config(ROOT / CONFIG, [*distillation.shared_options(Session(), WORK), *chosen])
    assert (
        config.rollout.prompts_per_step,
        config.rollout.group_size,
        config.train.minibatch_groups,
    ) == (32, 1, 32)
    assert config.reward.coef == coef
    assert (config.loss.kl_coef > 0) == (coef == 0)
    assert not config.dynamic_sampling.enabled


def test_about_half_of_the_problems_are_right_whatever_the_responses_are() -> None:
    prompts = [f"What is {a} + {b}?" for a in range(20) for b in range(20)]
    rewards = half_of_the_problems(["x"] * len(prompts), prompts)
    assert set(rewards) == {1.0, -1.0}
    assert abs(sum(rewards)) < 0.15 * len(prompts)


def test_figures_are_tokens_a_second_of_updates_and_steps() -> None:
    step = {"trained_tokens": 1536, "update_s": 4.0, "step_s": 8.0}
    found = distillation.figures([{"ours": step}], {"ours": 3.0})
    assert [(figure["name"], figure["values"]) for figure in found] == [
        ("update with a teacher", [384.0]),
        ("step with a teacher", [192.0]),
        ("peak memory with a teacher", [3.0]),
    ]
