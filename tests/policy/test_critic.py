"""The critic: values as of single sequences, one gradient however it is cut, and state that comes
back bit for bit.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from dapo.algo.gae import explained_variance, value_loss
from dapo.algo.loss import policy_loss
from dapo.config import Config
from dapo.core.errors import CheckpointError, NumericsError
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.policy.checkpoint import SavedWeights
from dapo.policy.critic import Critic
from dapo.policy.packed_forward import use_packed_forward
from dapo.policy.policy import Policy
from dapo.types import Sample
from helpers.tiny_models import VOCABULARY
from helpers.tiny_policies import (
    assert_close,
    branching,
    float64_model,
    groups_of,
    loaded,
    make_policy,
    off_policy,
    plain_scores,
    policy_config,
    ragged,
    weights_of,
    with_masked_tokens,
)


def ppo_config(
    *, microbatch_tokens: int = 64, loss: dict[str, Any] | None = None, **critic: Any
) -> Config:
    """The options of a policy with a critic, which take full steps from the first update."""
    options = policy_config(microbatch_tokens=microbatch_tokens, loss=loss).model_dump()
    return Config.model_validate(
        options | {"advantage": {"estimator": "gae"}, "critic": {"lr": 1e-2, **critic}}
    )


def make_critic(
    model: PreTrainedModel | None = None,
    *,
    with_head: bool = True,
    clip_range: float | None = 0.5,
    **options: Any,
) -> Critic:
    """A critic of the float64 model, with a head that is not zero."""
    model = float64_model() if model is None else model
    use_packed_forward(model)
    critic = Critic(ppo_config(**options), model, clip_range=clip_range)
    if with_head:
        set_head(critic)
    return critic


def set_head(critic: Critic) -> None:
    with torch.no_grad():
        critic.model.head.weight.copy_(
            torch.tensor([uniforms(critic.model.head.in_features, "head")]) * 4 - 2
        )
        critic.model.head.bias.fill_(0.25)


def uniforms(number: int, *key: int | str) -> list[float]:
    return list(keyed_uniforms(keyed_seed("critic", *key), number))


def judged(samples: list[Sample]) -> list[Sample]:
    """The samples with old values and targets of all sizes, as a step gives them to the critic."""
    return [
        replace(
            sample,
            old_values=tuple(2 * u - 1 for u in uniforms(len(sample.mask), "old", i)),
            value_targets=tuple(2 * u - 1 for u in uniforms(len(sample.mask), "target", i)),
            token_advantages=tuple(2 * u - 1 for u in uniforms(len(sample.mask), "advantage", i)),
        )
        for i, sample in enumerate(samples)
    ]


def plain_values(network: PreTrainedModel, critic: Critic, samples: list[Sample]) -> list[Tensor]:
    """V of each response token by the network's own forward over the one sequence."""
    head = torch.nn.Linear(critic.model.head.in_features, 1, dtype=torch.float64)
    head.load_state_dict(critic.model.head.state_dict())
    found = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        found.append(head(hidden[len(sample.prompt_ids) - 1 : -1]).squeeze(1))
    return found


@pytest.mark.parametrize("samples", [ragged, branching], ids=lambda make: make.__name__)
def test_values_are_those_of_each_sequence_on_its_own_whatever_is_shared(
    samples: Callable[[], list[Sample]],
) -> None:
    rows = samples()
    critic = make_critic()
    expected = plain_values(float64_model(), critic, rows)
    for microbatch_tokens in (1, 64, 10_000):
        found = make_critic(microbatch_tokens=microbatch_tokens).values(rows)
        assert [len(row) for row in found] == [len(sample.response_ids) for sample in rows]
        for row, value in zip(found, expected, strict=True):
            assert np.allclose(row, value.detach().numpy(), rtol=0, atol=1e-10)
    assert np.ptp(np.concatenate(found)) > 1


def test_a_value_at_a_beginning_that_responses_share_is_computed_once() -> None:
    critic = make_critic(microbatch_tokens=10_000)
    computed = []
    critic.model.head.register_forward_hook(
        lambda head, inputs, outputs: computed.append(len(outputs))
    )
    rows = [
        replace(each, response_ids=(4, 5, 6, 7), mask=(True,) * 4)
        for each in groups_of([(3, (4, 4, 4))])
    ]
    values = critic.values(rows)
    assert computed == [4]  # three responses of four tokens, all the same
    assert values[0] == values[1] == values[2]


