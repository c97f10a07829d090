"""Runs with the divergence in the reward, a reference that moves, an entropy target: what trains,
and exact resume.
"""

from pathlib import Path

import pytest

import dapo
from dapo.algo.entropy import DELTA
from dapo.cli.train import resume_run, start_run
from dapo.policy.policy import Policy
from dapo.training.train import train
from helpers.finished_runs import cut_copy
from helpers.paths import CONFIGS
from helpers.tiny_runs import contents, metrics, new_run, tiny

EVERYTHING = (
    "preset=rloo",
    "loss.kl_coef=0.5",
    "loss.reference.every=2",
    "loss.entropy_target=99",
    "train.num_steps=4",
    "train.save_every=1",
    "train.keep_checkpoints=9",
    "train.eval_every=0",
    "optim.lr=0.01",
)


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_byte(tmp_path: Path) -> None:
    start_run(tiny(*EVERYTHING), run_dir=tmp_path / "whole", config_name="t")
    expected = contents(tmp_path / "whole")
    rows = [row for row in metrics(tmp_path / "whole") if row["step"]]
    kl = [row["reward/kl_mean"] for row in rows]
    # step 3 begins at the policy
    assert [abs(value) < 1e-12 for value in kl] == [True, False, True, False]
    assert not any("loss/kl" in row for row in rows)
    weights = [row["loss/entropy_coef"] for row in rows]  # two updates a step, which count once
    assert weights == pytest.approx([0, DELTA, 2 * DELTA, 3 * DELTA])
    for step in (2, 3):  # before the reference follows, and after
        cut = cut_copy(tmp_path / "whole", tmp_path / f"cut{step}", step=step)
        resume_run(cut, [])
        assert contents(cut) == expected, step


def test_what_trains_is_the_reward_less_the_divergence_of_the_trainers_own_log_probabilities() -> (
    None
):
    options = {"data.eval": None, "preset": "rloo", "loss.kl_coef": 0.5, "optim.lr": 0.01}
    with dapo.session(config=CONFIGS / "tiny.yaml", threads=1, steps=3, **options) as s:
        s.update(s.collect())
        batch = s.collect()
        assert isinstance(s._policy, Policy)
        own = s._policy.record_old_logprobs(batch.samples)
        reference = s._policy.reference_logprobs(batch.samples, step=2)
        tokens = 0
        for group, of_group in zip(batch.groups, batch.rewards, strict=True):
            members = [i for i, sample in enumerate(batch.samples) if sample.group_id == group.id]
            k1 = [sum(own[i].old_logprobs or ()) - sum(reference[i]) for i in members]
            shaped = [group.rewards[batch.samples[i].index] for i in members]
            rewards = [reward - 0.5 * kl for reward, kl in zip(shaped, k1, strict=True)]
            assert of_group == pytest.approx(rewards, abs=1e-5)
            for i, reward in zip(members, rewards, strict=True):
                others = (sum(rewards) - reward) / (len(rewards) - 1)
                assert batch.samples[i].advantage == pytest.approx(reward - others, abs=1e-5)
            tokens += sum(len(batch.samples[i].response_ids) for i in members)
        total = sum(sample.kl or 0.0 for sample in batch.samples)
        assert abs(total) > 1e-3
        assert batch.metrics["reward/kl_mean"] == pytest.approx(total / tokens)
        # the other metrics of rewards are of those before
        shaped = [reward for group in batch.groups for reward in group.rewards]
        assert batch.metrics["reward/trained_mean"] == pytest.approx(sum(shaped) / len(shaped))


def test_the_filter_takes_verdicts_and_not_the_divergence(tmp_path: Path) -> None:
    outcomes = []
    for more in ([], ["loss.kl_coef=0.5", "loss.kl_in=reward", "loss.kl_estimator=k1"]):
        path = tmp_path / str(len(more))
        with new_run(
            tiny("train.num_steps=1", "data.eval=null", "train.save_every=0", *more), path
        ) as run:
            train(run)
        (row,) = [row for row in metrics(path) if row["step"]]
        outcomes.append(
            {
                name: value
                for name, value in row.items()
                if name.startswith(("rollout/groups", "reward/m"))
            }
        )
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["rollout/groups_trained"] == 4


@pytest.mark.parametrize("preset", ["rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_preset_trains_every_group_and_raises_the_reward(preset: str, tmp_path: Path) -> None:
    options = (
        "reward.verifier=dapo.rewards.examples:digit_share",
        "train.num_steps=10",
        "optim.lr=0.01",
    )
    config = tiny(f"preset={preset}", "train.save_every=0", "data.eval=null", *options)
    with new_run(config, tmp_path / "run") as run:
        train(run)
    rows = [row for row in metrics(tmp_path / "run") if row["step"]]
    assert all(
        row["rollout/groups_generated"] == row["rollout/groups_trained"] == 4 for row in rows
    )
    first, last = (sum(row["reward/mean"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last > first + 0.2
