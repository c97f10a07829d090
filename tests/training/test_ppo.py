"""PPO as a run: advantages of a batch, a critic that learns, and a run that is killed and resumed
to the byte.
"""

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import dapo
from conformance import naive
from dapo.analysis.check.estimate import HardwareProfile, ResourceEstimate, hardware_profile_for
from dapo.analysis.check.report import describe_estimate
from dapo.analysis.check.summary import differences_from_paper, explain
from dapo.analysis.explain import explain_group
from dapo.cli.train import resume_run, start_run
from dapo.core.errors import ConfigError
from dapo.sampling.samples import with_advantages
from dapo.start.ignored_options import ignored_options
from dapo.training.updates import critic_metrics, with_token_advantages
from dapo.types import Generation, Group, Problem, Sample, Verdict
from helpers.async_runs import ONE_STEP_OFF, resumed_from, run_or_resume
from helpers.finished_runs import cut_copy
from helpers.fork_server import ForkServer
from helpers.model_sizes import sizes_of
from helpers.tiny_runs import CONFIGS, contents, differences, metrics, tiny

PPO = ("preset=ppo", "critic.lr=0.01", "train.eval_every=0", "data.eval=null")


class KnownValues:
    """A critic whose values are given."""

    def __init__(self, rows: Sequence[Sequence[float]], kl: Sequence[Sequence[float]] = ()) -> None:
        self._rows = rows
        self._kl = kl

    def values(self, samples: Sequence[Sample]) -> list[Sequence[float]]:
        return list(self._rows)

    def token_kl(self, samples: Sequence[Sample], *, step: int) -> list[Sequence[float]]:
        return list(self._kl)


def group(position: int, *responses: tuple[int, float]) -> Group:
    """From lengths and rewards."""
    generations = tuple(
        Generation("r", (5,) * n, (-1.0,) * n, "length" if n == 8 else "stop", 0)
        for n, _ in responses
    )
    rewards = tuple(reward for _, reward in responses)
    verdicts = tuple(Verdict(reward > 0, reward) for reward in rewards)
    return Group(
        Problem("p", "?", "!"), (1, 2), generations, verdicts, id=position, rewards=rewards
    )


@pytest.mark.parametrize(("lam", "kl_coef"), [(1.0, 0.0), (0.9, 0.0), (0.9, 0.3)])
def test_advantages_and_targets_of_a_batch_equal_a_naive_double_loop(
    lam: float, kl_coef: float
) -> None:
    options = (f"critic.gae_lambda={lam}", f"loss.kl_coef={kl_coef}", "loss.kl_in=reward")
    config = tiny("preset=ppo", "overlong.mode=filter", *options)
    groups = [group(0, (3, 1.0), (8, -1.0)), group(4, (1, -1.0), (5, 1.0), (2, 0.5))]
    samples = with_advantages(groups, config)
    chance = np.random.default_rng(0)
    values = [chance.normal(size=len(sample.response_ids)).tolist() for sample in samples]
    kl = [chance.normal(size=len(sample.response_ids)).tolist() for sample in samples]
    found = with_token_advantages(samples, KnownValues(values, kl), config, step=1)

    rewards = [[-kl_coef * each for each in row] for row in kl]
    for row, sample in zip(rewards, samples, strict=True):
        row[-1] += sample.reward
    advantages, targets = naive.generalized_advantages(rewards, values, 1.0, lam)
    masks = [sample.mask for sample in samples]
    assert sum(map(sum, masks)) == 11  # the truncated response does not train
    whitened = naive.whiten(advantages, masks)
    for sample, before, *rows in zip(found, samples, whitened, targets, values, kl, strict=True):
        expected, aims, row, own_kl = rows
        assert list(sample.token_advantages or ()) == pytest.approx(expected, abs=1e-12)
        assert list(sample.value_targets or ()) == pytest.approx(aims, abs=1e-12)
        assert list(sample.old_values or ()) == list(row)
        assert sample.advantage == pytest.approx(
            sum(expected) / max(1, sum(sample.mask)), abs=1e-12
        )
        if kl_coef:
            assert sample.kl == pytest.approx(sum(own_kl))
            assert sample.reward == pytest.approx(before.reward - kl_coef * sum(own_kl))
        kept = {
            "advantage": 0.0,
            "token_advantages": None,
            "old_values": None,
            "value_targets": None,
        }
        assert replace(sample, **kept, reward=before.reward, kl=None) == before
    assert with_token_advantages([], KnownValues([]), config, step=1) == []