def test_values_are_exactly_zero_before_the_first_update_and_the_policy_stays_as_it_is() -> None:
    policy = Policy(ppo_config(), loaded())
    before = weights_of(policy)
    assert {value for row in policy.values(ragged()) for value in row} == {0.0}
    assert policy.critic is not None
    rows = judged(ragged())
    policy.critic.apply_gradient(policy.critic.backward(rows), step=1)
    assert {value for row in policy.values(rows) for value in row} != {0.0}
    assert_close(weights_of(policy), before, relative=0)
    assert not {name for name in before if "head." in name and "lm_head" not in name}


@pytest.mark.parametrize("clip_range", [None, 0.3])
@pytest.mark.parametrize("samples", [ragged, branching], ids=lambda make: make.__name__)
def test_any_cut_into_microbatches_gives_the_gradient_of_the_whole(
    samples: Callable[[], list[Sample]], clip_range: float | None
) -> None:
    rows = judged(with_masked_tokens(samples()))
    network = float64_model()
    critic = make_critic()
    mask = torch.cat([torch.tensor(row.mask) for row in rows])
    flat = {
        name: torch.cat([torch.tensor(getattr(row, field), dtype=torch.float64) for row in rows])
        for name, field in (("old_values", "old_values"), ("targets", "value_targets"))
    }
    values = torch.cat(plain_values(network, critic, rows))
    weights = mask.double() / mask.sum()
    mean, sums = value_loss(values, **flat, mask=mask, weights=weights, clip_range=clip_range)
    mean.backward()
    expected = {
        f"base_model.{name}": p.grad
        for name, p in network.base_model.named_parameters()
        if p.grad is not None
    }
    for microbatch_tokens in (1, 20, 10_000):
        # of the policy: the critic's is a mean over tokens in any case
        loss = {"aggregate": "sequence"}
        critic = make_critic(microbatch_tokens=microbatch_tokens, clip_range=clip_range, loss=loss)
        found = critic.backward(rows)
        gradients = {name: weight.grad for name, weight in critic._optimizer.master_weights.items()}
        assert_close({name: gradients[name] for name in expected}, expected, relative=1e-10)
        assert found["loss"] == pytest.approx(float(mean.detach()), abs=1e-12)
        assert (found["tokens"], found["clipped"]) == (int(mask.sum()), int(sums["clipped"]))


def test_masked_tokens_do_not_train_the_critic() -> None:
    rows = judged(branching())
    masked = [replace(row, mask=(False,) * len(row.mask)) for row in rows]
    critic = make_critic()
    critic.backward(masked)
    assert not any(
        bool(weight.grad.any()) for weight in critic.model.parameters() if weight.grad is not None
    )
    critic.backward(rows)
    assert any(
        bool(weight.grad.any()) for weight in critic.model.parameters() if weight.grad is not None
    )


def test_the_policy_s_gradient_takes_the_advantage_of_each_token() -> None:
    rows = judged(off_policy(with_masked_tokens(branching())))
    network = float64_model()
    mask = torch.cat([torch.tensor(row.mask) for row in rows])
    old, advantages = (
        torch.cat([torch.tensor(getattr(row, name), dtype=torch.float64) for row in rows])
        for name in ("old_logprobs", "token_advantages")
    )
    logprobs = torch.cat([scores for scores, _ in plain_scores(network, rows, 0.7)])
    loss, _ = policy_loss(
        logprobs, old, advantages, mask, mask.double() / mask.sum(), clip_low=0.2, clip_high=0.28
    )
    loss.backward()
    expected = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    for microbatch_tokens in (1, 10_000):
        config = ppo_config(microbatch_tokens=microbatch_tokens).changed("rollout", temperature=0.7)
        found = Policy(config, loaded(float64_model())).gradient(rows, config.loss)
        assert_close(found, expected, relative=1e-10)


def test_a_response_trains_if_one_of_its_tokens_has_an_advantage() -> None:
    rows = groups_of([(4, (5, 3))])
    flat = [replace(row, token_advantages=(0.0,) * len(row.mask)) for row in rows]
    assert not any(row.has_signal for row in flat)
    balanced = replace(rows[0], advantage=0.0, token_advantages=(1.0, -1.0, 0.0, 0.0, 0.0))
    assert make_policy().update([balanced, flat[1]], step=1)["optim/update_tokens"] == 5
    with pytest.raises(ValueError, match="token_advantages"):
        make_policy().update([replace(balanced, token_advantages=(1.0,))], step=1)


def test_updates_bring_the_values_to_their_targets_and_a_clip_slows_them() -> None:
    rows = judged(ragged())
    errors = {}
    for clip_range in (None, 0.01):
        critic = make_critic(
            loaded(dtype=torch.float32).model, with_head=False, clip_range=clip_range
        )
        rows = [
            replace(row, old_values=(0.0,) * len(row.mask), value_targets=(0.5,) * len(row.mask))
            for row in rows
        ]
        found = [critic.apply_gradient(critic.backward(rows), step=1) for _ in range(20)]
        assert found[0]["critic/loss"] == pytest.approx(0.125)
        assert found[0]["critic/skipped"] == 0
        assert found[0]["critic/grad_norm"] > 0
        assert found[0].get("critic/clip_fraction") == (None if clip_range is None else 0.0)
        # a step has several updates: once all values have moved by more than the range, none has a
        # gradient
        assert found[-1].get("critic/clip_fraction") == (None if clip_range is None else 1.0)
        assert (found[-1]["critic/grad_norm"] > 0) == (clip_range is None)
        errors[clip_range] = np.abs(np.concatenate(critic.values(rows)) - 0.5).mean()
    assert errors[None] < 0.1 < errors[0.01]


def test_a_critic_learns_what_a_response_begins_with_and_cannot_know_it_before() -> None:
    rows = groups_of([(3, (4, 6, 5))] * 8)
    aims = [1.0 if sample.response_ids[0] < VOCABULARY / 2 else -1.0 for sample in rows]
    targets = [(aim,) * len(sample.mask) for sample, aim in zip(rows, aims, strict=True)]
    rows = [replace(s, old_values=t, value_targets=t) for s, t in zip(rows, targets, strict=True)]
    critic = make_critic(
        loaded(dtype=torch.float32).model, with_head=False, clip_range=None, microbatch_tokens=1000
    )
    for _ in range(60):
        critic.apply_gradient(critic.backward(rows), step=1)
    values = critic.values(rows)

    def explained(first: bool) -> float:
        chosen = [row[:1] if first else row[1:] for row in values]
        wanted = [row[:1] if first else row[1:] for row in targets]
        found = explained_variance(
            torch.tensor(np.concatenate(chosen)), torch.tensor(np.concatenate(wanted))
        )
        assert found is not None
        return found

    assert 0.9 < explained(first=False) <= 1
    beginnings = {sample.group_id: row[0] for sample, row in zip(rows, values, strict=True)}
    # before the first token all responses to a prompt have one value
    assert all(
        row[0] == beginnings[sample.group_id] for sample, row in zip(rows, values, strict=True)
    )
    assert explained(first=True) < 0.9


def test_the_learning_rate_is_the_critics_own_in_the_shape_of_the_policys() -> None:
    config = ppo_config(lr=0.01).changed("optim", warmup_steps=4, weight_decay=0.0)
    model = loaded(dtype=torch.float32).model
    use_packed_forward(model)
    critic = Critic(config, model)
    rows = judged(ragged())
    critic.apply_gradient(
        critic.backward(rows), step=2
    )  # half of the warm-up: AdamW's first step is as long as its rate
    assert float(critic.model.head.bias.detach().abs()) == pytest.approx(0.005, rel=1e-3)