def test_values_that_miss_by_a_constant_explain_everything_and_masked_tokens_count_nowhere() -> (
    None
):
    config = tiny("preset=ppo", "overlong.mode=filter", "loss.kl_coef=0")
    samples = with_advantages([group(0, (3, 1.0), (8, -1.0), (2, -1.0))], config)
    shift = 0.25
    rows = [[sample.reward + shift] * len(sample.response_ids) for sample in samples]
    found = critic_metrics(with_token_advantages(samples, KnownValues(rows), config, step=1))
    assert found["critic/value_mean"] == pytest.approx((3 * 1.25 + 2 * -0.75) / 5)
    assert found["critic/explained_variance"] == pytest.approx(1)
    assert critic_metrics(samples) == {}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps, in the first of which only the critic learns."""
    path = tmp_path_factory.mktemp("ppo") / "run"
    options = ("train.num_steps=12", "train.keep_checkpoints=9", "critic.pretrain_steps=1")
    start_run(tiny(*PPO, *options), run_dir=path, config_name="t")
    return path


def test_ppo_learns_its_critic_follows_and_every_group_trains(learned: Path) -> None:
    rows = metrics(learned)
    for name in ("rollout/groups_generated", "rollout/groups_trained"):
        assert [row[name] for row in rows] == [4] * 12
    accuracy = [row["reward/accuracy"] for row in rows]
    assert np.mean(accuracy[-3:]) > np.mean(accuracy[:3]) + 0.2
    # the policy leaves its reference
    assert abs(rows[0]["reward/kl_mean"]) < 1e-6 < abs(rows[-1]["reward/kl_mean"])
    assert not [name for row in rows for name in row if name == "loss/kl"]
    assert rows[0]["critic/value_mean"] == 0
    assert rows[0]["critic/explained_variance"] == 0
    assert max(row["critic/value_mean"] for row in rows) > 0.7
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"] / 2
    assert all(row.get("critic/explained_variance", 0) <= 1 for row in rows)
    assert {row["critic/skipped"] for row in rows} == {0}
    assert all(
        0 <= row["critic/clip_fraction"] <= 1 and row["critic/grad_norm"] > 0 for row in rows
    )
    assert (
        [row["optim/lr"] > 0 for row in rows]
        == ["loss/entropy" in row for row in rows]
        == [False] + [True] * 11
    )


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp"])
def test_one_response_to_a_prompt_trains_where_the_baseline_is_not_that_of_its_group(
    preset: str, tmp_path: Path
) -> None:
    options = [f"preset={preset}", "rollout.group_size=1", "train.num_steps=2", "overlong.mode=off"]
    start_run(tiny(*options), run_dir=tmp_path / "alone", config_name="t")
    rows = metrics(tmp_path / "alone")
    trained = [row for row in rows if "loss/policy" in row]
    assert [row["rollout/groups_trained"] for row in trained] == [4, 4]
    assert all(row["optim/grad_norm"] > 0 for row in trained)


@pytest.mark.parametrize(
    "more", [["dynamic_sampling.enabled=true"], ["advantage.estimator=reinforce_pp_baseline"]]
)
def test_one_response_to_a_prompt_is_refused_where_it_is_compared_with_its_group(
    more: list[str],
) -> None:
    with pytest.raises(ConfigError, match=r"group_size must be at least 2 to compare"):
        tiny("preset=reinforce_pp", "rollout.group_size=1", *more)


def test_an_explained_run_of_ppo_has_no_formula_and_an_export_has_the_policy_alone(
    learned: Path, tmp_path: Path
) -> None:
    explained = explain_group(learned, 2)
    assert explained["eq9"] is None
    assert any(
        "with the value of a critic, which is not stored" in note for note in explained["notes"]
    )
    assert all(response["advantage"] is not None for response in explained["responses"])
    dapo.load(learned).export(tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    saved = load_file(learned / "checkpoints" / "step_000012" / "weights.safetensors")
    assert exported.keys() == saved.keys()


def test_a_session_of_ppo_asks_its_critic_and_trains_it() -> None:
    options = {"prompts_per_step": 2, "group_size": 4, "max_response_tokens": 8, "critic.lr": 0.01}
    with dapo.session("tiny-random", preset="ppo", **options) as session:
        batch = session.collect("builtin:sums", "dapo.rewards.examples:has_digit")
        assert {value for sample in batch.samples for value in sample.old_values or (1,)} == {0.0}
        first = session.update(batch)
        again = session.collect("builtin:sums", "dapo.rewards.examples:has_digit")
        own = again.with_advantages(lambda rewards: [reward - 1 for reward in rewards])
        assert {sample.token_advantages for sample in own.samples} == {None}
        second = session.update(own)
    assert first["critic/value_mean"] == 0 != second["critic/value_mean"]
    assert second["critic/loss"] > 0


def test_a_resumed_run_of_ppo_equals_the_uninterrupted_one_to_the_byte(
    learned: Path, tmp_path: Path
) -> None:
    cut = cut_copy(learned, tmp_path / "cut", step=8)
    resume_run(cut, [])
    found = contents(cut)
    assert differences(found, contents(learned)) == []
    assert sum(name.endswith("critic/exp_avg.safetensors") for name in found["files"]) == 6


def test_ppo_killed_in_the_middle_of_updates_and_of_saving_ends_as_if_nothing_had_happened(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    options = [
        *PPO,
        "train.threads=1",
        "train.num_steps=2",
        "train.save_every=1",
        "train.minibatch_groups=2",
    ]

    def start_or_resume(run: Path, **moment: object) -> tuple[int, dict[str, int]]:
        begin = ["train", str(CONFIGS / "tiny.yaml"), *options, "--run-dir", str(run)]
        arguments = ["resume", str(run)] if (run / "config.yaml").exists() else begin
        return fork_server.run(*arguments, output=run.with_name(f"{run.name}.log"), **moment)

    code, calls = start_or_resume(tmp_path / "whole", count=True)
    assert code == 0, (tmp_path / "whole.log").read_text()
    expected = contents(tmp_path / "whole")
    run = tmp_path / "killed"
    for area, share in (("update", 0.5), ("saving", 0.4)):
        moment = {"area": area, "calls": int(share * calls[area]), "signals": [(0, signal.SIGKILL)]}
        code, _ = start_or_resume(run, **moment)
        assert code == -signal.SIGKILL, (tmp_path / "killed.log").read_text()
    assert start_or_resume(run)[0] == 0
    assert differences(contents(run), expected) == []


def test_ppo_one_step_off_resumes_to_the_byte(tmp_path: Path) -> None:
    options = [
        *ONE_STEP_OFF,
        *PPO,
        "train.num_steps=3",
        "train.save_every=1",
        "train.keep_checkpoints=9",
    ]
    run_or_resume(tmp_path / "whole", tiny(*options))
    rows = metrics(tmp_path / "whole")
    assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 1]
    assert all("critic/explained_variance" in row for row in rows)
    resumed_from(tmp_path / "whole", tmp_path / "cut", step=1)
    assert differences(contents(tmp_path / "cut"), contents(tmp_path / "whole")) == []


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        tiny("preset=ppo", *overrides)
    return str(caught.value)


def test_what_cannot_have_a_critic_is_refused_in_one_sentence() -> None:
    assert "trains its critic in the process that trains the policy" in refusal(
        "distributed.trainer_ranks=2"
    )
    assert "trains its critic in the process that trains the policy" in refusal("launcher=ray")
    assert "which model.lora avoids" in refusal("model.lora={rank: 4}")
    text = refusal("critic.pretrain_steps=5")
    assert (
        "critic.pretrain_steps=5 leaves none of train.num_steps=5 steps to train the policy" in text
    )
    # without effect, and said so below
    assert tiny("critic.pretrain_steps=5").critic.pretrain_steps == 5


def test_the_check_names_the_departure_and_what_has_no_effect() -> None:
    config = tiny("preset=ppo", "critic.pretrain_steps=2")
    differing = list(differences_from_paper(config))
    assert "advantage.estimator: gae (paper: group)" in differing
    assert "loss.kl_in: reward (paper: loss)" in differing
    assert (config.loss.kl_coef, config.loss.kl_estimator, config.loss.aggregate) == (
        0.001,
        "k1",
        "token",
    )
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.2)
    assert not config.dynamic_sampling.enabled
    assert "advantage.scale: advantage.estimator is gae" in ignored_options(
        tiny("preset=ppo", "advantage.scale=none")
    )
    assert list(ignored_options(tiny("critic.lr=0.1"))) == [
        "critic.*: advantage.estimator is group"
    ]
    (line,) = [line for line in explain(config) if "critic" in line and "GAE" in line]
    assert "learning rate 1e-05; alone in the first 2 steps" in line
    assert not [line for line in explain(tiny()) if "critic" in line]


def estimate(dimensions: str, *overrides: str) -> ResourceEstimate:
    config = tiny(
        "model.dtype=bfloat16", "train.microbatch_tokens=8192", "train.recompute=false", *overrides
    )
    return ResourceEstimate(
        config, sizes_of(dimensions), hardware_profile_for(config.changed("train", device="cuda"))
    )


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b"])
def test_the_estimate_counts_the_critic_in_memory_and_checkpoints(name: str) -> None:
    without = estimate(name)
    having = estimate(name, "preset=ppo", "loss.kl_coef=0")
    dimensions = having.dimensions
    head = 0 if dimensions.tied else dimensions.vocabulary * dimensions.hidden
    parameters = dimensions.parameters - head + dimensions.hidden + 1
    added = sum(having.memory.state().values()) - sum(without.memory.state().values())
    # rounded weights of 2 bytes; master weights, gradients and two moments of 4
    assert added == (2 + 4 * 4) * parameters
    assert having.checkpoint_copy_bytes() - without.checkpoint_copy_bytes() == 3 * 4 * parameters
    assert "the critic: weights, gradients, moments" in "\n".join(
        describe_estimate(tiny("preset=ppo"), HardwareProfile())
    )


def test_the_estimate_s_number_of_parameters_is_that_of_the_checkpoint(learned: Path) -> None:
    folder = learned / "checkpoints/step_000012/critic"
    saved = sum(tensor.numel() for tensor in load_file(folder / "weights.safetensors").values())
    assert saved == estimate("tiny-random", "preset=ppo").memory.critic_parameters
    assert json.loads((folder / "policy.json").read_text())["num_updates"] == 24