def test_a_loss_that_is_not_finite_skips_the_update_and_lost_weights_end_the_run(
    tmp_path: Path,
) -> None:
    policy = Policy(ppo_config(), loaded())
    critic = policy.critic
    assert critic is not None
    rows = judged(ragged())
    broken = [replace(rows[0], value_targets=(float("nan"),) * len(rows[0].mask)), *rows[1:]]
    assert critic.apply_gradient(critic.backward(broken), step=1)["critic/skipped"] == 1
    assert policy.skipped_in_a_row == 1
    assert {value for row in critic.values(rows) for value in row} == {0.0}
    with torch.no_grad():
        critic.model.head.bias.fill_(float("inf"))
    with pytest.raises(
        NumericsError, match=r"look at critic/loss and critic/grad_norm of the steps before"
    ):
        policy.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_policy_and_its_critic_come_back_bit_for_bit_and_an_export_has_no_critic(
    tmp_path: Path,
) -> None:
    rows = judged(ragged())
    policy = Policy(ppo_config(), loaded())
    snapshots = tmp_path / "snapshot"
    policy.update(rows, step=1)
    snapshots.mkdir()
    write = policy.snapshot()
    policy.save(tmp_path)
    again = Policy(ppo_config(), loaded())
    again.load(tmp_path)
    assert again.values(rows) == policy.values(rows)
    for step in (2, 3):
        assert again.update(rows, step=step) == policy.update(rows, step=step)
    assert again.values(rows) == policy.values(rows)
    write(snapshots)  # of before the last two updates
    for path in sorted((tmp_path / "critic").iterdir()):
        assert path.read_bytes() == (snapshots / "critic" / path.name).read_bytes()
    names = {path.name for path in (tmp_path / "critic").iterdir()}
    assert names == {
        "weights.safetensors",
        "exp_avg.safetensors",
        "exp_avg_sq.safetensors",
        "policy.json",
    }
    assert {name for name, _ in SavedWeights(tmp_path).named_tensors()} == weights_of(policy).keys()
    assert "head.weight" in load_file(tmp_path / "critic" / "weights.safetensors")


def test_a_checkpoint_without_a_critic_is_refused_and_one_with_it_serves_another_estimator(
    tmp_path: Path,
) -> None:
    make_policy().save(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"holds no critic, because its run did not use advantage\.estimator=gae",
    ):
        Policy(ppo_config(), loaded()).load(tmp_path)
    both = tmp_path / "both"
    both.mkdir()
    Policy(ppo_config(), loaded()).save(both)
    make_policy().load(both)


def test_while_the_critic_pretrains_the_policy_stays_and_its_optimiser_too() -> None:
    policy = Policy(ppo_config(pretrain_steps=2), loaded())
    rows = judged(ragged())
    before = weights_of(policy)
    for step in (1, 2):
        metrics = policy.update(rows, step=step)
        assert (metrics["optim/lr"], metrics["optim/skipped"], metrics["critic/skipped"]) == (
            0,
            0,
            0,
        )
    assert_close(weights_of(policy), before, relative=0)
    metrics = policy.update(rows, step=3)
    assert metrics["optim/lr"] > 0
    assert "loss/entropy" in metrics
    assert any(not torch.equal(weights_of(policy)[name], weight) for name, weight in before.items())


def test_in_bfloat16_the_head_and_the_master_weights_are_float32() -> None:
    policy = Policy(ppo_config(), loaded(dtype=torch.bfloat16))
    assert policy.critic is not None
    rows = judged(ragged())
    for _ in range(3):
        policy.critic.apply_gradient(policy.critic.backward(rows), step=1)
    assert policy.critic.model.head.weight.dtype == torch.float32
    assert {weight.dtype for weight in policy.critic._optimizer.master_weights.values()} == {
        torch.float32
    }
    values = np.concatenate(policy.values(rows))
    assert values.dtype == np.float32
    assert np.ptp(values) > 0


def test_recomputed_layers_give_the_same_gradient() -> None:
    rows = judged(ragged())
    gradients = []
    for recompute in (False, True):
        config = ppo_config().changed("train", recompute=recompute)
        critic = Policy(config, loaded()).critic
        assert critic is not None
        set_head(critic)
        critic.backward(rows)
        gradients.append(
            {name: weight.grad for name, weight in critic._optimizer.master_weights.items()}
        )
    assert_close(gradients[1], gradients[0], relative=0)  # type: ignore[arg-type]
